"""Quantities of the full next-token distribution from logits; sums in float32 or wider, maximum
subtracted first.

The trainer's own log-probs and entropy come from the output layer without materialised logits
(megarl_kernels.linear_log_prob); these are for small vocabularies and as its specification.
"""

from __future__ import annotations

import torch

__all__ = ["entropy", "log_probs_of", "sum_pi_squared"]


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def log_probs_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """log softmax(logits)[label], [T].

    Args:
        logits: [T, V].
        labels: [T] int64.
    """
    return _log_softmax(logits).gather(-1, labels[:, None]).squeeze(-1)


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """-sum over v of pi(v) log pi(v), nats, [T] from [T, V]; an impossible token (logit -inf) adds
    0.
    """
    log_p = _log_softmax(logits)
    return -torch.where(log_p == -torch.inf, 0.0, log_p.exp() * log_p).sum(-1)


def sum_pi_squared(logits: torch.Tensor) -> torch.Tensor:
    """sum over v of pi(v)^2, [T] from [T, V]: the chance of drawing one token twice."""
    return (2 * _log_softmax(logits)).exp().sum(-1)
