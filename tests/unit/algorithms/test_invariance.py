"""Loss, gradient and metrics do not depend on how a minibatch is laid out.

A minibatch of sequences is trained on in 1, 2, 4 or 8 micro-batches, in any order of packing, with
empty and fully masked sequences added and with NaN under the mask. Each layout gives its loss as
the sum of its parts, its gradient per token, and its metrics as (sum, count) pairs, all compared in
float64. What the reference of every comparison is worth is shown elsewhere (test_losses.py,
tests/conformance). Parametrised over the registries: a loss is covered by being registered. A
sequence is never cut: context parallelism is not covered.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
import torch

from megarl.algorithms import (
    AGGREGATIONS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    SELECTIONS,
    LossInputs,
    LossSettings,
    MinibatchCounts,
    aggregate,
    keep,
    kl_penalty,
    token_weights,
    weighted_loss,
)
from megarl.algorithms.rollout_correction import (
    Rejection,
    normalize_weights,
    raw_weights,
    reject,
    restrict_weights,
    weight_mean,
)

SETTINGS = LossSettings(
    clip_low=0.1, clip_high=0.15, clip_dual=1.2, cov_frac=0.2, cov_low=0.01, cov_high=5.0
)
ATOL = 1e-12  # a few dozen float64 sums of order one in another order
LENGTHS = (7, 3, 5, 1, 6, 2, 7, 4)


@dataclass
class Sequence:
    """Per-token rows of one sequence, and its place in the canonical order."""

    number: int
    log_probs: torch.Tensor
    old: torch.Tensor
    ref: torch.Tensor
    rollout: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor


@dataclass
class Result:
    loss: float = 0.0
    gradient: dict[int, torch.Tensor] = field(default_factory=dict)  # by number of the sequence
    sums: torch.Tensor = field(default_factory=lambda: torch.zeros(5, dtype=torch.float64))


def make(number: int, length: int, generator: torch.Generator) -> Sequence:
    def draw() -> torch.Tensor:
        return torch.randn(length, dtype=torch.float64, generator=generator)

    old = -draw().abs()
    mask = torch.ones(length, dtype=torch.float64)
    if length > 4:
        mask[1:3] = 0.0  # a tool's output
    return Sequence(
        number, old + 0.3 * draw(), old, old + 0.3 * draw(), old + 0.2 * draw(), draw(), mask
    )


def minibatch() -> list[Sequence]:
    generator = torch.Generator().manual_seed(0)
    return [make(i, n, generator) for i, n in enumerate(LENGTHS)]


def split(sequences: list[Sequence], num_parts: int) -> list[list[Sequence]]:
    return [sequences[i::num_parts] for i in range(num_parts)]


def cat(part: list[Sequence], name: str) -> torch.Tensor:
    return torch.cat([getattr(s, name) for s in part])


def cu_seqlens(part: list[Sequence]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(s.mask.numel() for s in part)], dtype=torch.int32)


def select(name: str, parts: list[list[Sequence]]) -> dict[int, torch.Tensor]:
    """{sequence: chosen tokens}, from the trained tokens of all parts in canonical order."""
    ordered = sorted((s for part in parts for s in part), key=lambda s: s.number)
    trained = cat(ordered, "mask") > 0
    chosen = torch.zeros_like(trained)
    chosen[trained] = SELECTIONS[name](
        *(cat(ordered, field)[trained] for field in ("log_probs", "old", "advantages")),
        SETTINGS, seed=3,
    )  # fmt: skip
    return dict(
        zip(
            (s.number for s in ordered),
            chosen.split([s.mask.numel() for s in ordered]),
            strict=True,
        )
    )


def train(
    parts: list[list[Sequence]],
    loss_name: str,
    mode: str,
    *,
    estimator: str = "k3",
    corrected: bool = False,
) -> Result:
    """What a trainer does with these micro-batches: counts once, then a sum over them."""
    masks = [cat(p, "mask") for p in parts]
    if corrected:
        rejections = [Rejection("token_k1", high=1.4), Rejection("seq_mean_k3", high=0.1)]
        masks = [
            reject(rejections, cat(p, "old") - cat(p, "rollout"), m, cu_seqlens(p))
            for p, m in zip(parts, masks, strict=True)
        ]
    counts = MinibatchCounts(0, 0)
    total = torch.zeros(2, dtype=torch.float64)
    weights: list[torch.Tensor] = []
    for part, mask in zip(parts, masks, strict=True):
        counts = counts + MinibatchCounts.of(mask, cu_seqlens(part))
        log_rho = cat(part, "old") - cat(part, "rollout")
        raw = raw_weights(log_rho, mask, cu_seqlens(part), level="sequence")
        weights.append(restrict_weights(raw, high=1.5, low=None))
        total += weight_mean(weights[-1], mask, cu_seqlens(part), level="sequence")
    selected = select(loss_name, parts) if loss_name in SELECTIONS else {}
    out = Result()
    for part, mask, weight in zip(parts, masks, weights, strict=True):
        log_probs = cat(part, "log_probs").requires_grad_()
        tokens = LossInputs(
            log_probs=log_probs, old_log_probs=cat(part, "old"), advantages=cat(part, "advantages"),
            response_mask=mask, cu_seqlens=cu_seqlens(part),
            selected=torch.cat([selected[s.number] for s in part]) if selected else None,
        )  # fmt: skip
        shares = token_weights(mode, mask, cu_seqlens(part), counts, max_length=9)
        policy, token_loss = weighted_loss(
            POLICY_LOSSES[loss_name], tokens, SETTINGS, weights=shares,
            rollout_weights=normalize_weights(weight, total) if corrected else None,
        )  # fmt: skip
        kl = kl_penalty(keep(log_probs, mask), keep(cat(part, "ref"), mask), estimator)
        loss = policy + 0.1 * aggregate(kl, shares, mask)
        loss.backward()
        assert log_probs.grad is not None
        out.loss += float(loss.detach())
        out.gradient |= dict(
            zip(
                (s.number for s in part),
                log_probs.grad.split([s.mask.numel() for s in part]),
                strict=True,
            )
        )
        metrics = (token_loss.ratio, token_loss.is_clipped, token_loss.is_clipped_dual, kl.detach())
        out.sums += torch.stack([*(keep(m, mask).sum() for m in metrics), mask.sum()])
    return out


def assert_equal(result: Result, expected: Result, atol: float = ATOL) -> None:
    assert result.loss == pytest.approx(expected.loss, abs=atol, rel=0)
    assert torch.allclose(result.sums, expected.sums, atol=atol, rtol=0)
    for number, gradient in expected.gradient.items():
        assert torch.allclose(result.gradient[number], gradient, atol=atol, rtol=0)


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
@pytest.mark.parametrize("corrected", [False, True], ids=["plain", "corrected"])
def test_a_minibatch_trains_the_same_however_it_is_laid_out(
    name: str, mode: str, corrected: bool
) -> None:
    sequences = minibatch()
    expected = train([sequences], name, mode, corrected=corrected)
    assert expected.loss != 0.0
    generator = torch.Generator().manual_seed(1)
    for num_parts in (1, 2, 4, 8):
        order = torch.randperm(len(sequences), generator=generator).tolist()
        parts = split([sequences[i] for i in order], num_parts)
        assert_equal(train(parts, name, mode, corrected=corrected), expected)
    masked = make(100, 6, generator)
    masked.mask = torch.zeros_like(masked.mask)
    empty = make(101, 0, generator)
    parts = [[empty, *sequences[:3], masked], [empty, masked], [*sequences[3:], empty]]
    assert_equal(train(parts, name, mode, corrected=corrected), expected)


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
@pytest.mark.parametrize("corrected", [False, True], ids=["plain", "corrected"])
def test_nan_under_the_mask_reaches_neither_loss_nor_gradient(
    name: str, mode: str, corrected: bool
) -> None:
    expected = train([minibatch()], name, mode, corrected=corrected)
    sequences = minibatch()
    for sequence in sequences:
        for rows in ("log_probs", "old", "ref", "rollout", "advantages"):
            getattr(sequence, rows)[sequence.mask == 0] = torch.nan
    result = train(split(sequences, 2), name, mode, corrected=corrected)
    assert_equal(result, expected)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_in_float32_a_split_changes_the_token_mean_by_rounding_only(name: str) -> None:
    """Loss and gradients to 1e-6; the metric sums, of order 30, to 1e-5."""
    sequences = minibatch()
    for s in sequences:
        for rows in ("log_probs", "old", "ref", "rollout", "advantages", "mask"):
            setattr(s, rows, getattr(s, rows).float())
    expected = train([sequences], name, "token_mean")
    for num_parts in (2, 4, 8):
        result = train(split(sequences, num_parts), name, "token_mean")
        assert torch.allclose(result.sums, expected.sums, atol=1e-5, rtol=0)
        assert_equal(Result(result.loss, result.gradient, expected.sums), expected, atol=1e-6)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_nan_at_a_trained_token_is_seen_in_the_loss(name: str) -> None:
    """The guard before the optimizer step looks at the loss."""
    sequences = minibatch()
    sequences[0].log_probs[0] = torch.nan
    assert torch.tensor(train(split(sequences, 2), name, "token_mean").loss).isnan()


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_the_kl_term_is_the_same_at_any_split(estimator: str) -> None:
    sequences = minibatch()
    expected = train([sequences], "ppo_clip", "token_mean", estimator=estimator)
    assert_equal(
        train(split(sequences, 4), "ppo_clip", "token_mean", estimator=estimator), expected
    )


@pytest.mark.parametrize("name", sorted(SELECTIONS))
def test_a_selection_holds_back_the_given_share_of_the_minibatch(name: str) -> None:
    """27 trained tokens, a fifth of them: 5. Per micro-batch it would be at least one each."""
    sequences = minibatch()
    num_trained = int(cat(sequences, "mask").sum())
    num_chosen = sum(int(x.sum()) for x in select(name, split(sequences, 8)).values())
    assert num_chosen == int(0.2 * num_trained)
