"""How token losses become one number: by weights, so that every split of the minibatch agrees.

loss = sum over all micro-batches and data-parallel ranks of sum_t weight[t] * token_loss[t]. The
weights use counts of the whole minibatch, taken once; no mean is ever taken of means.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["MinibatchCounts", "sequence_lengths", "token_weights"]


@dataclass(frozen=True)
class MinibatchCounts:
    """Sums over the whole minibatch, all data-parallel ranks."""

    num_tokens: float  # trained tokens
    num_sequences: float  # sequences with at least one trained token


def sequence_lengths(response_mask: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Trained tokens of each sequence, [S] float32.

    Args:
        response_mask: [T] float32, 1 on trained tokens.
        cu_seqlens: [S+1] int32.
    """
    segment = torch.repeat_interleave(
        torch.arange(cu_seqlens.numel() - 1, device=cu_seqlens.device), cu_seqlens.diff().long()
    )
    out = torch.zeros(cu_seqlens.numel() - 1, dtype=torch.float32, device=response_mask.device)
    return out.index_add_(0, segment, response_mask.float())


def token_weights(
    mode: str,
    response_mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
    counts: MinibatchCounts,
    *,
    max_length: int,
) -> torch.Tensor:
    """Weight of each token's loss, [T] float32, 0 where response_mask is 0.

    token_mean               1 / N                       N trained tokens of the minibatch
    token_sum                1
    seq_mean_token_sum       1 / S                       S sequences of the minibatch
    seq_mean_token_sum_norm  1 / (S * max_length)        Dr. GRPO, https://arxiv.org/abs/2503.20783
    seq_mean_token_mean      1 / (S * length of the sequence)

    A minibatch without trained tokens has weights 0.
    """
    mask = response_mask.float()
    num_tokens, num_sequences = max(counts.num_tokens, 1.0), max(counts.num_sequences, 1.0)
    if mode == "token_mean":
        return mask / num_tokens
    if mode == "token_sum":
        return mask
    if mode == "seq_mean_token_sum":
        return mask / num_sequences
    if mode == "seq_mean_token_sum_norm":
        return mask / (num_sequences * max_length)
    if mode == "seq_mean_token_mean":
        lengths = sequence_lengths(response_mask, cu_seqlens).clamp(min=1.0)
        return mask / (num_sequences * torch.repeat_interleave(lengths, cu_seqlens.diff().long()))
    raise ValueError(f"unknown loss aggregation {mode!r}")
