"""Weight layouts as data: which part of which Hugging Face tensor lies where in a local parameter.

The canonical index space is the Hugging Face checkpoint: (tensor name, shape). A trainer rank and
an engine rank each describe what they hold as a list of `Placement`s; loading, exporting and
resharding only ever intersect boxes and know no engine and no model family. Pure Python, imports
nothing heavy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

__all__ = ["Box", "Placement", "WeightLayout"]


@dataclass(frozen=True, slots=True)
class Box:
    """A half-open axis-aligned box: `start[d] <= index[d] < stop[d]`."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index for a torch tensor, numpy array or safetensors slice."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def intersect(self, other: Box) -> Box | None:
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None

    def shift(self, offset: tuple[int, ...]) -> Box:
        """The same box moved by `offset`."""
        return Box(
            tuple(a + o for a, o in zip(self.start, offset, strict=True)),
            tuple(b + o for b, o in zip(self.stop, offset, strict=True)),
        )

    @classmethod
    def full(cls, shape: tuple[int, ...]) -> Box:
        return cls((0,) * len(shape), tuple(shape))


@dataclass(frozen=True, slots=True)
class Placement:
    """`canonical[source]` is stored at `parameter[target]`; both boxes have the same shape."""

    canonical: str  # Hugging Face tensor name, e.g. "model.layers.0.self_attn.q_proj.weight"
    source: Box  # in the canonical tensor
    parameter: str  # name of the local parameter
    target: Box  # in the local parameter


@dataclass(frozen=True)
class WeightLayout:
    """What one rank holds.

    `parameters` gives the local shape of each local parameter. Elements of a local parameter that
    no placement covers are padding (vocabulary rows added for divisibility) and stay zero.
    """

    canonical_shapes: dict[str, tuple[int, ...]]
    parameters: dict[str, tuple[int, ...]]
    placements: list[Placement] = field(default_factory=list)

    def by_canonical(self) -> dict[str, list[Placement]]:
        out: dict[str, list[Placement]] = {}
        for placement in self.placements:
            out.setdefault(placement.canonical, []).append(placement)
        return out

    def check(self) -> None:
        """Raise ValueError if a placement leaves its tensors or its boxes differ in shape."""
        for p in self.placements:
            whole = Box.full(self.canonical_shapes[p.canonical])
            local = Box.full(self.parameters[p.parameter])
            for what, box, bound in (("source", p.source, whole), ("target", p.target, local)):
                if box.intersect(bound) != box:
                    raise ValueError(
                        f"{p.canonical} -> {p.parameter}: {what} {box} is outside {bound}"
                    )
            if p.source.shape != p.target.shape:
                raise ValueError(
                    f"{p.canonical} -> {p.parameter}: "
                    f"source {p.source.shape} != target {p.target.shape}"
                )

    def covered_elements(self) -> Iterator[tuple[str, int]]:
        """(local parameter, number of elements that placements write), for completeness checks."""
        counts = dict.fromkeys(self.parameters, 0)
        for p in self.placements:
            counts[p.parameter] += p.target.num_elements
        yield from counts.items()
