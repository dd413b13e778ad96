"""Any question with a numeric answer: the number after the last ####, or the whole answer."""

from __future__ import annotations

from typing import Any

from megarl.data.prepare.base import Example, Source, as_number_text, require_text

__all__ = ["ARITHMETIC"]


def _read(record: dict[str, Any]) -> Example:
    answer = record.get("answer")
    text = answer if isinstance(answer, str) else as_number_text(answer, "answer")
    truth = as_number_text(text.rpartition("####")[2].strip(), "answer")
    return Example(
        question=require_text(record, "question"), ground_truth=truth, answer=text.strip()
    )


ARITHMETIC = Source(
    name="arithmetic",
    description='lines of {"question": "3 + 4 = ?", "answer": 7} or "answer": "3 + 4 = 7 #### 7"',
    default_suffix="",
    read=_read,
)
