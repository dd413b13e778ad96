from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megarl.algorithms import (
    POLICY_LOSSES,
    LossInputs,
    LossSettings,
    MinibatchCounts,
    TokenLoss,
    aggregate,
    token_weights,
    weighted_loss,
)
from megarl.algorithms.value_loss import clipped_value_loss

SETTINGS = LossSettings(clip_low=0.2, clip_high=0.2)


def evaluate(
    log_ratio: list[float],
    advantages: list[float],
    *,
    name: str = "ppo_clip",
    settings: LossSettings = SETTINGS,
    old: float = 0.0,
) -> tuple[TokenLoss, torch.Tensor]:
    """(token losses, gradient) of one sequence."""
    log_probs = torch.tensor([old + x for x in log_ratio], dtype=torch.float64, requires_grad=True)
    tokens = LossInputs(
        log_probs=log_probs,
        old_log_probs=torch.full_like(log_probs, old).detach(),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        response_mask=torch.ones_like(log_probs).detach(),
        cu_seqlens=torch.tensor([0, len(log_ratio)], dtype=torch.int32),
    )
    out = POLICY_LOSSES[name](tokens, settings)
    out.loss.sum().backward()
    assert log_probs.grad is not None
    return replace(out, loss=out.loss.detach()), log_probs.grad


def loss_at(log_ratio: float, advantage: float, settings: LossSettings = SETTINGS) -> float:
    return float(evaluate([log_ratio], [advantage], settings=settings)[0].loss)


def test_positive_advantage_is_clipped_above() -> None:
    assert loss_at(0.5, 1.0) == pytest.approx(-1.2)
    assert loss_at(0.1, 1.0) == pytest.approx(-math.exp(0.1))
    assert loss_at(-0.5, 1.0) == pytest.approx(-math.exp(-0.5))


def test_a_smaller_clip_range_is_not_ignored() -> None:
    assert loss_at(0.15, 1.0, LossSettings(clip_low=0.1, clip_high=0.1)) == pytest.approx(-1.1)


def test_negative_advantage_is_clipped_below_and_bounded_by_the_dual_clip() -> None:
    assert loss_at(-0.5, -1.0) == pytest.approx(0.8)
    assert loss_at(0.5, -1.0) == pytest.approx(math.exp(0.5))
    assert loss_at(2.0, -1.0) == pytest.approx(3.0)


def test_gradient_of_ppo_is_zero_exactly_where_a_clip_holds() -> None:
    out, grad = evaluate([0.5, 0.1, -0.5, 2.0, -0.1], [1.0, 1.0, -1.0, -1.0, -1.0])
    expected = [0.0, -math.exp(0.1), 0.0, 0.0, math.exp(-0.1)]
    assert grad.tolist() == pytest.approx(expected)
    assert out.is_clipped.tolist() == [1, 0, 1, 0, 0]
    assert out.is_clipped_dual.tolist() == [0, 0, 0, 1, 0]


def test_old_log_probs_are_used_and_not_silently_the_new_ones() -> None:
    out, _ = evaluate([0.5], [1.0], old=-1.0)
    assert float(out.ratio) == pytest.approx(1.6487, abs=1e-4)
    assert float(out.loss) == pytest.approx(-1.2)


def test_gspo_clips_the_sequence_by_its_mean_log_ratio() -> None:
    """Log-ratios .3 and -.1: s = e^.1 on both tokens; A = 1, upper bound 1.05: both clipped."""
    out, grad = evaluate([0.3, -0.1], [1.0, 1.0], name="gspo")
    assert out.ratio.tolist() == pytest.approx([math.exp(0.1)] * 2)
    assert grad.tolist() == pytest.approx([-math.exp(0.1)] * 2)
    tight = LossSettings(clip_low=0.05, clip_high=0.05)
    out, grad = evaluate([0.3, -0.1], [1.0, 1.0], name="gspo", settings=tight)
    assert out.loss.tolist() == pytest.approx([-1.05] * 2)
    assert grad.tolist() == [0, 0]


def test_geo_mean_clips_each_log_ratio_before_the_mean() -> None:
    """Log-ratios .3 (clipped to .2) and -.1, A = 1: loss -e^.05, no gradient on the first."""
    out, grad = evaluate([0.3, -0.1], [1.0, 1.0], name="geo_mean")
    assert out.loss.tolist() == pytest.approx([-math.exp(0.05)] * 2)
    assert grad.tolist() == pytest.approx([0.0, -math.exp(0.05)])
    assert out.is_clipped.tolist() == [1, 0]


def test_sapo_gate_at_ratio_one_has_the_policy_gradient() -> None:
    out, grad = evaluate([0.0, 0.0], [2.0, -3.0], name="sapo")
    assert grad.tolist() == pytest.approx([-2.0, 3.0])
    assert out.loss.tolist() == pytest.approx([-2.0 * 2.0, 3.0 * 2.0 / 1.05])


def test_cispo_bounds_the_weight_and_keeps_the_gradient() -> None:
    out, grad = evaluate([0.5, -0.5], [1.0, -1.0], name="cispo", old=-1.0)
    assert grad.tolist() == pytest.approx([-1.2, 0.8])
    assert out.loss.tolist() == pytest.approx([-1.2 * -0.5, 0.8 * -1.5])


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_dppo_stops_only_moves_too_far_in_the_direction_of_the_advantage(name: str) -> None:
    """From .2 to .6 (total variation .4, binary KL .335): stopped where A > 0, let back where A <
    0.
    """
    settings = LossSettings(clip_low=0.3, clip_high=0.3, clip_dual=2.0)
    move = [math.log(3.0)] * 2
    out, grad = evaluate(move, [1.0, -1.0], name=name, settings=settings, old=math.log(0.2))
    assert grad.tolist() == pytest.approx([0.0, 2.0])
    assert out.is_clipped.tolist() == [1, 0]
    assert out.is_clipped_dual.tolist() == [0, 1]


def test_dro_pulls_back_to_the_old_policy() -> None:
    out, grad = evaluate([0.5], [1.0], name="dro", settings=LossSettings(clip_low=0, clip_high=0))
    assert float(out.loss) == pytest.approx(-0.5 + 0.05 * 0.25)
    assert float(grad) == pytest.approx(-1 + 0.1 * 0.5)


@pytest.mark.parametrize("name", ["reinforce", "gpg"])
def test_reinforce_is_minus_advantage_times_log_prob(name: str) -> None:
    out, grad = evaluate([0.5], [2.0], name=name, old=-1.5)
    assert float(out.loss) == pytest.approx(2.0)
    assert float(grad) == pytest.approx(-2.0)


def test_rollout_weights_scale_the_token_losses() -> None:
    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    tokens = LossInputs(
        log_probs=log_probs, old_log_probs=log_probs.detach(), advantages=torch.ones(2),
        response_mask=torch.ones(2), cu_seqlens=torch.tensor([0, 2]),
    )  # fmt: skip
    loss, _ = weighted_loss(
        POLICY_LOSSES["ppo_clip"], tokens, SETTINGS, weights=torch.tensor([0.5, 0.5]),
        rollout_weights=torch.tensor([0.5, 1.0]),
    )  # fmt: skip
    loss.backward()
    assert float(loss.detach()) == pytest.approx(-0.75)
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([-0.25, -0.5])


def test_the_value_loss_takes_the_larger_of_plain_and_clipped() -> None:
    """v_old 0, clip .5, R 0: v = 2 costs 4/2; v = 1 towards R = 2 is held at .5: 2.25/2."""
    values = torch.tensor([2.0, 1.0], requires_grad=True)
    loss, clipped = clipped_value_loss(values, torch.zeros(2), torch.tensor([0.0, 2.0]), clip=0.5)
    assert loss.tolist() == pytest.approx([2.0, 1.125])
    assert clipped.tolist() == [0, 1]
    loss.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([2.0, 0.0])


def test_token_mean_of_lengths_one_and_three_is_one_half_at_any_split() -> None:
    """Lengths 1 and 3, advantages +1 and -1, ratio 1: (-1 + 3) / 4 = 0.5, whole or one sequence at
    a time.
    """
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
    """Sequences [1,0], [1,1] and a fully masked [0]: 3 trained tokens in 2 sequences, longest
    allowed 10.
    """
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0])
    cu_seqlens = torch.tensor([0, 2, 4, 5], dtype=torch.int32)
    assert MinibatchCounts.of(mask, cu_seqlens) == MinibatchCounts(3, 2)
    weights = token_weights(mode, mask, cu_seqlens, MinibatchCounts(3, 2), max_length=10)
    assert weights.tolist() == pytest.approx(expected)
    loss = torch.tensor([1.0, math.nan, 1.0, 1.0, math.nan])
    assert float(aggregate(loss, weights, mask)) == pytest.approx(sum(expected))


def test_a_minibatch_without_trained_tokens_has_zero_weights() -> None:
    weights = token_weights(
        "token_mean", torch.zeros(3), torch.tensor([0, 3]), MinibatchCounts(0, 0), max_length=4
    )
    assert weights.tolist() == [0, 0, 0]


def test_an_unknown_aggregation_is_refused() -> None:
    with pytest.raises(ValueError, match="median"):
        token_weights(
            "median", torch.ones(1), torch.tensor([0, 1]), MinibatchCounts(1, 1), max_length=1
        )
