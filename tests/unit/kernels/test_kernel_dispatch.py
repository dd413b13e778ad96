"""Choice of a backend, and the build of the C++ library."""

from __future__ import annotations

import logging
import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from megarl_kernels import dispatch, native, whiten
from megarl_kernels.native import library
from megarl_kernels.native.build import BuildError, build


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test as in a new process: nothing logged, no library loaded."""
    monkeypatch.delenv("MEGARL_KERNELS", raising=False)
    dispatch._log_once.cache_clear()
    library._load.cache_clear()


def test_auto_takes_the_library_on_cpu_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "megarl_kernels"):
        assert dispatch.choose_backend("gae", torch.zeros(1)) == "cpu"
        assert dispatch.choose_backend("gae", torch.zeros(1)) == "cpu"
    assert caplog.messages == ["gae: backend cpu (MEGARL_KERNELS=auto)"]


@pytest.mark.parametrize(
    ("wanted", "dtype", "message"),
    [
        ("cuda", torch.float32, "MEGARL_KERNELS=cuda must be one of auto, torch, cpu, triton"),
        ("triton", torch.float32, "MEGARL_KERNELS=triton cannot run gae: the tensors are on cpu"),
        ("cpu", torch.float16, "cannot run gae: the C.. library has no torch.float16"),
    ],
)
def test_a_backend_that_cannot_run_is_refused(
    monkeypatch: pytest.MonkeyPatch, wanted: str, dtype: torch.dtype, message: str
) -> None:
    monkeypatch.setenv("MEGARL_KERNELS", wanted)
    with pytest.raises(ValueError, match=message):
        dispatch.choose_backend("gae", torch.zeros(1, dtype=dtype))


def test_without_a_compiler_auto_runs_in_torch_with_one_warning_and_cpu_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert whiten(torch.tensor([1.0, 3.0]), None).sum() == 0
    whiten(torch.tensor([1.0, 3.0]), None)
    warnings = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "whiten runs in plain torch: cannot build the C++ library" in warnings[0]
    monkeypatch.setenv("MEGARL_KERNELS", "cpu")
    with pytest.raises(ValueError, match="no-such-compiler"):
        whiten(torch.tensor([1.0]), None)
    library._load.cache_clear()


def test_a_failing_compiler_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "cxx"
    fake.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho broken pipe dream >&2; exit 3\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    monkeypatch.setenv("MEGARL_KERNELS_CACHE", str(tmp_path / "cache"))
    with pytest.raises(BuildError, match=r"failed \(3\): broken pipe dream"):
        build()
    assert list((tmp_path / "cache").iterdir()) == []


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEGARL_KERNELS_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert native.cache_dir() == Path("/somewhere/megarl/kernels")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert native.cache_dir() == Path("/home/me/.cache/megarl/kernels")
    monkeypatch.setenv("MEGARL_KERNELS_CACHE", "/fast/disk")
    assert native.cache_dir() == Path("/fast/disk")


def test_processes_that_start_at_once_build_one_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MEGARL_KERNELS_CACHE", str(tmp_path))
    with multiprocessing.get_context("fork").Pool(3) as pool:
        made = pool.starmap(build, [()] * 3)
    assert len(set(made)) == 1
    assert list(tmp_path.iterdir()) == [made[0]]  # and nothing half-built is left
    stamp = made[0].stat().st_mtime_ns
    assert build() == made[0]
    assert made[0].stat().st_mtime_ns == stamp


def test_the_library_shares_the_thread_pool_of_torch() -> None:
    code = (
        "import torch\nfrom megarl_kernels import native\nassert native.obstacle() is None\n"
        "maps = open('/proc/self/maps').read().splitlines()\n"
        "print(len({line.split()[-1] for line in maps if 'libgomp' in line}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"
