"""Metrics: each has its own reducer, is reduced once over the ranks that saw different data.

Means travel as (sum, count) and are divided at the end: never a mean of means, never chosen by a
name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.utils.tensorboard import SummaryWriter

from megarl.parallel import gather_lists
from megarl.types import SampleGroup

__all__ = [
    "MetricWriter", "Reducer", "Values", "combine", "gather_samples", "masked_max",
    "masked_mean", "reduce_values", "to_floats",
]  # fmt: skip

Reducer = Literal["mean", "max", "sum"]
Values = dict[str, torch.Tensor]


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(sum, count) of `values` where `mask` is 1, as [2] float64. NaN elsewhere has no effect."""
    kept = torch.where(mask > 0, values.detach().double(), 0.0)
    return torch.stack([kept.sum(), mask.double().sum()])


def masked_max(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Largest of `values` where `mask` is 1, as [1] float64; -inf if there is none."""
    kept = torch.where(mask > 0, values.detach().double(), -torch.inf)
    return (
        kept.max().reshape(1) if kept.numel() else torch.full((1,), -torch.inf, dtype=torch.float64)
    )


def combine(parts: list[Values], reducers: Mapping[str, Reducer]) -> Values:
    """Fold the values of several micro-batches, or of several updates, into one per name."""
    out: Values = {}
    for name, reducer in reducers.items():
        stacked = torch.stack([p[name].double() for p in parts])
        out[name] = stacked.amax(0) if reducer == "max" else stacked.sum(0)
    return out


def reduce_values(
    values: Values, reducers: Mapping[str, Reducer], group: ProcessGroup | None
) -> Values:
    """Reduce over the group. All its ranks call with the same names.

    Args:
        values: "mean": [2] (sum, count); "max", "sum": [1].
    """
    out: Values = {}
    for reducer, op in (
        ("mean", dist.ReduceOp.SUM),
        ("sum", dist.ReduceOp.SUM),
        ("max", dist.ReduceOp.MAX),
    ):
        names = [n for n in reducers if reducers[n] == reducer]
        if not names:
            continue
        flat = torch.cat([values[n].double() for n in names])
        is_nan = flat.isnan().double()
        dist.all_reduce(flat, op=op, group=group)
        dist.all_reduce(is_nan, group=group)  # a backend's MAX may drop a NaN: it must not get lost
        flat = torch.where(is_nan > 0, torch.nan, flat)
        parts = flat.split([values[n].numel() for n in names])
        out.update(zip(names, parts, strict=True))
    return out


def to_floats(values: Values, reducers: Mapping[str, Reducer]) -> dict[str, float]:
    """Divide the means; a mean or a maximum of nothing is left out."""
    out: dict[str, float] = {}
    for name, reducer in reducers.items():
        value = values[name].tolist()
        if reducer == "mean":
            if value[1] > 0:
                out[name] = value[0] / value[1]
        elif value[0] != -torch.inf:
            out[name] = value[0]
    return out


def gather_samples(groups: Sequence[SampleGroup], *, step: int, limit: int) -> list[dict[str, Any]]:
    """Readable rows of up to `limit` samples, the first of each group first.

    Collective over the job.
    """
    local = sorted((s for g in groups for s in g.samples), key=lambda s: (s.index, s.group))[:limit]
    prompts = {s.group: g.prompt for g in groups for s in g.samples}
    rows = [
        {
            "step": step, "row": prompts[s.group].row, "index": s.index,
            "prompt": prompts[s.group].messages[-1]["content"], "response": s.text,
            "ground_truth": prompts[s.group].ground_truth, "parsed": s.parsed, "reward": s.reward,
            "finish_reason": s.finish_reason, "weight_version": s.weight_version,
            "response_ids": s.response_ids,
        }
        for s in local
    ]  # fmt: skip
    return sorted(gather_lists(rows), key=lambda r: (r["index"], r["row"]))[:limit]


class MetricWriter:
    """metrics.jsonl, samples.jsonl and TensorBoard events of a run; made on rank 0 only."""

    def __init__(self, output_dir: Path) -> None:
        self.metrics_path = output_dir / "metrics.jsonl"
        self.samples_path = output_dir / "samples.jsonl"
        self.board = SummaryWriter(str(output_dir / "tensorboard"))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        with self.metrics_path.open("a") as f:
            f.write(json.dumps({"step": step, **metrics}) + "\n")
        for name, value in metrics.items():
            self.board.add_scalar(name, value, step)
        self.board.flush()

    def write_samples(self, rows: list[dict[str, Any]]) -> None:
        with self.samples_path.open("a") as f:
            f.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

    def close(self) -> None:
        self.board.close()
