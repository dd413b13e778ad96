"""Runs triton_cases.py under Triton's interpreter, and the compile gate, in their own processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def run(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], env={**os.environ, **environment}, capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_kernels_equal_float64_under_the_interpreter() -> None:
    cases = Path(__file__).with_name("triton_cases.py")
    out = run(
        "-m", "pytest", "-p", "no:cacheprovider", str(cases), TRITON_INTERPRET="1",
        MEGARL_KERNELS="triton",
    )  # fmt: skip
    assert "passed" in out


def test_sm_90_gate_finds_no_fault_in_the_main_configurations() -> None:
    names = ("gae_scan mask=0", "log_prob_gradient bf16 entropy=1", "64 bf16 entropy=1")
    table = run("-m", "megarl_kernels.compile_check", *names, TRITON_INTERPRET="0")
    assert len([line for line in table.splitlines() if line.endswith("  ok")]) == 4


def test_sm_90_gate_names_each_broken_rule() -> None:
    code = """
from megarl_kernels.compile_check import Case, Report
matrix = Case("m", None, {}, {}, is_matrix=True)
memory = Case("b", None, {}, {}, is_memory_bound=True)
good = dict(registers=128, spills=0, shared_bytes=1000, wgmma=4, tma=8, wide=8, narrow=0)
for case, change in ((matrix, {}), (matrix, {"spills": 2}), (matrix, {"wgmma": 0}),
                     (matrix, {"shared_bytes": 240_000}), (memory, {}), (memory, {"narrow": 8}),
                     (memory, {"wide": 0})):
    print(Report(**good | change).faults(case))
"""
    assert run("-c", code).splitlines() == [
        "[]", "['2 spills']", "['no wgmma or no TMA']", "['shared memory 240000 > 232448']", "[]",
        "['8 narrow and 8 16-byte accesses']", "['0 narrow and 0 16-byte accesses']",
    ]  # fmt: skip
