"""How far the trainer's policy is from the engine's: numbers to log. Over the trained tokens of a
minibatch.

Sequences without a trained token count nowhere: an empty or padding row changes no number.
"""

from __future__ import annotations

import torch

from megarl.algorithms.packed import (
    keep,
    masked_mean,
    sequence_lengths,
    sequence_mean,
    sequence_sum,
)
from megarl.algorithms.rollout_correction import LIMIT, Rejection, divergence, rejection_statistic

__all__ = ["policy_mismatch", "rejection_metrics", "weight_metrics"]


def _used(values: torch.Tensor, mask: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Per-sequence values of the sequences that have a trained token."""
    return values[sequence_lengths(mask, cu_seqlens) > 0]


def _frac(flags: torch.Tensor, mask: torch.Tensor) -> float:
    return float(masked_mean(flags.to(mask.dtype), mask))


def _std(values: torch.Tensor, mask: torch.Tensor) -> float:
    """Population standard deviation over the trained tokens."""
    variance = masked_mean(values.square(), mask) - masked_mean(values, mask).square()
    return float(variance.clamp(min=0).sqrt())


def _sequence_metrics(values: torch.Tensor, ideal: float) -> dict[str, float]:
    """Mean, unbiased deviation and extremes over sequences; `values` [S'] of those that have
    tokens.
    """
    if not values.numel():
        return {}
    return {
        "seq_mean": float(values.mean()),
        "seq_std": float(values.std()) if values.numel() > 1 else 0.0,
        "seq_max": float(values.max()),
        "seq_min": float(values.min()),
        "seq_max_deviation": float((values - ideal).abs().max()),
    }


def policy_mismatch(
    log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    response_mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
) -> dict[str, float]:
    """Perplexities, KL and chi-square of trainer (p) and engine (q) on the engine's tokens.

    kl = mean of log q - log p; k3_kl = mean of rho - 1 - log rho; chi2_token = mean of rho^2 - 1;
    chi2_seq the same with rho of whole sequences; log_ppl of a sequence = -mean log-prob.

    Args:
        log_probs, rollout_log_probs, response_mask: [T].
        cu_seqlens: [S+1] int32.
    """
    mask, log_rho = response_mask, log_probs - rollout_log_probs
    if not bool((mask > 0).any()):
        return {}
    ours = -_used(sequence_mean(log_probs, mask, cu_seqlens), mask, cu_seqlens)
    theirs = -_used(sequence_mean(rollout_log_probs, mask, cu_seqlens), mask, cu_seqlens)
    product = _used(sequence_sum(log_rho, mask, cu_seqlens), mask, cu_seqlens).clamp(-LIMIT, LIMIT)
    difference = ours - theirs
    return {
        "training_ppl": float(ours.exp().mean()),
        "training_log_ppl": float(ours.mean()),
        "rollout_ppl": float(theirs.exp().mean()),
        "rollout_log_ppl": float(theirs.mean()),
        "kl": float(masked_mean(-log_rho, mask)),
        "k3_kl": float(masked_mean(divergence(log_rho, "k3"), mask)),
        "log_ppl_diff": float(difference.mean()),
        "log_ppl_abs_diff": float(difference.abs().mean()),
        "log_ppl_diff_max": float(difference.max()),
        "log_ppl_diff_min": float(difference.min()),
        "ppl_ratio": float(difference.exp().mean()),
        "chi2_token": float(masked_mean((2 * log_rho.clamp(-LIMIT, LIMIT)).exp(), mask) - 1),
        "chi2_seq": float((2 * product).exp().mean() - 1),
    }


def weight_metrics(
    weights: torch.Tensor,
    raw: torch.Tensor,
    response_mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    level: str,
    high: float,
    low: float | None,
) -> dict[str, float]:
    """Importance weights as applied, before normalisation, and how often the raw ones lie outside
    the bounds.

    eff_sample_size = mean(w)^2 / mean(w^2). Without a lower bound, "low" means below 1 / high.

    Args:
        weights: [T] from `restrict_weights`; raw: [T] from `raw_weights`.
        level: token or sequence; at "sequence" extremes and fractions are those of the raw weights
            over sequences.
    """
    mask = response_mask
    if not bool((mask > 0).any()):
        return {}
    floor = 1 / high if low is None else low
    per_sequence = _used(sequence_mean(weights, mask, cu_seqlens), mask, cu_seqlens)
    raw_sequence = _used(sequence_mean(raw, mask, cu_seqlens), mask, cu_seqlens)
    seq_high, seq_low = ((raw_sequence > high), (raw_sequence < floor))
    is_sequence = level == "sequence"
    extremes = raw_sequence if is_sequence else weights[mask > 0]
    mean, mean_square = masked_mean(weights, mask), masked_mean(weights.square(), mask)
    frac_high = seq_high.double().mean() if is_sequence else _frac(raw > high, mask)
    frac_low = seq_low.double().mean() if is_sequence else _frac(raw < floor, mask)
    out = {
        "mean": float(mean),
        "max": float(extremes.max()),
        "min": float(extremes.min()),
        "std": _std(weights, mask),
        "eff_sample_size": float(mean.square() / mean_square.clamp(min=1e-12)),
        "ratio_fraction_high": float(frac_high),
        "ratio_fraction_low": float(frac_low),
        **_sequence_metrics(per_sequence, 1.0),
        "seq_fraction_high": float(seq_high.double().mean()),
        "seq_fraction_low": float(seq_low.double().mean()),
    }  # fmt: skip
    if low is not None:
        out["oob_ratio"] = _frac((raw < low) | (raw > high), mask)
    return out


def rejection_metrics(
    rejection: Rejection,
    log_rho: torch.Tensor,
    response_mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
) -> dict[str, float]:
    """The criterion's statistic over tokens and sequences, and the share it rejects.

    fraction_high and fraction_low count what lies above and below the kept interval of the
    statistic; std is that of the statistic bounded to the interval.
    """
    mask = response_mask
    if not bool((mask > 0).any()):
        return {}
    low, high = rejection.bounds
    has_low = rejection.name.endswith("k1")
    statistic = rejection_statistic(rejection, log_rho, mask, cu_seqlens)
    per_sequence = _used(sequence_mean(statistic, mask, cu_seqlens), mask, cu_seqlens)
    rejected = keep(((statistic < low) | (statistic > high)).to(mask.dtype), mask)
    over = per_sequence if not rejection.name.startswith("token") else statistic[mask > 0]
    hit = _used(sequence_sum(rejected, mask, cu_seqlens), mask, cu_seqlens) > 0
    out = {
        "mean": float(masked_mean(statistic, mask)),
        "max": float(over.max()),
        "min": float(over.min()),
        "fraction_high": float((over > high).double().mean()),
        "fraction_low": float((over < low).double().mean()) if has_low else 0.0,
        "std": _std(statistic.clamp(low, high), mask),
        **_sequence_metrics(per_sequence, 0.0),
        "seq_fraction_high": float((per_sequence > high).double().mean()),
        "masked_fraction": float(masked_mean(rejected, mask)),
        "seq_masked_fraction": float(hit.double().mean()),
    }
    if has_low:
        out["seq_fraction_low"] = float((per_sequence < low).double().mean())
    return out
