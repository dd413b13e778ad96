"""Greedy accuracy on held-out prompts, through the engines and with the current weights."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from megarl.common.log import get_logger
from megarl.parallel import gather_lists
from megarl.rollout import SamplingParams
from megarl.trainer.experience import generate, score
from megarl.trainer.setup import Run

__all__ = ["Interval", "evaluate", "wilson_interval"]

logger = get_logger(__name__)


@dataclass(frozen=True)
class Interval:
    """A share with its 95% interval."""

    value: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.value:.1%} (95% interval {self.low:.1%} to {self.high:.1%}, n={self.count})"


def wilson_interval(num_right: float, count: int, z: float = 1.959964) -> Interval:
    """Wilson's score interval of a share; needs count >= 1.

    Wilson 1927, https://www.jstor.org/stable/2276774.
    """
    p, z2 = num_right / count, z * z
    centre = (p + z2 / (2 * count)) / (1 + z2 / count)
    half = z / (1 + z2 / count) * sqrt(p * (1 - p) / count + z2 / (4 * count * count))
    return Interval(p, max(0.0, centre - half), min(1.0, centre + half), count)


def evaluate(run: Run, *, step: int) -> Interval | None:
    """Accuracy of greedy answers to every held-out prompt; None if there are none. Collective."""
    if run.val_prompts is None:
        return None
    rollout = run.config.rollout
    greedy = SamplingParams(
        max_new_tokens=rollout.max_new_tokens,
        temperature=0.0,
        stop_token_ids=tuple(rollout.stop_token_ids),
    )
    prompts = [run.val_prompts[row] for row in range(len(run.val_prompts))]
    groups = generate(run, prompts, greedy, name=f"eval/{step}/{run.weight_version}", seed=0)
    score(run, groups)
    right = gather_lists([s.accuracy for g in groups for s in g.samples])
    interval = wilson_interval(sum(right), len(right))
    run.evaluations.append((step, interval))
    if run.writer is not None:
        run.writer.write(step, {"eval/accuracy": interval.value})
    logger.info("step %d: greedy accuracy on %d held-out prompts: %s", step, len(right), interval)
    return interval
