"""MAWPS (https://aclanthology.org/N16-1136): short word problems with a numeric target."""

from __future__ import annotations

from typing import Any

from megarl.data.prepare.base import Example, Source, as_number_text, require_text

__all__ = ["MAWPS"]


def _read(record: dict[str, Any]) -> Example:
    truth = as_number_text(record.get("target"), "target")
    return Example(question=require_text(record, "input"), ground_truth=truth, answer=truth)


MAWPS = Source(
    name="mawps",
    description='lines of {"input": ..., "target": 43.0}',
    default_suffix=" Reply with only the final number.",
    read=_read,
)
