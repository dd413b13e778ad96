"""The run directory: resolved config and versions, written before anything else."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import megarl
from megarl.config import resolved_yaml
from megarl.config.schema import SftConfig, TrainConfig

__all__ = ["open_run_dir", "versions"]


def open_run_dir(config: TrainConfig | SftConfig, output_dir: Path, rank: int) -> None:
    """Create the run directory on rank 0 and write the resolved config and the versions into it."""
    if rank != 0:
        return
    output_dir.mkdir(parents=True, exist_ok=True)
    (output_dir / "config.yaml").write_text(resolved_yaml(config))
    (output_dir / "versions.json").write_text(json.dumps(versions(), indent=1) + "\n")


def versions() -> dict[str, str | None]:
    """What produced a run: megarl's version and commit, Python, and the packages that matter."""
    found: dict[str, str | None] = {
        "megarl": megarl.__version__,
        "commit": _commit(),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
    for package in (
        "torch",
        "megatron-core",
        "sglang",
        "transformers",
        "transformer-engine",
        "numpy",
    ):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def _commit() -> str | None:
    here = Path(megarl.__file__).parent
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
