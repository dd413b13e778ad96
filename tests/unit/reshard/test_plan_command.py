"""`megarl plan reshard`: what it prints, and how it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from plan_model_configs import LLAMA_7B

from megarl.cli.main import main

KEYS = {
    "exactly_once",
    "world_size",
    "model_bytes",
    "recv_bytes_per_rank",
    "lower_bound_bytes_per_rank",
    "full_gather_bytes_per_rank",
    "node_ingress_bytes",
    "peak_buffer_bytes",
    "num_ops_max",
    "num_windows",
    "predicted_seconds",
    "role_map",
    "plan_seconds",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_7B))
    return tmp_path


def plan(
    model: Path, *more: str, train: str = "tp=4,dp=2", rollout: str = "tp=2,dp=4"
) -> list[str]:
    return ["plan", "reshard", "--model", str(model), "--train", train, "--rollout", rollout, *more]


def test_json_has_the_documented_keys(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(plan(model, "--json")) == 0
    out = json.loads(capsys.readouterr().out)
    assert set(out) >= KEYS
    assert out["exactly_once"] is True
    assert out["world_size"] == 8
    assert (
        set(out["recv_bytes_per_rank"]) == set(out["lower_bound_bytes_per_rank"]) == {"max", "mean"}
    )
    assert set(out["node_ingress_bytes"]) == {"max", "lower_bound"}
    assert out["recv_bytes_per_rank"]["max"] == (out["model_bytes"] - out["replicated_bytes"]) / 4


def test_options_change_the_plan(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*more: str) -> dict[str, float]:
        assert main(plan(model / "config.json", "--json", *more)) == 0
        return dict(json.loads(capsys.readouterr().out))

    plain, wide = run(), run("--dtype", "fp32")
    assert wide["model_bytes"] == 2 * plain["model_bytes"]
    assert run("--placement", "contiguous")["role_map"] == list(range(8))
    assert run("--nvlink-gbps", "36")["predicted_seconds"] > 10 * plain["predicted_seconds"]
    slow = run("--gpus-per-node", "1", "--nic-gbps", "4")
    assert slow["node_ingress_bytes"]["max"] == slow["recv_bytes_per_rank"]["max"]  # type: ignore[index]
    assert slow["predicted_seconds"] > 100 * plain["predicted_seconds"]


def test_text_shows_the_bytes_beside_the_bound(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(plan(model)) == 0
    out = capsys.readouterr().out
    lines = {line[:28].strip(): line.split()[-2:] for line in out.splitlines()}
    assert lines["received per rank   max"] == ["0.2500", "M"]
    assert lines["lower bound       max"] is not None
    assert "simulated" in out
    assert "exactly once                   yes" in out
    assert "GPU of rollout rank 0, 1, ...: 0 2 1 3" in out
    assert "The bound:" in out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rollout": "tp=2,dp=2"}, "has 4 ranks and --train has 8"),
        ({"train": "tp=3", "rollout": "tp=1,dp=3"}, "train.tp=3 does not divide"),
        ({"train": "tp=8,foo=1"}, "unknown or repeated key 'foo'"),
        ({"train": "tp=4,dp=two"}, "positive integer"),
    ],
)
def test_impossible_layouts_exit_with_2_and_a_remedy(
    model: Path, change: dict[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(plan(model, **change)) == 2
    err = capsys.readouterr().err
    assert err.startswith("megarl: ")
    assert message in err
    assert "; use" in err


@pytest.mark.parametrize("option", ["--gpus-per-node", "--nic-gbps", "--nvlink-gbps"])
def test_hardware_must_be_positive(
    model: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(plan(model, option, "0")) == 2
    assert f"{option}=0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no config.json"),
        ("{", "not readable JSON"),
        ("[]", "not a JSON object"),
        ("{}", "architectures"),
    ],
)
def test_unreadable_models_exit_with_2(
    tmp_path: Path, content: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert main(plan(tmp_path)) == 2
    assert message in capsys.readouterr().err


def test_neither_torch_nor_an_engine_is_imported(model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "megarl", *plan(model)],
        capture_output=True, text=True, env=dict(os.environ), timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    imported = {
        line.rpartition("|")[2].strip().partition(".")[0]
        for line in done.stderr.splitlines()
        if line.startswith("import time:")
    }
    assert "numpy" in imported
    assert not imported & {"torch", "megatron", "sglang", "transformers"}
