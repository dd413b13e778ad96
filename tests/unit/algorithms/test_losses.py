from __future__ import annotations

import math

import pytest
import torch

from megarl.algorithms import ClipRange, MinibatchCounts, kl_penalty, ppo_clip, token_weights

CLIP = ClipRange(0.2, 0.2, 3.0)


def loss_at(log_ratio: float, advantage: float, clip: ClipRange = CLIP) -> float:
    out = ppo_clip(torch.tensor([log_ratio]), torch.zeros(1), torch.tensor([advantage]), clip=clip)
    return float(out.loss)


def test_positive_advantage_is_clipped_above() -> None:
    assert loss_at(0.5, 1.0) == pytest.approx(-1.2)
    assert loss_at(0.1, 1.0) == pytest.approx(-math.exp(0.1))
    assert loss_at(-0.5, 1.0) == pytest.approx(-math.exp(-0.5))


def test_a_smaller_clip_range_is_not_ignored() -> None:
    assert loss_at(0.15, 1.0, ClipRange(0.1, 0.1, 3.0)) == pytest.approx(-1.1)


def test_negative_advantage_is_clipped_below_and_bounded_by_the_dual_clip() -> None:
    assert loss_at(-0.5, -1.0) == pytest.approx(0.8)
    assert loss_at(0.5, -1.0) == pytest.approx(math.exp(0.5))
    assert loss_at(2.0, -1.0) == pytest.approx(3.0)


def test_gradient_is_zero_exactly_where_a_clip_holds() -> None:
    log_probs = torch.tensor([0.5, 0.1, -0.5, 2.0, -0.1], requires_grad=True)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0])
    out = ppo_clip(log_probs, torch.zeros(5), advantages, clip=CLIP)
    out.loss.sum().backward()
    assert log_probs.grad is not None
    expected = [0.0, -math.exp(0.1), 0.0, 0.0, math.exp(-0.1)]
    assert log_probs.grad.tolist() == pytest.approx(expected)
    assert out.is_clipped.tolist() == [1, 0, 1, 0, 0]
    assert out.is_clipped_dual.tolist() == [0, 0, 0, 1, 0]


def test_token_mean_of_lengths_one_and_three_is_one_half_at_any_split() -> None:
    """Lengths 1 and 3, advantages +1 and -1, ratio 1: (-1 + 3) / 4 = 0.5, whole or in parts."""
    counts = MinibatchCounts(num_tokens=4, num_sequences=2)
    together = token_weights(
        "token_mean", torch.ones(4), torch.tensor([0, 1, 4]), counts, max_length=8
    )
    loss = torch.tensor([-1.0, 1.0, 1.0, 1.0])
    apart = [
        (
            token_weights("token_mean", torch.ones(n), torch.tensor([0, n]), counts, max_length=8)
            * part
        ).sum()
        for n, part in ((1, loss[:1]), (3, loss[1:]))
    ]
    assert float((together * loss).sum()) == pytest.approx(0.5)
    assert float(sum(apart)) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_mean", [1 / 3, 0, 1 / 3, 1 / 3, 0]),
        ("token_sum", [1, 0, 1, 1, 0]),
        ("seq_mean_token_sum", [1 / 2, 0, 1 / 2, 1 / 2, 0]),
        ("seq_mean_token_sum_norm", [1 / 20, 0, 1 / 20, 1 / 20, 0]),
        ("seq_mean_token_mean", [1 / 2, 0, 1 / 4, 1 / 4, 0]),
    ],
)
def test_weights_of_each_aggregation(mode: str, expected: list[float]) -> None:
    """Sequences [1,0], [1,1] and a fully masked [0]: 3 trained tokens in 2 sequences.

    The longest allowed is 10.
    """
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0])
    cu_seqlens = torch.tensor([0, 2, 4, 5], dtype=torch.int32)
    weights = token_weights(mode, mask, cu_seqlens, MinibatchCounts(3, 2), max_length=10)
    assert weights.tolist() == pytest.approx(expected)


def test_a_minibatch_without_trained_tokens_has_zero_weights() -> None:
    weights = token_weights(
        "token_mean", torch.zeros(3), torch.tensor([0, 3]), MinibatchCounts(0, 0), max_length=4
    )
    assert weights.tolist() == [0, 0, 0]


def test_kl_estimators_at_a_known_difference() -> None:
    log_probs, ref = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    assert kl_penalty(log_probs, ref, "k1").tolist() == pytest.approx([0.5, -1.0])
    assert kl_penalty(log_probs, ref, "abs").tolist() == pytest.approx([0.5, 1.0])
    assert kl_penalty(log_probs, ref, "k2").tolist() == pytest.approx([0.125, 0.5])
    expected = [math.exp(-0.5) - 1 + 0.5, math.e - 1 - 1]
    assert kl_penalty(log_probs, ref, "k3").tolist() == pytest.approx(expected)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="k9"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k9")
