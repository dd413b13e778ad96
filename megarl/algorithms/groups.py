"""Groups of responses to one prompt. A group id is a label: any integers or strings."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

__all__ = ["Groups", "group_centred", "group_counts", "group_index", "group_mean", "group_std"]

Groups = torch.Tensor | Sequence[Hashable]


def group_index(groups: Groups) -> torch.Tensor:
    """[N] int64: group ids numbered 0, 1, ... in order of first appearance."""
    labels = groups.tolist() if isinstance(groups, torch.Tensor) else list(groups)
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(x, len(numbers)) for x in labels], dtype=torch.int64)


def _sum(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    num_groups = int(index.max()) + 1 if index.numel() else 0
    return torch.zeros(num_groups, dtype=values.dtype).index_add_(0, index, values)


def group_counts(index: torch.Tensor) -> torch.Tensor:
    """[N]: size of the group of each response, int64."""
    return torch.bincount(index)[index]


def group_mean(
    values: torch.Tensor, index: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """[N]: (weighted) mean over the group of each response; 0 where all weights are 0."""
    w = torch.ones_like(values) if weights is None else weights.to(values.dtype)
    total = _sum(w, index)
    return (_sum(w * values, index) / torch.where(total > 0, total, 1.0))[index]


def group_centred(
    values: torch.Tensor, index: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """[N]: value minus the (weighted) mean of its group, exactly 0 where all values are equal."""
    # relative to the group's first value, so that rounding cannot make a difference out of none
    first = torch.full((int(index.max()) + 1 if index.numel() else 0,), len(index))
    first = first.scatter_reduce(0, index, torch.arange(len(index)), "amin")
    shifted = values - values[first][index]
    return shifted - group_mean(shifted, index, weights)


def group_std(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """[N]: unbiased standard deviation over the group of each response; 0 for a group of one."""
    square = _sum(group_centred(values, index).square(), index)
    return (square / (torch.bincount(index) - 1).clamp(min=1)).sqrt()[index]
