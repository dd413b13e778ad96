"""How token losses become one number: as weights, so that every split of the minibatch sums to the
same loss.

loss = sum over all micro-batches and data-parallel ranks of sum_t weight[t] * token_loss[t]. The
weights use counts of the whole minibatch, taken once; no mean is ever taken of means.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megarl.algorithms.packed import keep, sequence_lengths, spread

__all__ = ["AGGREGATIONS", "MinibatchCounts", "aggregate", "token_weights"]

AGGREGATIONS = (
    "token_mean",
    "token_sum",
    "seq_mean_token_sum",
    "seq_mean_token_sum_norm",
    "seq_mean_token_mean",
)


@dataclass(frozen=True)
class MinibatchCounts:
    """Sums over the whole minibatch, all data-parallel ranks."""

    num_tokens: float  # trained tokens
    num_sequences: float  # sequences with at least one trained token

    @classmethod
    def of(cls, response_mask: torch.Tensor, cu_seqlens: torch.Tensor) -> MinibatchCounts:
        """Counts of one packed batch; those of several add up."""
        lengths = sequence_lengths(response_mask, cu_seqlens)
        return cls(float(lengths.sum()), float((lengths > 0).sum()))

    def __add__(self, other: MinibatchCounts) -> MinibatchCounts:
        return MinibatchCounts(
            self.num_tokens + other.num_tokens, self.num_sequences + other.num_sequences
        )


def token_weights(
    mode: str,
    response_mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
    counts: MinibatchCounts,
    *,
    max_length: int,
) -> torch.Tensor:
    """Weight of each token's loss, [T] in the dtype of the mask, 0 where response_mask is 0.

    token_mean               1 / N                       N trained tokens of the minibatch
    token_sum                1
    seq_mean_token_sum       1 / S                       S sequences of the minibatch
    seq_mean_token_sum_norm  1 / (S * max_length)        Dr. GRPO, https://arxiv.org/abs/2503.20783
    seq_mean_token_mean      1 / (S * length of the sequence)

    A minibatch without trained tokens has weights 0.
    """
    mask = response_mask
    num_tokens, num_sequences = max(counts.num_tokens, 1.0), max(counts.num_sequences, 1.0)
    if mode == "token_mean":
        return mask / num_tokens
    if mode == "token_sum":
        return mask.clone()
    if mode == "seq_mean_token_sum":
        return mask / num_sequences
    if mode == "seq_mean_token_sum_norm":
        return mask / (num_sequences * max_length)
    if mode == "seq_mean_token_mean":
        lengths = sequence_lengths(response_mask, cu_seqlens).clamp(min=1.0)
        return mask / (num_sequences * spread(lengths, cu_seqlens))
    raise ValueError(f"unknown loss aggregation {mode!r}; use one of {', '.join(AGGREGATIONS)}")


def aggregate(
    token_losses: torch.Tensor, weights: torch.Tensor, response_mask: torch.Tensor
) -> torch.Tensor:
    """This batch's share of the minibatch loss, a scalar. What lies under the mask has no effect,
    NaN included.
    """
    return keep(token_losses * weights, response_mask).sum()
