from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_rows import make_row

from megarl.data import DataError, iter_prompt_rows, write_prompt_rows
from megarl.rewards import NumberReward

CHECK = NumberReward().check_ground_truth


def refused(path: Path) -> str:
    with pytest.raises(DataError) as error:
        list(iter_prompt_rows([path], check_ground_truth=CHECK))
    return str(error.value)


def write_raw(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_rows_round_trip_over_several_row_groups_and_files(tmp_path: Path) -> None:
    rows = [make_row(f"q {i}", str(i), extra_info={"index": i, "answer": "x"}) for i in range(3000)]
    assert write_prompt_rows(tmp_path / "a.parquet", iter(rows)) == 3000
    assert pq.ParquetFile(tmp_path / "a.parquet").num_row_groups == 3
    got = list(iter_prompt_rows([tmp_path / "a.parquet"] * 2, check_ground_truth=CHECK))
    assert len(got) == 6000  # the same file may be given twice
    assert got[4500]["prompt"] == [{"role": "user", "content": "q 1500"}]
    assert got[4500]["reward_model"] == {"ground_truth": "1500"}
    assert got[4500]["extra_info"] == {"index": 1500, "answer": "x"}
    assert [p.name for p in tmp_path.iterdir()] == ["a.parquet"]  # no partial file is left


def test_written_schema_is_verls(tmp_path: Path) -> None:
    write_prompt_rows(tmp_path / "a.parquet", [make_row()])
    schema = pq.read_schema(tmp_path / "a.parquet")
    assert schema.names == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    assert (
        str(schema.field("prompt").type) == "list<element: struct<role: string, content: string>>"
    )
    assert str(schema.field("reward_model").type) == "struct<style: string, ground_truth: string>"


def test_file_of_another_writer_with_more_columns_and_numeric_truth_is_read(tmp_path: Path) -> None:
    path = write_raw(
        tmp_path / "v.parquet", [make_row(truth=7, images=[1], extra_info={"need": {"a": [1]}})]
    )
    (row,) = iter_prompt_rows([path], check_ground_truth=CHECK)
    assert row["reward_model"]["ground_truth"] == "7"
    assert row["extra_info"] == {"need": {"a": [1]}}


def test_ground_truth_and_extra_info_are_optional_where_nothing_needs_them(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "s.parquet", [{"data_source": "x", "prompt": make_row()["prompt"]}])
    (row,) = iter_prompt_rows([path])
    assert row["reward_model"] == {"ground_truth": ""}
    assert row["extra_info"] == {}
    assert "column reward_model is missing" in refused(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_source": None}, "column data_source: None must be text; name the data set"),
        ({"prompt": []}, "column prompt: must be a non-empty list of messages; remove the row"),
        ({"prompt": [{"role": "user", "content": " "}]},
         "column prompt: message 0 has an empty content; fill it or remove the row"),
        ({"prompt": [{"role": "user", "content": None}]},
         "column prompt: message 0 has content=None; it must be text"),
        ({"reward_model": {"ground_truth": None}},
         "column reward_model.ground_truth: is missing; the reward needs the right answer"),
        ({"reward_model": None},
         "column reward_model.ground_truth: is missing; the reward needs the right answer"),
        ({"reward_model": {"ground_truth": "five"}},
         "column reward_model.ground_truth: 'five' is not a number, and reward number compares "
         "numbers; correct "
         "the row or use another reward.name"),
    ],
)  # fmt: skip
def test_bad_row_names_file_row_column_rule_and_remedy(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = write_raw(tmp_path / "b.parquet", [make_row(), {**make_row(), **changes}])
    assert refused(path) == f"{path}, row 1, {message}"


def test_ground_truth_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "b.parquet", [make_row(truth=["a"])])
    assert "column reward_model.ground_truth: is ['a'], neither text nor a number" in refused(path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    assert refused(tmp_path / "no.parquet") == (
        f"{tmp_path}/no.parquet: does not exist or is not a file; `megarl prepare` writes such "
        "files"
    )


def test_truncated_and_foreign_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write_prompt_rows(path, [make_row() for _ in range(100)])
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"not parquet at all", b"PAR1" * 10):
        path.write_bytes(content)
        message = refused(path)
        assert message.startswith(f"{path}: cannot be read as Parquet (")
        assert message.endswith("; the file is truncated or not Parquet; write it again")


def test_damaged_data_pages_are_named(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write_prompt_rows(path, [make_row(f"{i} {i * i}", str(i)) for i in range(1000)])
    content = bytearray(path.read_bytes())
    content[4:2000] = b"\xff" * 1996
    path.write_bytes(bytes(content))
    assert refused(path).startswith(str(path))


def test_empty_file_missing_columns_and_wrong_kinds_are_named(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "e.parquet", [make_row()])
    pq.write_table(pq.read_table(path).slice(0, 0), path)
    assert refused(path) == f"{path}: has no rows; remove it or write it again"
    path = write_raw(tmp_path / "c.parquet", [{"question": "x", "data_source": "y"}])
    assert refused(path) == (
        f"{path}: column prompt, reward_model is missing, it has question, data_source; use files "
        "of "
        "`megarl prepare` or of verl"
    )
    path = write_raw(tmp_path / "k.parquet", [make_row(prompt="text")])
    assert (
        refused(path)
        == f"{path}: column prompt is string, it must be a list of {{role, content}}; write it so"
    )


def test_writing_nothing_or_mixed_rows_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "w.parquet"
    with pytest.raises(DataError, match="there are no rows to write"):
        write_prompt_rows(path, [])
    rows = [make_row(extra_info={"a": 1})] * 1024 + [make_row(extra_info={"a": "x"})]
    with pytest.raises(DataError, match="row 1024 or later does not fit the first rows"):
        write_prompt_rows(path, rows)
    assert list(tmp_path.iterdir()) == []
