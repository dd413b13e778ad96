"""Entry points of `megarl train`: output directory, build, loop, summary."""

from __future__ import annotations

from pathlib import Path

from megarl.common.log import configure_logging, get_logger
from megarl.common.timing import PhaseTimer
from megarl.config.schema import TrainConfig
from megarl.parallel import all_agree, init_world
from megarl.trainer.console import write_summary
from megarl.trainer.failure import leave, run_guarded
from megarl.trainer.loop import train_loop
from megarl.trainer.rundir import open_run_dir
from megarl.trainer.setup import Run, build_run

__all__ = ["train"]

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

    def close() -> None:
        for run in built:
            run.close()

    code = run_guarded(world, main, close)
    if code:
        leave(code)
    return code
