"""Parquet files of prompts: streaming read with checks, atomic streaming write.

The only module with pyarrow.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from megarl.data.schema import COLUMNS, DataError, PromptRow, check_row

__all__ = ["iter_prompt_rows", "write_prompt_rows"]

_BATCH_ROWS = 1024
_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
_REWARD_MODEL = pa.struct([("style", pa.string()), ("ground_truth", pa.string())])


def iter_prompt_rows(
    files: Sequence[str | Path], *, check_ground_truth: Callable[[str], None] | None = None
) -> Iterator[PromptRow]:
    """Yield the checked rows of `files` in order; one row group batch is in memory at a time.

    Args:
        check_ground_truth: rule of the reward, raises ValueError; None: rows need no ground truth.

    Raises:
        DataError: names file, row (from 0 within the file), column, rule and remedy.
    """
    for file in files:
        yield from _iter_file(Path(file), check_ground_truth)


def _iter_file(path: Path, check_ground_truth: Callable[[str], None] | None) -> Iterator[PromptRow]:
    if not path.is_file():
        raise DataError(
            f"{path}: does not exist or is not a file; `megarl prepare` writes such files"
        )
    remedy = "the file is truncated or not Parquet; write it again"
    try:
        with pq.ParquetFile(path) as parquet:
            columns = _check_columns(path, parquet, needs_truth=check_ground_truth is not None)
            row_number = 0
            for batch in parquet.iter_batches(_BATCH_ROWS, columns=columns):
                for row in batch.to_pylist():
                    yield check_row(row, f"{path}, row {row_number}", check_ground_truth)
                    row_number += 1
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{path}: cannot be read as Parquet ({str(error).splitlines()[0]}); {remedy}"
        ) from None


def _check_columns(path: Path, parquet: pq.ParquetFile, *, needs_truth: bool) -> list[str]:
    """Columns to read; raises DataError for a missing column, one of a wrong kind, or no rows."""
    schema = parquet.schema_arrow
    required = ["data_source", "prompt", *(["reward_model"] if needs_truth else [])]
    missing = [name for name in required if name not in schema.names]
    if missing:
        raise DataError(
            f"{path}: column {', '.join(missing)} is missing, it has {', '.join(schema.names)}; "
            "use files of `megarl prepare` or of verl"
        )
    if parquet.metadata.num_rows == 0:
        raise DataError(f"{path}: has no rows; remove it or write it again")
    kinds = {
        "prompt": "a list of {role, content}",
        "reward_model": "a struct",
        "extra_info": "a struct",
    }
    for name, kind in kinds.items():
        if name in schema.names:
            type_ = schema.field(name).type
            is_list = pa.types.is_list(type_) or pa.types.is_large_list(type_)
            fits = is_list if name == "prompt" else pa.types.is_struct(type_)
            if not fits and not (name == "extra_info" and pa.types.is_null(type_)):
                raise DataError(f"{path}: column {name} is {type_}, it must be {kind}; write it so")
    return [name for name in COLUMNS if name in schema.names]


def write_prompt_rows(path: str | Path, rows: Iterable[PromptRow]) -> int:
    """Write rows in verl's schema and return their number; the file appears whole or not at all.

    Rows hold data_source, prompt, ability, reward_model {style, ground_truth} and extra_info; the
    fields of extra_info are those of the first rows. Raises DataError for no rows or rows that
    differ in type.
    """
    path = Path(path)
    rows = iter(rows)
    first = list(islice(rows, _BATCH_ROWS))
    if not first:
        raise DataError(f"{path}: there are no rows to write; check the input")
    schema = _schema_of(first)
    partial = path.with_name(path.name + ".partial")
    count = 0
    try:
        with pq.ParquetWriter(partial, schema) as writer:
            batches = chain([first], iter(lambda: list(islice(rows, _BATCH_ROWS)), []))
            for batch in batches:
                writer.write_table(pa.Table.from_pylist(batch, schema=schema))
                count += len(batch)
        os.replace(partial, path)
    except pa.ArrowException as error:
        raise DataError(
            f"{path}: row {count} or later does not fit the first rows: {error}"
        ) from None
    finally:
        partial.unlink(missing_ok=True)
    return count


def _schema_of(rows: Sequence[PromptRow]) -> pa.Schema:
    extra = pa.array([row.get("extra_info") for row in rows]).type
    if pa.types.is_struct(extra):  # a field that is null so far may still hold text later
        extra = pa.struct(
            [(f.name, pa.string() if pa.types.is_null(f.type) else f.type) for f in extra]
        )
    return pa.schema(
        [
            ("data_source", pa.string()), ("prompt", _MESSAGES), ("ability", pa.string()),
            ("reward_model", _REWARD_MODEL), ("extra_info", extra),
        ]
    )  # fmt: skip
