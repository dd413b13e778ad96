"""JSON lines of a source -> prompt files in verl's schema, streaming. One `Source` per data set."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.data.parquet import write_prompt_rows
from megarl.data.schema import DataError, PromptRow

__all__ = ["Example", "Source", "as_number_text", "prepare", "require_text"]


@dataclass(frozen=True, kw_only=True)
class Example:
    """One problem of a source."""

    question: str
    ground_truth: str
    answer: str  # worked answer, the text `megarl sft` imitates


@dataclass(frozen=True, kw_only=True)
class Source:
    """How to read one data set."""

    name: str
    description: str  # what its JSON lines hold; shown by --help
    default_suffix: str  # appended to each question: how to answer
    read: Callable[
        [dict[str, Any]], Example
    ]  # raises DataError without file and line, which prepare adds


def prepare(
    source: Source, input_file: str | Path, output_dir: str | Path, *,
    holdout: int = 100, suffix: str | None = None, system: str | None = None,
    shots: str | Path | None = None, holdout_seed: int | None = None,
) -> dict[str, int]:  # fmt: skip
    """Write train.parquet and, for holdout > 0, test.parquet; returns {file name: rows}.

    Args:
        holdout: how many rows go to test.parquet.
        holdout_seed: draws them at random, for files in order of difficulty; None: the last rows.
        suffix: text after each question; None: the source's default.
        system: content of a system message before it; None: no such message.
        shots: JSON lines of {"question": ..., "answer": ...}, shown as earlier turns before each
            question.

    Raises:
        DataError: bad input, named with file and line, or no more rows than `holdout`.
    """
    if holdout < 0:
        raise DataError(f"holdout={holdout} must be >= 0; use 0 for no test file")
    suffix = source.default_suffix if suffix is None else suffix
    opening = [{"role": "system", "content": system}] if system else []
    opening += _read_shots(Path(shots)) if shots else []
    num_rows = sum(1 for _ in _iter_examples(source, Path(input_file)))
    if num_rows <= holdout:
        raise DataError(
            f"{input_file}: has {num_rows} rows, none is left to train on; use holdout < {num_rows}"
        )
    if holdout_seed is None:
        held = set(range(num_rows - holdout, num_rows))
    else:
        held = set(random.Random(holdout_seed).sample(range(num_rows), holdout))

    def rows(split: str) -> Iterator[PromptRow]:
        for index, example in enumerate(_iter_examples(source, Path(input_file))):
            if (index in held) == (split == "test"):
                yield to_row(source, index, example, split=split, suffix=suffix, opening=opening)

    output = Path(output_dir)
    output.mkdir(parents=True, exist_ok=True)
    splits = ("train", "test") if held else ("train",)
    return {f"{s}.parquet": write_prompt_rows(output / f"{s}.parquet", rows(s)) for s in splits}


def to_row(
    source: Source,
    index: int,
    example: Example,
    *,
    split: str,
    suffix: str,
    opening: Sequence[dict[str, str]] = (),
) -> PromptRow:
    """One row in verl's schema, `opening` messages first; extra_info keeps the worked answer."""
    return {
        "data_source": f"megarl/{source.name}",
        "prompt": [*opening, {"role": "user", "content": example.question + suffix}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": example.ground_truth},
        "extra_info": {"split": split, "index": index, "answer": example.answer},
    }


def _read_shots(path: Path) -> list[dict[str, str]]:
    """Turns of a user who asks and an assistant who answers."""
    turns: list[dict[str, str]] = []
    for number, record in _iter_records(path, '{"question": ..., "answer": ...}'):
        try:
            turns.append({"role": "user", "content": require_text(record, "question")})
            turns.append({"role": "assistant", "content": require_text(record, "answer")})
        except DataError as error:
            raise DataError(f"{path}, line {number}: {error}") from None
    return turns


def _iter_examples(source: Source, path: Path) -> Iterator[Example]:
    """Examples of the non-blank lines of a JSON-lines file."""
    for number, record in _iter_records(path, source.description):
        try:
            yield source.read(record)
        except DataError as error:
            raise DataError(
                f"{path}, line {number}: {error}; {source.name} expects {source.description}"
            ) from None


def _iter_records(path: Path, description: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of the non-blank lines of a JSON-lines file."""
    if not path.is_file():
        raise DataError(f"{path}: does not exist or is not a file; give a local JSON-lines file")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise DataError(
                    f"{path}, line {number}: is not JSON ({error}); correct the line"
                ) from None
            if not isinstance(record, dict):
                raise DataError(f"{path}, line {number}: is no JSON object; expected {description}")
            yield number, record


def require_text(record: dict[str, Any], key: str) -> str:
    """record[key] as non-blank text. Raises DataError."""
    value = record.get(key)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{key}={value!r} must be text")
    return value.strip()


def as_number_text(value: object, key: str) -> str:
    """A number or its text as a plain numeral, 43.0 -> "43", "1,200" -> "1200"; else DataError."""
    if isinstance(value, str):
        value = _to_number(value.replace(",", "").strip())
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or value != value
        or abs(value) == float("inf")
    ):
        raise DataError(f"{key}={value!r} must be a number")
    return str(int(value)) if value == int(value) else repr(value)


def _to_number(text: str) -> object:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
