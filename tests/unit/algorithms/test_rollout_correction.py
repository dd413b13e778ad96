from __future__ import annotations

import math

import pytest
import torch

from megarl.algorithms.mismatch import policy_mismatch, rejection_metrics, weight_metrics
from megarl.algorithms.rollout_correction import (
    REJECTIONS,
    Rejection,
    normalize_weights,
    raw_weights,
    reject,
    restrict_weights,
    weight_mean,
)

# two sequences; the last token is masked and its NaN must not be seen
LOG_RHO = torch.tensor([math.log(2.0), math.log(0.5), math.log(4.0), math.nan], dtype=torch.float64)
MASK = torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
CU_SEQLENS = torch.tensor([0, 2, 4], dtype=torch.int32)


def test_weights_by_token_and_by_sequence() -> None:
    token = raw_weights(LOG_RHO, MASK, CU_SEQLENS, level="token")
    assert token.tolist() == pytest.approx([2, 0.5, 4, 0])
    sequence = raw_weights(LOG_RHO, MASK, CU_SEQLENS, level="sequence")
    assert sequence.tolist() == pytest.approx([1, 1, 4, 0])
    with pytest.raises(ValueError, match="turn"):
        raw_weights(LOG_RHO, MASK, CU_SEQLENS, level="turn")


def test_one_bound_truncates_and_two_bounds_mask() -> None:
    weights = torch.tensor([0.2, 1.0, 3.0])
    assert restrict_weights(weights, high=2.0, low=None).tolist() == pytest.approx([0.2, 1, 2])
    assert restrict_weights(weights, high=2.0, low=0.5).tolist() == [0, 1, 0]


@pytest.mark.parametrize(("level", "mean"), [("token", 6.5 / 3), ("sequence", (1.25 + 4) / 2)])
def test_normalised_weights_do_not_depend_on_the_split(level: str, mean: float) -> None:
    weights = raw_weights(LOG_RHO, MASK, CU_SEQLENS, level="token")
    whole = weight_mean(weights, MASK, CU_SEQLENS, level=level)
    halves = [
        weight_mean(weights[s], MASK[s], torch.tensor([0, 2]), level=level)
        for s in (slice(0, 2), slice(2, 4))
    ]
    assert torch.allclose(whole, halves[0] + halves[1], atol=1e-15)
    out = normalize_weights(weights, whole)
    assert out.tolist() == pytest.approx([2 / mean, 0.5 / mean, 4 / mean, 0])


def test_k1_bounds_are_bounds_on_the_ratio() -> None:
    """Ratios 2, .5 and 4 with bounds .4 and 2.5: only 4 is rejected. On the inverse, 2 would stay
    and .5 too.
    """
    kept = reject([Rejection("token_k1", high=2.5, low=0.4)], LOG_RHO, MASK, CU_SEQLENS)
    assert kept.tolist() == [1, 1, 0, 0]
    kept = reject([Rejection("token_k1", high=8.0, low=1.0)], LOG_RHO, MASK, CU_SEQLENS)
    assert kept.tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize(
    ("name", "high", "kept"),
    [
        ("token_k2", 0.3, [1, 1, 0]),  # log(2)^2 / 2 = .24, log(4)^2 / 2 = .96
        ("token_k3", 0.25, [0, 1, 0]),  # 2 - 1 - log 2 = .31, .5 - 1 + log 2 = .19
        ("seq_sum_k2", 0.3, [0, 0, 0]),  # .48
        ("seq_mean_k2", 0.3, [1, 1, 0]),
        ("seq_max_k3", 0.4, [1, 1, 0]),
        ("seq_sum_k1", 1.5, [1, 1, 0]),  # product 1 and 4
        ("seq_mean_k1", 4.5, [1, 1, 1]),
    ],
)
def test_rejection_by_each_kind_of_criterion(name: str, high: float, kept: list[float]) -> None:
    out = reject([Rejection(name, high=high)], LOG_RHO, MASK, CU_SEQLENS)
    assert out.tolist() == [*kept, 0]


def test_a_token_must_pass_every_criterion() -> None:
    both = [Rejection("token_k1", high=8.0, low=1.0), Rejection("token_k2", high=0.3)]
    assert reject(both, LOG_RHO, MASK, CU_SEQLENS).tolist() == [1, 0, 0, 0]


def test_wrong_names_and_bounds_are_refused() -> None:
    with pytest.raises(ValueError, match="seq_min_k1"):
        Rejection("seq_min_k1", high=2.0)
    with pytest.raises(ValueError, match="low=3"):
        Rejection("token_k1", high=2.0, low=3.0)


def padded(values: torch.Tensor, tail: float) -> torch.Tensor:
    return torch.cat([values, torch.full((2,), tail, dtype=values.dtype)])


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_padding_sequences_change_no_weight_metric(level: str) -> None:
    def metrics(log_rho: torch.Tensor, mask: torch.Tensor, cu: torch.Tensor) -> dict[str, float]:
        raw = raw_weights(log_rho, mask, cu, level=level)
        weights = restrict_weights(raw, high=3.0, low=None)
        return weight_metrics(weights, raw, mask, cu, level=level, high=3.0, low=None)

    longer = torch.tensor([0, 2, 4, 4, 6], dtype=torch.int32)
    plain = metrics(LOG_RHO, MASK, CU_SEQLENS)
    assert plain == pytest.approx(metrics(padded(LOG_RHO, 9.0), padded(MASK, 0.0), longer))


def test_equal_policies_have_weight_one_whatever_the_padding() -> None:
    mask = torch.tensor([1.0, 1.0, 1.0, 0.0])
    cu_seqlens, zeros = torch.tensor([0, 1, 2, 3, 4]), torch.zeros(4)
    raw = raw_weights(zeros, mask, cu_seqlens, level="token")
    out = weight_metrics(raw, raw, mask, cu_seqlens, level="token", high=2.0, low=None)
    assert (out["seq_mean"], out["seq_min"], out["eff_sample_size"]) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("name", REJECTIONS)
def test_padding_sequences_change_no_rejection_metric(name: str) -> None:
    longer = torch.tensor([0, 2, 4, 4, 6], dtype=torch.int32)
    rejection = Rejection(name, high=1.5)
    plain = rejection_metrics(rejection, LOG_RHO, MASK, CU_SEQLENS)
    wide = rejection_metrics(rejection, padded(LOG_RHO, 9.0), padded(MASK, 0.0), longer)
    assert plain == pytest.approx(wide)


def test_the_mean_kl_counts_trained_rows_only() -> None:
    """Three rows of KL .4 and a padding row: .4, not .3."""
    out = policy_mismatch(
        torch.tensor([-0.4, -0.4, -0.4, math.nan]), torch.zeros(4), torch.tensor([1.0, 1, 1, 0]),
        torch.tensor([0, 1, 2, 3, 4]),
    )  # fmt: skip
    assert out["kl"] == pytest.approx(0.4)
    assert out["training_log_ppl"] == pytest.approx(0.4)


def test_mismatch_of_nothing_is_nothing() -> None:
    assert (
        policy_mismatch(torch.zeros(1), torch.zeros(1), torch.zeros(1), torch.tensor([0, 1])) == {}
    )
