"""ParallelGroups: the process groups of one role, built once at start and handed down.

Every rank of the job calls `build` for every role in the same order (torch requires it of
new_group), with an explicit timeout: new_group does not inherit that of init_process_group.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megarl.parallel.dims import Coordinate, ParallelDims

__all__ = ["ParallelGroups"]


@dataclass(frozen=True, kw_only=True)
class ParallelGroups:
    """Groups of the axes and of their products that training needs, for the calling rank."""

    dims: ParallelDims
    coordinate: Coordinate
    tp: ProcessGroup
    cp: ProcessGroup
    dp: ProcessGroup
    pp: ProcessGroup
    dp_cp: ProcessGroup
    tp_cp: ProcessGroup
    tp_pp: ProcessGroup
    tp_dp_cp: ProcessGroup
    role: ProcessGroup  # every rank of the role
    embd: ProcessGroup  # first and last pipeline stage (tied embeddings); middle ones: alone
    pos_embd: ProcessGroup  # first pipeline stage; others: alone

    @property
    def is_first_stage(self) -> bool:
        return self.coordinate.pp == 0

    @property
    def is_last_stage(self) -> bool:
        return self.coordinate.pp == self.dims.pp - 1

    @classmethod
    def build(cls, dims: ParallelDims, *, timeout_s: float) -> ParallelGroups | None:
        """Create every group of the role; returns None on a rank outside `dims.ranks`.

        Raises ValueError when the role does not fit the world, RuntimeError when a built group has
        not the size its axes say.
        """
        world, rank = dist.get_world_size(), dist.get_rank()
        if dims.ranks.stop > world:
            raise ValueError(
                f"role on ranks {dims.ranks} needs more than the {world} ranks of this job"
            )

        def mine(enumeration: list[list[int]]) -> ProcessGroup | None:
            found = None
            for ranks in enumeration:
                group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s))
                found = group if rank in ranks else found
            return found

        products = {
            "tp": ("tp",), "cp": ("cp",), "dp": ("dp",), "pp": ("pp",), "dp_cp": ("cp", "dp"),
            "tp_cp": ("tp", "cp"), "tp_pp": ("tp", "pp"), "tp_dp_cp": ("tp", "cp", "dp"),
            "role": ("tp", "cp", "dp", "pp"),
        }  # fmt: skip
        built = {name: mine(dims.groups(*axes)) for name, axes in products.items()}
        lines = dims.groups("pp")
        # finalize_model_grads falls back to megatron's globals on a None group: middle stages get
        # one of their own
        ends = [sorted({line[0], line[-1]}) for line in lines]
        built["embd"] = mine(ends + [[r] for line in lines for r in line[1:-1]])
        built["pos_embd"] = mine(
            [[line[0]] for line in lines] + [[r] for line in lines for r in line[1:]]
        )
        if rank not in dims.ranks:
            return None
        groups = {name: group for name, group in built.items() if group is not None}
        for name, axes in products.items():
            expected = 1
            for axis in axes:
                expected *= getattr(dims, axis)
            if groups[name].size() != expected:
                raise RuntimeError(
                    f"group {name} has {groups[name].size()} ranks, {axes} need {expected}"
                )
        return cls(dims=dims, coordinate=dims.coordinate(rank), **groups)

    def describe(self) -> str:
        """One line per axis: size and the ranks of the first group, as the start-up table."""
        rows = [("axis", "size", "ranks of rank 0's group")]
        for axis in ("tp", "cp", "dp", "pp"):
            rows.append(
                (axis, str(getattr(self.dims, axis)), " ".join(map(str, self.dims.groups(axis)[0])))
            )
        width = max(len(r[2]) for r in rows)
        return "\n".join(f"  {a:<5}{s:>5}  {r:<{width}}".rstrip() for a, s, r in rows)
