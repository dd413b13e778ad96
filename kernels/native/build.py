"""Builds the C++ sources beside this file into one shared library, once per machine and version.

The file's name is a hash of sources, flags, compiler and processor. It is built under another name
and renamed, so any number of processes may start at once.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import tempfile
from pathlib import Path

__all__ = ["BuildError", "build", "cache_dir"]

SOURCES = Path(__file__).parent
# Sums may be re-ordered (vectors need that); infinities and NaN keep their meaning.
FLAGS = (
    "-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-fvisibility=hidden",
    "-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros",
)  # fmt: skip


class BuildError(Exception):
    """No compiler, or it failed; the message says which."""


def cache_dir() -> Path:
    """MEGARL_KERNELS_CACHE, or megarl/kernels in the user's cache folder (XDG_CACHE_HOME)."""
    if override := os.environ.get("MEGARL_KERNELS_CACHE"):
        return Path(override)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "megarl" / "kernels"


def build() -> Path:
    """Path of the library for this machine; compiles it (about 2 s) where it is missing.

    Raises:
        BuildError: there is no working compiler ($CXX, else g++) or no place to write.
    """
    compiler = os.environ.get("CXX", "g++")
    sources = sorted(SOURCES.glob("*.cpp"))
    try:
        version = _run([compiler, "--version"])
        key = hashlib.sha256("\0".join((*FLAGS, version, _processor())).encode())
        for path in (*sources, *sorted(SOURCES.glob("*.h"))):
            key.update(path.read_bytes())
        folder = cache_dir()
        library = folder / f"megarl_kernels-{key.hexdigest()[:20]}.so"
        if library.exists():
            return library
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as scratch:
            made = Path(scratch) / "library.so"
            _run([compiler, *FLAGS, *map(str, sources), "-o", str(made)])
            made.replace(library)
    except OSError as error:
        raise BuildError(f"cannot build the C++ library: {error}") from error
    return library


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{command[0]} failed ({done.returncode}): {done.stderr.strip()[-2000:]}")
    return done.stdout


def _processor() -> str:
    """What -march=native depends on: a shared home folder may serve different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
