"""Entry points of `megarl train`: output directory, build, loop, summary."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import megarl
from megarl.common.log import configure_logging, get_logger
from megarl.common.timing import PhaseTimer
from megarl.config import resolved_yaml
from megarl.config.schema import SftConfig, TrainConfig
from megarl.parallel import all_agree, init_world
from megarl.trainer.console import write_summary
from megarl.trainer.failure import leave, run_guarded
from megarl.trainer.loop import train_loop
from megarl.trainer.setup import Run, build_run

__all__ = ["open_run_dir", "train"]

logger = get_logger(__name__)


def train(config: TrainConfig) -> int:
    """Train as `config` says; returns the process's exit status. Every rank of the job calls it."""
    configure_logging()
    world = init_world(device=config.trainer.device, timeout_s=config.parallel.timeout_s)
    output_dir = Path(config.trainer.output_dir)
    built: list[Run] = []

    def main() -> None:
        timer = PhaseTimer()
        all_agree("making the run directory", lambda: open_run_dir(config, output_dir, world.rank))
        run = build_run(config, world, output_dir)
        built.append(run)
        logger.info("ready after %.0f s", timer.total_s)
        train_loop(run)
        if config.trainer.save_final:
            run.actor.save_hf(output_dir / "final")
        if run.is_main:
            logger.info("%s", write_summary(output_dir, run.evaluations, elapsed_s=timer.total_s))

    code = run_guarded(world, main, lambda: [run.close() for run in built])  # type: ignore[arg-type,return-value]
    if code:
        leave(code)
    return code


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
    for package in ("torch", "megatron-core", "sglang", "transformers", "transformer-engine", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def _commit() -> str | None:
    here = Path(megarl.__file__).parent
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
