from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.cli.main import main

CONFIG = """
model: {path: %(root)s/model}
data: {train_files: [%(root)s/a.parquet], max_prompt_tokens: 8}
rollout: {max_new_tokens: 8}
trainer: {output_dir: %(root)s/out}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG % {"root": tmp_path})
    return path


def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "megarl", *args],
        capture_output=True, text=True, env={**os.environ, **env}, timeout=60,
    )  # fmt: skip


def imported(done: subprocess.CompletedProcess[str]) -> set[str]:
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}


@pytest.mark.parametrize("command", ["train", "sft"])
def test_unknown_key_exits_with_2_before_torch_is_imported(command: str, config: Path) -> None:
    done = run(command, str(config), "trainer.num_step=1")
    assert done.returncode == 2
    assert "unknown key trainer.num_step (did you mean trainer.num_steps?)" in done.stderr
    modules = imported(done)
    assert "megarl" in modules
    assert modules & {"torch", "transformers", "megatron", "sglang", "numpy", "pyarrow"} == set()


def test_rule_across_sections_exits_with_2_before_torch_is_imported(config: Path) -> None:
    done = run("train", str(config))
    assert done.returncode == 2
    assert "is not a folder on this machine" in done.stderr
    assert "torch" not in imported(done)


def test_only_rank_0_says_what_is_wrong_and_all_ranks_exit_with_2(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = {}
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert main(["train", str(config), "foo=1"]) == 2
        printed[rank] = capsys.readouterr().err
    assert printed["0"].startswith("megarl: unknown key foo; valid sections: model, parallel")
    assert printed["1"] == ""


def test_world_size_of_torchrun_is_what_the_layout_is_checked_against(
    tmp_path: Path,
    config: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _make_model(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert main(["train", str(config), "parallel.tp=2"]) == 2
    assert "= 2 does not divide the number of ranks 3" in capsys.readouterr().err


def test_check_says_valid_and_starts_nothing(
    tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _make_model(tmp_path)
    assert main(["train", str(config), "--check", "trainer.num_steps=3"]) == 0
    assert capsys.readouterr().out == f"{config} is valid: tp=1 cp=1 pp=1 dp=1\n"
    assert not (tmp_path / "out").exists()


def _make_model(root: Path) -> None:
    folder = root / "model"
    folder.mkdir()
    (folder / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "num_attention_heads": 4, '
        '"num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 128}'
    )
    for name in ("model.safetensors", "tokenizer.json", "chat_template.jinja"):
        (folder / name).write_text("")
    (root / "a.parquet").write_text("")


@pytest.mark.parametrize(
    "args", [["--help"], ["train", "--help"], ["sft", "--help"], ["prepare", "--help"]]
)
def test_help_exits_with_0(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(args)
    assert stop.value.code == 0
    text = capsys.readouterr().out
    if args[0] in ("train", "sft"):
        assert "key=value" in text
        assert f"megarl config {args[0]}" in text


@pytest.mark.parametrize("args", [[], ["fly"], ["train"], ["prepare", "svamp"]])
def test_bad_command_line_exits_with_2(args: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(args)
    assert stop.value.code == 2


def test_config_command_prints_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "sft"]) == 0
    text = capsys.readouterr().out
    assert "  trainer.rows_per_step=32  (an integer)" in text
    assert "rollout." not in text


def test_prepare_prints_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"input": "1 + 1 ?", "target": 2.0}\n' * 5)
    args = [
        "prepare",
        "mawps",
        "--input",
        str(source),
        "--output",
        str(tmp_path / "out"),
        "--holdout",
        "2",
    ]
    assert main(args) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path}/out/train.parquet: 3 rows", f"{tmp_path}/out/test.parquet: 2 rows"
    ]  # fmt: skip


def test_prepare_refuses_bad_input_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = [
        "prepare",
        "gsm8k",
        "--input",
        str(tmp_path / "no.jsonl"),
        "--output",
        str(tmp_path / "out"),
    ]
    assert main(args) == 2
    assert capsys.readouterr().err == (
        f"megarl: {tmp_path}/no.jsonl: does not exist or is not a file; give a local JSON-lines "
        "file\n"
    )


def test_every_source_is_a_choice_of_prepare() -> None:
    from megarl.cli.main import _SOURCE_NAMES
    from megarl.data.prepare import SOURCES

    assert sorted(SOURCES) == sorted(_SOURCE_NAMES)
