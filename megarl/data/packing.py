"""Samples -> packed micro-batches: who trains on which (assign), and the tensors (pack). Pure.

Data path: after rewards, before log-probs and the update. The assignment needs only lengths, so
every rank computes it alike; tokens then move to their rank and are packed there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megarl.data.balance import karmarkar_karp, sequence_cost
from megarl.data.schema import DataError
from megarl.types import Sample, TrainBatch

__all__ = ["Assignment", "assign", "pack"]


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Micro-batches of each data-parallel rank; the same number on every rank, >= 1.

    `parts[dp][m]` holds ascending positions in the given lengths. It is empty where a rank has
    fewer samples than micro-batches: `pack` makes padding of it.
    """

    parts: list[list[list[int]]]
    padding_frac: float  # padding tokens / packed tokens, over all ranks
    imbalance: float  # largest / mean cost of a rank, >= 1

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of each rank."""
        return len(self.parts[0])


def assign(
    lengths: Sequence[int], *, num_parts: int, max_tokens: int, hidden_size: int, multiple: int = 1
) -> Assignment:
    """Spread samples over data-parallel ranks and micro-batches.

    Ranks get nearly equal cost (`sequence_cost`); then as few micro-batches as first-fit-decreasing
    needs on the fullest rank, of nearly equal cost within each rank.

    Args:
        lengths: [N] tokens of each sample, >= 1.
        num_parts: data-parallel ranks.
        max_tokens: limit of a micro-batch, padding included.
        multiple: a micro-batch is padded to a multiple of it (tp size under sequence parallelism).

    Raises:
        DataError: a sample does not fit into a micro-batch.
    """
    capacity = max_tokens // multiple * multiple
    for position, length in enumerate(lengths):
        assert length >= 1, f"sample {position} has {length} tokens"
        if length > capacity:
            raise DataError(
                f"sample {position} has {length} tokens, a micro-batch holds {capacity}; raise "
                "trainer.max_tokens_per_microbatch or lower data.max_prompt_tokens or "
                "rollout.max_new_tokens"
            )
    costs = [sequence_cost(n, hidden_size) for n in lengths]
    ranks = karmarkar_karp(costs, num_parts)
    fitted = [_first_fit(rank, lengths, capacity) for rank in ranks]
    num_microbatches = max(1, *(len(bins) for bins in fitted))
    parts = [
        _split(rank, bins, num_microbatches, lengths, costs, capacity)
        for rank, bins in zip(ranks, fitted, strict=True)
    ]
    tokens = sum(lengths)
    packed = sum(_padded(sum(lengths[i] for i in b), multiple) for part in parts for b in part)
    rank_costs = [sum(costs[i] for i in rank) for rank in ranks]
    mean = sum(rank_costs) / num_parts
    return Assignment(
        parts=parts,
        padding_frac=1 - tokens / packed,
        imbalance=max(rank_costs) / mean if mean else 1.0,
    )


def _padded(num_tokens: int, multiple: int) -> int:
    """Tokens after padding; an empty micro-batch has `multiple` of them, two at least."""
    return -(-num_tokens // multiple) * multiple if num_tokens else max(2, multiple)


def _first_fit(rank: Sequence[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """First-fit decreasing: few bins of at most `capacity` tokens."""
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(rank, key=lambda i: (-lengths[i], i)):
        at = next((b for b, left in enumerate(room) if left >= lengths[i]), len(bins))
        if at == len(bins):
            bins.append([])
            room.append(capacity)
        bins[at].append(i)
        room[at] -= lengths[i]
    return bins


def _split(
    rank: Sequence[int],
    fitted: Sequence[Sequence[int]],
    num_bins: int,
    lengths: Sequence[int],
    costs: Sequence[float],
    capacity: int,
) -> list[list[int]]:
    """`num_bins` micro-batches of one rank, costliest first, so that the memory peak comes at once.

    Balanced by cost if that keeps the limit, else the first fit with its costliest bins halved.
    """
    bins = [[rank[i] for i in part] for part in karmarkar_karp([costs[i] for i in rank], num_bins)]
    if any(sum(lengths[i] for i in b) > capacity for b in bins):
        bins = [list(b) for b in fitted]
        while len(bins) < num_bins:
            at = max(
                range(len(bins)), key=lambda b: (len(bins[b]) > 1, sum(costs[i] for i in bins[b]))
            )
            whole = bins.pop(at)
            bins += [
                [whole[i] for i in half] for half in karmarkar_karp([costs[i] for i in whole], 2)
            ]
    return sorted((sorted(b) for b in bins), key=lambda b: (-sum(costs[i] for i in b), b))


def pack(
    samples: Sequence[Sample] | Mapping[int, Sample], positions: Sequence[int], *, multiple: int = 1
) -> TrainBatch:
    """One micro-batch of `samples[p] for p in positions`, in that order.

    T is padded to `multiple` by a tail that is a sequence of its own: token 0, response_mask 0,
    sample_index -1. No position at all gives only such a tail, of two tokens at least.

    Returns:
        A TrainBatch with its first block and rollout_log_probs filled, on the CPU.
    """
    chosen = [samples[p] for p in positions]
    for sample in chosen:
        assert len(sample.response_ids) == len(sample.rollout_log_probs), (
            f"{len(sample.response_ids)} response ids, {len(sample.rollout_log_probs)} log-probs"
        )
    lengths = [s.num_tokens for s in chosen]
    padding = _padded(sum(lengths), multiple) - sum(lengths)
    tail = [padding] if padding else []
    input_ids = [t for s in chosen for t in (*s.prompt_ids, *s.response_ids)] + [0] * padding
    mask = [m for s in chosen for m in (*[0.0] * len(s.prompt_ids), *[1.0] * len(s.response_ids))]
    log_probs = [x for s in chosen for x in (*[0.0] * len(s.prompt_ids), *s.rollout_log_probs)]
    position_ids = [t for n in (*lengths, *tail) for t in range(n)]
    return TrainBatch(
        input_ids=torch.tensor(input_ids, dtype=torch.int64),
        position_ids=torch.tensor(position_ids, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, *lengths, *tail], dtype=torch.int32).cumsum(
            0, dtype=torch.int32
        ),
        response_mask=torch.tensor(mask + [0.0] * padding, dtype=torch.float32),
        sample_index=torch.tensor([*positions, *[-1] * len(tail)], dtype=torch.int64),
        rollout_log_probs=torch.tensor(log_probs + [0.0] * padding, dtype=torch.float32),
    )
