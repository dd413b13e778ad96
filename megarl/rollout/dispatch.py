"""Hands a step's prompts to the replicas: whichever has room takes the next one from a shared
counter.

Data path: data -> dispatch -> engine -> rewards. No fixed split, so one replica with long responses
does not leave the others idle; seeds depend on the prompt, so results do not depend on who took it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch.distributed as dist

from megarl.rollout.base import Completion, GenerationRequest, RolloutEngine, SamplingParams
from megarl.rollout.seeds import derive_seed

__all__ = ["SharedCounter", "dispatch"]


class SharedCounter:
    """Counts 0, 1, 2, ... across all processes of a store; each value is given out once."""

    def __init__(self, store: dist.Store, name: str) -> None:
        """
        Args:
            store: a store all replicas share, e.g. torchrun's TCPStore.
            name: a name not used before in this store: one per step, such as "rollout/12".
        """
        self._store = store
        self._key = f"counter/{name}"

    def next(self) -> int:
        return int(self._store.add(self._key, 1)) - 1


def dispatch(
    engine: RolloutEngine,
    prompts: Sequence[list[int]],
    sampling: SamplingParams,
    counter: SharedCounter,
    seed: int,
) -> dict[int, list[Completion]]:
    """Generate with this replica until the shared prompts are used up.

    Args:
        engine: this replica's engine.
        prompts: token ids of all prompts of the step, the same on every replica.
        sampling: how to draw.
        counter: a counter of this step's own.
        seed: the step's seed, e.g. derive_seed(rollout.seed, step); prompt i draws from (seed, i).

    Returns:
        {prompt index: completions} of the prompts this replica took; the replicas' results are
        disjoint and together cover all prompts.

    Raises:
        RolloutError: the engine died or is over its time limit. Prompts it had taken are lost.
    """

    def requests() -> Iterator[GenerationRequest]:
        while (index := counter.next()) < len(prompts):
            yield GenerationRequest(
                key=index, prompt_ids=prompts[index], seed=derive_seed(seed, index)
            )

    return dict(engine.generate(requests(), sampling))
