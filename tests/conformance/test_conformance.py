from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def vectors() -> Path:
    """The reference numbers: $MEGARL_SHARED/vectors, else ../shared/vectors."""
    folder = Path(os.environ.get("MEGARL_SHARED", ROOT.parent / "shared")) / "vectors"
    path = folder / "verl_vectors.json"
    if not path.exists():
        pytest.skip(f"no reference numbers at {path}; set MEGARL_SHARED")
    return path


def run(path: Path) -> tuple[int, list[str]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.conformance.run", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout.splitlines()


def test_every_reference_number_is_met_or_deliberately_different() -> None:
    path = vectors()
    code, lines = run(path)
    num_cases = sum(not name.startswith("_") for name in json.loads(path.read_text()))
    assert [line for line in lines if line.startswith("FAILED")] == []
    assert lines[-1] == f"{num_cases} passed, 0 failed"
    assert code == 0


def test_a_wrong_number_and_an_unknown_id_are_failures(tmp_path: Path) -> None:
    mask = {"shape": [1, 2], "dtype": "float64", "data": [[1.0, 1.0]]}
    values = {"shape": [1, 2], "dtype": "float64", "data": [[1.0, 2.0]]}
    case = {"params": {}, "inputs": {"values": "v", "mask": "m"}}
    path = tmp_path / "v.json"
    path.write_text(
        json.dumps(
            {
                "_shared": {"v": values, "m": mask},
                "masked_sum": {
                    **case,
                    "outputs": {"shape": [], "dtype": "float64", "data": 3.0},
                },
                "masked_mean": {
                    **case,
                    "outputs": {"shape": [], "dtype": "float64", "data": 1.6},
                },
                "astrology/1": {**case, "outputs": 1},
            }
        )
    )
    code, lines = run(path)
    assert code == 1
    assert lines[0].startswith("FAILED masked_mean: 1.5")
    assert lines[1].startswith("FAILED astrology/1: unknown id")
    assert lines[-1] == "1 passed, 2 failed"
