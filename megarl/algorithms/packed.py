"""Sums, means and running sums over the sequences of a packed batch. NaN under a mask never gets
out.

T tokens in S sequences; sequence s owns the tokens cu_seqlens[s] .. cu_seqlens[s+1]-1 and may be
empty.
"""

from __future__ import annotations

import torch

__all__ = [
    "cumsum",
    "keep",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "positions",
    "reverse_cumsum",
    "segment_ids",
    "sequence_lengths",
    "sequence_max",
    "sequence_mean",
    "sequence_sum",
    "spread",
    "whiten",
]


def keep(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`values` where `mask` is not 0, else exactly 0: a product would let NaN through."""
    return torch.where(mask > 0, values, torch.zeros((), dtype=values.dtype, device=values.device))


def masked_sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum of `values` where `mask` is 1, a scalar."""
    return keep(values, mask).sum()


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of `values` where `mask` is 1, a scalar; 0 of nothing."""
    return masked_sum(values, mask) / mask.sum().clamp(min=1)


def masked_var(
    values: torch.Tensor, mask: torch.Tensor, *, is_unbiased: bool = True
) -> torch.Tensor:
    """Variance of `values` where `mask` is 1, a scalar; 0 of fewer than two."""
    centred = keep(values - masked_mean(values, mask), mask)
    count = mask.sum()
    return centred.square().sum() / (count - 1 if is_unbiased else count).clamp(min=1)


def whiten(values: torch.Tensor, mask: torch.Tensor, *, eps: float = 1e-8) -> torch.Tensor:
    """(values - mean) / sqrt(unbiased variance + eps) over the masked tokens, [T]; 0 elsewhere.

    One token has no spread: it becomes 0.
    """
    scale = (masked_var(values, mask) + eps).rsqrt()
    return keep((values - masked_mean(values, mask)) * scale, mask)


def segment_ids(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """The sequence each token belongs to, [T] int64."""
    lengths = cu_seqlens.diff().long()
    return torch.repeat_interleave(torch.arange(lengths.numel(), device=cu_seqlens.device), lengths)


def positions(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Place of each token in its own sequence, from 0, [T] int64."""
    starts = torch.repeat_interleave(cu_seqlens[:-1].long(), cu_seqlens.diff().long())
    return torch.arange(starts.numel(), device=starts.device) - starts


def spread(per_sequence: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """[S] -> [T]: each token gets the value of its sequence."""
    return torch.repeat_interleave(per_sequence, cu_seqlens.diff().long())


def sequence_sum(
    values: torch.Tensor, mask: torch.Tensor, cu_seqlens: torch.Tensor
) -> torch.Tensor:
    """Sum over the masked tokens of each sequence, [S]; differentiable."""
    out = torch.zeros(cu_seqlens.numel() - 1, dtype=values.dtype, device=values.device)
    return out.index_add(0, segment_ids(cu_seqlens), keep(values, mask))


def sequence_lengths(response_mask: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Trained tokens of each sequence, [S] in the dtype of the mask."""
    return sequence_sum(response_mask, response_mask, cu_seqlens)


def sequence_mean(
    values: torch.Tensor, mask: torch.Tensor, cu_seqlens: torch.Tensor
) -> torch.Tensor:
    """Mean over the masked tokens of each sequence, [S]; 0 where there is none."""
    lengths = sequence_lengths(mask, cu_seqlens).clamp(min=1)
    return sequence_sum(values, mask, cu_seqlens) / lengths


def sequence_max(
    values: torch.Tensor, mask: torch.Tensor, cu_seqlens: torch.Tensor
) -> torch.Tensor:
    """Largest over the masked tokens of each sequence, [S]; 0 where there is none."""
    low = torch.full(
        (cu_seqlens.numel() - 1,), -torch.inf, dtype=values.dtype, device=values.device
    )
    kept = torch.where(mask > 0, values, -torch.inf)
    out = low.scatter_reduce(0, segment_ids(cu_seqlens), kept, "amax")
    return torch.where(out == -torch.inf, torch.zeros_like(out), out)


def cumsum(values: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Sum of each token and all earlier ones of its sequence, [T]."""
    out = torch.zeros_like(values)
    for start, stop in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        out[start:stop] = values[start:stop].cumsum(0)
    return out


def reverse_cumsum(values: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Sum of each token and all later ones of its sequence, [T] (reward to go)."""
    out = torch.zeros_like(values)
    for start, stop in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        out[start:stop] = values[start:stop].flip(0).cumsum(0).flip(0)
    return out
