from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from megarl.data import DataError, iter_prompt_rows
from megarl.data.prepare import SOURCES, prepare
from megarl.rewards import NumberReward


def write_lines(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def rows_of(path: Path) -> list[dict[str, Any]]:
    return pq.read_table(path).to_pylist()


def test_last_rows_are_held_out_and_the_order_is_kept(tmp_path: Path) -> None:
    source = write_lines(
        tmp_path / "in.jsonl", [{"input": f"q{i}", "target": i} for i in range(10)]
    )
    counts = prepare(SOURCES["mawps"], source, tmp_path / "out", holdout=3)
    assert counts == {"train.parquet": 7, "test.parquet": 3}
    train, test = (rows_of(tmp_path / "out" / f"{name}.parquet") for name in ("train", "test"))
    assert [r["extra_info"]["index"] for r in train + test] == list(range(10))
    assert [r["reward_model"]["ground_truth"] for r in test] == ["7", "8", "9"]
    assert {r["extra_info"]["split"] for r in test} == {"test"}


def test_row_is_verls_schema_with_suffix_and_system(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"input": "How many ?", "target": 43.0}])
    prepare(SOURCES["mawps"], source, tmp_path, holdout=0, suffix=" Now.", system="Be brief.")
    assert rows_of(tmp_path / "train.parquet") == [
        {
            "data_source": "megarl/mawps",
            "prompt": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "How many ? Now."},
            ],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "43"},
            "extra_info": {"split": "train", "index": 0, "answer": "43"},
        }
    ]
    assert not (tmp_path / "test.parquet").exists()


def test_shots_are_earlier_turns_after_the_system_message(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"input": "How many ?", "target": 1}])
    shots = write_lines(
        tmp_path / "shots.jsonl",
        [{"question": "q1", "answer": "a1"}, {"question": "q2", "answer": "a2"}],
    )
    prepare(SOURCES["mawps"], source, tmp_path, holdout=0, suffix="", system="s", shots=shots)
    (row,) = rows_of(tmp_path / "train.parquet")
    assert [(m["role"], m["content"]) for m in row["prompt"]] == [
        ("system", "s"),
        ("user", "q1"),
        ("assistant", "a1"),
        ("user", "q2"),
        ("assistant", "a2"),
        ("user", "How many ?"),
    ]


def test_bad_shot_is_named(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"input": "q", "target": 1}])
    shots = write_lines(
        tmp_path / "shots.jsonl", [{"question": "q1", "answer": "a1"}, {"question": "q2"}]
    )
    with pytest.raises(DataError) as error:
        prepare(SOURCES["mawps"], source, tmp_path, holdout=0, shots=shots)
    assert str(error.value) == f"{shots}, line 2: answer=None must be text"


@pytest.mark.parametrize(
    ("name", "record", "truth", "answer"),
    [
        (
            "gsm8k",
            {"question": "q", "answer": "48/2 = <<48/2=24>>24\n#### 1,024"},
            "1024",
            "48/2 = 24\n#### 1024",
        ),
        ("gsm8k", {"question": "q", "answer": "x\n#### -5"}, "-5", "x\n#### -5"),
        ("mawps", {"input": "q", "target": 0.5}, "0.5", "0.5"),
        ("mawps", {"input": "q", "target": "12"}, "12", "12"),
        ("arithmetic", {"question": "q", "answer": 7}, "7", "7"),
        ("arithmetic", {"question": "q", "answer": "3 + 4 = 7 #### 7"}, "7", "3 + 4 = 7 #### 7"),
    ],
)
def test_truth_and_worked_answer(
    tmp_path: Path, name: str, record: dict[str, Any], truth: str, answer: str
) -> None:
    prepare(SOURCES[name], write_lines(tmp_path / "in.jsonl", [record]), tmp_path, holdout=0)
    (row,) = rows_of(tmp_path / "train.parquet")
    assert row["reward_model"]["ground_truth"] == truth
    assert row["extra_info"]["answer"] == answer
    assert row["prompt"][-1]["content"] == "q" + SOURCES[name].default_suffix


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("mawps", "{", "line 3: is not JSON ("),
        (
            "mawps",
            "[1]",
            'line 3: is no JSON object; expected lines of {"input": ..., "target": 43.0}',
        ),
        ("mawps", '{"input": "q"}', "line 3: target=None must be a number; mawps expects lines of"),
        ("mawps", '{"input": "q", "target": NaN}', "line 3: target=nan must be a number"),
        ("mawps", '{"input": " ", "target": 1}', "line 3: input=' ' must be text"),
        ("gsm8k", '{"question": "q", "answer": "5"}', "line 3: answer has no ####"),
        (
            "gsm8k",
            '{"question": "q", "answer": "#### five"}',
            "line 3: the number after ####='five' must be a number",
        ),
        ("arithmetic", '{"question": "q", "answer": "x"}', "line 3: answer='x' must be a number"),
    ],
)
def test_bad_line_is_named_and_no_file_is_left(
    tmp_path: Path, name: str, line: str, message: str
) -> None:
    good = {
        "mawps": '{"input": "q", "target": 1}',
        "gsm8k": '{"question": "q", "answer": "#### 1"}',
        "arithmetic": '{"question": "q", "answer": 1}',
    }[name]
    source = tmp_path / "in.jsonl"
    source.write_text(f"{good}\n\n{line}\n")
    with pytest.raises(DataError) as error:
        prepare(SOURCES[name], source, tmp_path / "out", holdout=0)
    assert str(error.value).startswith(f"{source}, {message}")
    assert not list((tmp_path / "out").glob("*"))


def test_holdout_must_leave_something_to_train_on(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"input": "q", "target": 1}] * 5)
    with pytest.raises(DataError, match="has 5 rows, none is left to train on; use holdout < 5"):
        prepare(SOURCES["mawps"], source, tmp_path / "out", holdout=5)
    with pytest.raises(DataError, match="holdout=-1 must be >= 0"):
        prepare(SOURCES["mawps"], source, tmp_path / "out", holdout=-1)


@pytest.mark.parametrize(
    ("name", "file", "num_train"),
    [
        ("gsm8k", "gsm8k/train.jsonl", 7373),
        ("gsm8k", "gsm8k/test.jsonl", 1219),
        ("mawps", "mawps/singleop.jsonl", 462),
        ("mawps", "mawps/multiarith.jsonl", 500),
        ("mawps", "mawps/test.jsonl", 1965),
    ],
)
def test_real_files_give_rows_the_number_reward_accepts(
    shared: Path, tmp_path: Path, name: str, file: str, num_train: int
) -> None:
    counts = prepare(SOURCES[name], shared / file, tmp_path)
    assert counts == {"train.parquet": num_train, "test.parquet": 100}
    reward = NumberReward(method="flexible")
    files = [tmp_path / n for n in counts]
    rows = list(iter_prompt_rows(files, check_ground_truth=reward.check_ground_truth))
    assert len(rows) == num_train + 100
    for row in rows:  # the worked answer must earn its own reward
        truth = row["reward_model"]["ground_truth"]
        assert "." not in truth or not truth.endswith(".0")
        assert row["extra_info"]["answer"].endswith(truth)
