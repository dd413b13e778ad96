"""What is known about the softmax of each token from a part of the vocabulary, and how parts merge.

With z = (x - top) / temperature, top the largest logit of the part, all is centred: a common shift
of the logits cancels exactly.

    log_prob = z_target - log sum exp(z)
    entropy  = log sum exp(z) - sum exp(z) z / sum exp(z)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

__all__ = ["SoftmaxStats", "local_targets", "merge", "new_partials"]

TOP, TOTAL, WEIGHTED, TARGET = range(4)


@dataclass(frozen=True)
class SoftmaxStats:
    """Per token, [T] each, in the dtype of the sums; the same on every rank."""

    log_probs: torch.Tensor
    entropy: torch.Tensor  # 0 when it was not asked for
    top: torch.Tensor  # largest logit
    log_total: torch.Tensor  # log sum exp((x - top) / temperature)


def new_partials(num_tokens: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[4, T]: top -inf, total 0, weighted 0, target logit 0."""
    partials = torch.zeros(4, num_tokens, dtype=dtype, device=device)
    partials[TOP] = -torch.inf
    return partials


def local_targets(
    targets: torch.Tensor, first_column: int, num_columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Targets as local columns, and the indices [N] of the tokens whose target lies here."""
    at = targets - first_column
    return at, ((at >= 0) & (at < num_columns)).nonzero().squeeze(-1)


def merge(
    partials: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocab_start: int,
    num_columns: int,
    scale: float,
    group: ProcessGroup | None,
    with_entropy: bool,
) -> SoftmaxStats:
    """Combine the ranks' partials: one MAX and one SUM all-reduce of O(T) numbers.

    Args:
        partials: [4, T] of this rank's columns.
        targets: [T] global ids.
        vocab_start: id of this rank's first column.
        num_columns: real columns of this rank; may be 0.
        scale: 1 / temperature.
        group: ranks with the other columns; None: there are none.
        with_entropy: False gives zeros.
    """
    here = (targets >= vocab_start) & (targets < vocab_start + num_columns)
    top = partials[TOP]
    if group is None:
        total, weighted = partials[TOTAL], partials[WEIGHTED]
        target = torch.where(here, (partials[TARGET] - top) * scale, 0.0)
    else:
        top = top.clone()
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        shift = (partials[TOP] - top) * scale
        ratio = shift.exp()
        total = partials[TOTAL] * ratio
        # a part without any probability has shift -inf
        weighted = ratio * (partials[WEIGHTED] + partials[TOTAL] * shift)
        weighted = torch.where(partials[TOTAL] > 0, weighted, 0.0)
        target = torch.where(here, (partials[TARGET] - top) * scale, 0.0)
        sums = torch.stack([total, weighted, target])
        dist.all_reduce(sums, group=group)
        total, weighted, target = sums.unbind()
    log_total = total.log()
    entropy = log_total - weighted / total if with_entropy else torch.zeros_like(log_total)
    return SoftmaxStats(target - log_total, entropy, top, log_total)
