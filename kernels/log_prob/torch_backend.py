"""Partials and gradient in plain torch, a block of tokens at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from megarl_kernels.log_prob.partials import TARGET, TOP, TOTAL, WEIGHTED, local_targets

__all__ = ["add_partials", "write_gradient"]

# A block's logits in float32: 2^20 numbers, 4 MiB, so that the passes over it stay in cache.
MAX_BLOCK_LOGITS = 2**20
# Stands for -inf where it is multiplied by a probability of 0.
LOWEST_LOG_P = -1e30


def add_partials(
    logits: torch.Tensor,  # [T, n]
    targets: torch.Tensor,  # [T]
    first_column: int,
    scale: float,
    partials: torch.Tensor,  # [4, T], continued from what it holds
    with_entropy: bool,
) -> None:
    """Add these columns to the partials."""
    if logits.size(1) == 0:
        return
    for part in _blocks(logits):
        here = partials[:, part]
        x = logits[part].to(partials.dtype)
        top = torch.maximum(here[TOP], x.amax(-1))
        shift = (here[TOP] - top) * scale
        ratio = shift.exp()
        seen = here[TOTAL] > 0
        shifted = ratio * (here[WEIGHTED] + here[TOTAL] * shift)
        here[WEIGHTED] = torch.where(seen, shifted, 0.0)
        here[TOTAL] = torch.where(seen, here[TOTAL] * ratio, here[TOTAL])
        at, mine = local_targets(targets[part], first_column, x.size(1))
        here[TARGET, mine] = x[mine, at[mine]]
        here[TOP] = top
        # while every logit is -inf, subtract 0 instead of -inf: exp(-inf) is 0, as it should be
        z = (x - top.masked_fill(top == -torch.inf, 0.0)[:, None]).mul_(scale)
        if with_entropy:
            p = z.exp()
            here[TOTAL] += p.sum(-1)
            here[WEIGHTED] += p.mul_(z.clamp_(min=LOWEST_LOG_P)).sum(-1)
        else:
            here[TOTAL] += z.exp_().sum(-1)


def write_gradient(
    logits: torch.Tensor,  # [T, n]
    out: torch.Tensor,  # [T, n], may be logits
    targets: torch.Tensor,  # [T]
    first_column: int,
    scale: float,
    top: torch.Tensor,  # [T]
    log_total: torch.Tensor,  # [T]
    entropy: torch.Tensor,  # [T]
    grad_log_probs: torch.Tensor,  # [T]
    grad_entropy: torch.Tensor | None,  # [T]
) -> None:
    """Write d loss / d logits; 0 for tokens without any incoming gradient."""
    for part in _blocks(logits):
        g = grad_log_probs[part, None] * scale
        log_p = (
            (logits[part].to(top.dtype) - top[part, None]).mul_(scale).sub_(log_total[part, None])
        )
        is_idle = g == 0
        if grad_entropy is None:
            grad = log_p.exp_().mul_(-g)
        else:
            e = grad_entropy[part, None] * scale
            is_idle = is_idle & (e == 0)
            p = log_p.exp()
            log_p.clamp_(min=LOWEST_LOG_P)
            grad = log_p.add_(entropy[part, None]).mul_(e).add_(g).mul_(p).neg_()
        at, mine = local_targets(targets[part], first_column, logits.size(1))
        grad[mine, at[mine]] += g[mine, 0]
        out[part] = grad.masked_fill_(is_idle, 0.0)


def _blocks(logits: torch.Tensor) -> Iterator[slice]:
    step = max(1, MAX_BLOCK_LOGITS // max(logits.size(1), 1))
    return (slice(i, i + step) for i in range(0, logits.size(0), step))
