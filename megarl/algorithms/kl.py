"""Per-token estimators of KL(pi || pi_ref) from samples of pi (Schulman,
http://joschu.net/blog/kl-approx.html).

A name with `+` keeps the estimator's value and takes the gradient of k2, whose expectation is the
gradient of the KL; those of k1, abs and k3 are not. `full_kl` needs the logits of both models.
"""

from __future__ import annotations

import torch

from megarl.algorithms.packed import keep

__all__ = ["KL_ESTIMATORS", "full_kl", "kl_penalty", "kl_shaped_rewards"]

KL_ESTIMATORS = ("k1", "abs", "k2", "k3", "k1+", "abs+", "k3+")


def kl_penalty(
    log_probs: torch.Tensor, ref_log_probs: torch.Tensor, estimator: str
) -> torch.Tensor:
    """[T], differentiable in log_probs. With d = log_probs - ref_log_probs:

    k1 = d; abs = |d|; k2 = d^2 / 2; k3 = exp(-d) - 1 + d, with d clamped to [-20, 20] and k3 to
    [-10, 10]. NAME+ = value of NAME, gradient of k2 (straight through): k2 - sg(k2) + sg(NAME).
    """
    if estimator not in KL_ESTIMATORS:
        raise ValueError(
            f"unknown KL estimator {estimator!r}; use one of {', '.join(KL_ESTIMATORS)}"
        )
    d = log_probs - ref_log_probs
    if estimator.endswith("+"):
        k2 = d.square() / 2
        return k2 - k2.detach() + kl_penalty(log_probs, ref_log_probs, estimator[:-1]).detach()
    if estimator == "k1":
        return d
    if estimator == "abs":
        return d.abs()
    if estimator == "k2":
        return d.square() / 2
    d = d.clamp(-20.0, 20.0)
    return ((-d).exp() - 1 + d).clamp(-10.0, 10.0)


def full_kl(logits: torch.Tensor, ref_logits: torch.Tensor) -> torch.Tensor:
    """Exact KL(pi || pi_ref) at each token: sum over v of pi(v) (log pi(v) - log pi_ref(v)), [T].

    Args:
        logits, ref_logits: [T, V], float32 or wider.
    """
    log_p, log_q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def kl_shaped_rewards(
    rewards: torch.Tensor,
    old_log_probs: torch.Tensor,
    ref_log_probs: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    coef: float,
    estimator: str = "k1",
) -> torch.Tensor:
    """Token rewards with the KL taken off: r_t - coef * kl_t on trained tokens, [T]; KL elsewhere
    has no effect.

    https://arxiv.org/abs/1909.08593, eq. 2.
    """
    return rewards - coef * keep(kl_penalty(old_log_probs, ref_log_probs, estimator), response_mask)
