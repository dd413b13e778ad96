"""GSM8K (https://github.com/openai/grade-school-math): the number after #### is the answer."""

from __future__ import annotations

import re
from typing import Any

from megarl.data.prepare.base import Example, Source, as_number_text, require_text
from megarl.data.schema import DataError

__all__ = ["GSM8K"]

_CALCULATOR = re.compile(r"<<[^>]*>>")


def _read(record: dict[str, Any]) -> Example:
    worked, marker, number = require_text(record, "answer").rpartition("####")
    if not marker:
        raise DataError("answer has no ####")
    truth = as_number_text(number.strip().removeprefix("$"), "the number after ####")
    # <<48/2=24>> calls a calculator in the paper's set-up; a chat model should not imitate it
    worked = _CALCULATOR.sub("", worked).strip()
    return Example(
        question=require_text(record, "question"),
        ground_truth=truth,
        answer=f"{worked}\n#### {truth}".strip(),
    )


GSM8K = Source(
    name="gsm8k",
    description='lines of {"question": ..., "answer": "... #### 18"}',
    default_suffix=' Let\'s think step by step and output the final answer after "####".',
    read=_read,
)
