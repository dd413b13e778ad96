"""Per-token estimators of KL(pi || pi_ref) from samples of pi (Schulman, http://joschu.net/blog/kl-approx.html)."""

from __future__ import annotations

import torch

__all__ = ["KL_ESTIMATORS", "kl_penalty"]

KL_ESTIMATORS = ("k1", "abs", "k2", "k3")


def kl_penalty(
    log_probs: torch.Tensor, ref_log_probs: torch.Tensor, estimator: str
) -> torch.Tensor:
    """[T] float32, differentiable in log_probs. With d = log_probs - ref_log_probs:

    k1 = d; abs = |d|; k2 = d^2 / 2;
    k3 = exp(-d) - 1 + d, with d clamped to [-20, 20] and k3 to [-10, 10].
    """
    d = log_probs - ref_log_probs
    if estimator == "k1":
        return d
    if estimator == "abs":
        return d.abs()
    if estimator == "k2":
        return d.square() / 2
    if estimator == "k3":
        d = d.clamp(-20.0, 20.0)
        return ((-d).exp() - 1 + d).clamp(-10.0, 10.0)
    raise ValueError(f"unknown KL estimator {estimator!r}; use one of {', '.join(KL_ESTIMATORS)}")
