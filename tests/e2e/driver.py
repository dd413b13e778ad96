"""`driver.py FAULT CONFIG key=value ...`: megarl train with a fault injected into one rank."""

from __future__ import annotations

import sys
import time
from typing import Any

import megarl.trainer.experience as experience
import megarl.trainer.loop as loop
from megarl.config import TrainConfig, load_config
from megarl.trainer.run import train


def reward_raises(run: Any, groups: Any) -> None:
    """The reward of rank 1 raises in the second step."""
    if run.weight_version == 2 and run.world.rank == 1:

        def score(text: str, prompt: Any) -> Any:
            raise RuntimeError("injected into the reward of rank 1")

        run.reward.score = score
    experience.score(run, groups)


def stage_raises(run: Any, groups: Any) -> None:
    """Rank 1 raises outside any agreement, so rank 0 is left alone in a collective."""
    if run.weight_version == 2 and run.world.rank == 1:
        raise RuntimeError("injected between the stages of rank 1")
    experience.score(run, groups)


def stage_hangs(run: Any, groups: Any) -> None:
    """Rank 1 never arrives: the others must give up at parallel.timeout_s."""
    if run.weight_version == 2 and run.world.rank == 1:
        time.sleep(600)
    experience.score(run, groups)


if __name__ == "__main__":
    loop.score = {f.__name__: f for f in (reward_raises, stage_raises, stage_hangs)}[sys.argv[1]]
    sys.exit(train(load_config(TrainConfig, sys.argv[2], sys.argv[3:])))
