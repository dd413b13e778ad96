"""verl's prompt-file schema as rules, and DataError, the one shape of a complaint about data.

data_source    string
prompt         list<struct<role: string, content: string>>
ability        string, optional, not read
reward_model   struct<style: string, ground_truth: string>
extra_info     struct of anything, optional
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

__all__ = ["COLUMNS", "DataError", "PromptRow", "check_row"]

PromptRow = dict[str, Any]
"""One row as read or written: the columns above."""

COLUMNS = ("data_source", "prompt", "reward_model", "extra_info")
"""Columns that are read; others are ignored."""


class DataError(ValueError):
    """Data that cannot be used. The message names file, row, column, rule and remedy."""


def check_row(
    row: PromptRow, where: str, check_ground_truth: Callable[[str], None] | None
) -> PromptRow:
    """The row with `reward_model.ground_truth` as text, "" where none is needed and none is given.

    Args:
        where: names file and row in errors.
        check_ground_truth: the reward's own rule, raises ValueError; None: no ground truth is
            needed.

    Raises:
        DataError: a column breaks a rule.
    """
    if not isinstance(row.get("data_source"), str) or not row["data_source"]:
        raise DataError(
            f"{where}, column data_source: {row.get('data_source')!r} must be text; name the data "
            "set"
        )
    _check_messages(row.get("prompt"), where)
    truth = _ground_truth(row, where, is_required=check_ground_truth is not None)
    if check_ground_truth is not None:
        try:
            check_ground_truth(truth)
        except ValueError as error:
            raise DataError(
                f"{where}, column reward_model.ground_truth: {error}; correct the row or use "
                "another reward.name"
            ) from None
    return {
        **row,
        "reward_model": {"ground_truth": truth},
        "extra_info": row.get("extra_info") or {},
    }


def _check_messages(messages: object, where: str) -> None:
    where = f"{where}, column prompt"
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: must be a non-empty list of messages; remove the row")
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise DataError(
                f"{where}: message {i} must have role and content, not {type(message).__name__}"
            )
        for key in ("role", "content"):
            value = message.get(key)
            if not isinstance(value, str):
                raise DataError(f"{where}: message {i} has {key}={value!r}; it must be text")
            if not value.strip():
                raise DataError(
                    f"{where}: message {i} has an empty {key}; fill it or remove the row"
                )


def _ground_truth(row: PromptRow, where: str, *, is_required: bool) -> str:
    value = (row.get("reward_model") or {}).get("ground_truth")
    if value is None and not is_required:
        return ""
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool):
        return str(value)
    what = "is missing" if value in (None, "") else f"is {value!r}, neither text nor a number"
    raise DataError(
        f"{where}, column reward_model.ground_truth: {what}; the reward needs the right answer"
    )
