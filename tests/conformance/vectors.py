"""Reading a file of reference numbers: padded there [B, L], packed here [T] with cu_seqlens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["Case", "Packing", "load", "to_value"]

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "int64": torch.int64,
    "int32": torch.int32,
    "bool": torch.bool,
}


@dataclass(frozen=True)
class Case:
    """One id of the file, its named inputs resolved to tensors."""

    id: str
    function: str  # of the reference
    params: dict[str, Any]
    inputs: dict[str, Any]
    outputs: Any  # as `to_value` reads it
    shared: dict[str, Any]  # the file's named tensors

    @property
    def family(self) -> str:
        return self.id.split("/")[0]


class Packing:
    """Rows of a padded mask, cut after their last trained token and laid end to end."""

    def __init__(self, mask: torch.Tensor) -> None:
        columns = torch.arange(1, mask.shape[1] + 1)
        self.lengths = ((mask != 0) * columns).amax(1)
        self.inside = columns - 1 < self.lengths[:, None]
        self.cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths.cumsum(0)])
        self.cu_seqlens = self.cu_seqlens.to(torch.int32)
        self.mask = self.pack(mask)

    def pack(self, padded: torch.Tensor) -> torch.Tensor:
        """[B, L] -> [T]."""
        return padded[self.inside].clone()

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """[T] -> [B, L], 0 outside."""
        out = torch.zeros(self.inside.shape, dtype=packed.dtype)
        out[self.inside] = packed.detach()
        return out


def to_value(node: Any) -> Any:
    """JSON to tensors: {shape, dtype, data} becomes a tensor, or a list of strings for dtype
    object.
    """
    if isinstance(node, dict) and "data" in node and "shape" in node:
        if node["dtype"] == "object":
            return node["data"]
        return torch.tensor(node["data"], dtype=DTYPES[node["dtype"]]).reshape(node["shape"])
    if isinstance(node, dict):
        return {k: to_value(v) for k, v in node.items()}
    return [to_value(v) for v in node] if isinstance(node, list) else node


def _resolve(value: Any, shared: dict[str, Any]) -> Any:
    """A string names a shared tensor, or the difference of two."""
    if isinstance(value, str):
        if value in shared:
            return shared[value]
        a, minus, b = value.partition(" - ")
        if minus and a in shared and b in shared:
            return shared[a] - shared[b]
    return value


def load(path: str | Path) -> list[Case]:
    """The cases of a file, in its order."""
    data = json.loads(Path(path).read_text())
    shared = to_value(data.get("_shared", {}))
    return [
        Case(
            id=name,
            function=node.get("verl_function", ""),
            params=node.get("params") or {},
            inputs={
                k: _resolve(to_value(v), shared) for k, v in (node.get("inputs") or {}).items()
            },
            outputs=to_value(node["outputs"]),
            shared=shared,
        )
        for name, node in data.items()
        if not name.startswith("_")
    ]
