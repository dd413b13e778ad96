"""The contract every rollout engine keeps: token ids in, samples of token ids out.

An engine owns one replica of the actor in the rollout layout. It knows nothing of rewards, training
or other replicas. Data path: `dispatch` hands it prompts; the samples go to `rewards`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from megarl.types import FinishReason, WeightLayout

__all__ = [
    "Completion",
    "GenerationRequest",
    "RolloutEngine",
    "RolloutError",
    "SamplingParams",
    "WeightSyncError",
]


class RolloutError(RuntimeError):
    """An engine did not start, died, or did not answer within its time limit."""


class WeightSyncError(RuntimeError):
    """A weight push failed, was partial, or left the engine with weights other than those sent."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to draw. `temperature` 0 is greedy; then the other draws are ignored and log-probs are at
    temperature 1.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    num_samples: int = 1


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One prompt. `key` comes back with the result; `seed` makes its draws reproducible on the same
    engine.
    """

    key: int
    prompt_ids: list[int]
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One response. `log_probs[i]` is log p(response_ids[i] | earlier) at the sampling temperature,
    before top-p and top-k; a stop token that ended the response is its last id.
    """

    response_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    weight_version: int


class RolloutEngine(ABC):
    """One replica. Methods are called by the replica's leader rank only, except where said.

    `weight_version` is the version of the last completed push (0: the weights it was started from).
    """

    weight_version: int = 0

    @abstractmethod
    def generate(
        self, requests: Iterable[GenerationRequest], sampling: SamplingParams
    ) -> Iterator[tuple[int, list[Completion]]]:
        """Yield (key, `num_samples` completions) as prompts finish, in any order.

        Requests are taken from the iterable only when the engine has room for one more, so several
        replicas can share one source. Raises RolloutError when the engine dies or is over its time
        limit.
        """

    @abstractmethod
    def weight_layout(self, tp_rank: int) -> WeightLayout:
        """What engine rank `tp_rank` of this replica holds, in its own parameter names."""

    @abstractmethod
    def begin_update(self) -> None:
        """Start a weight push; no generation may run until `end_update`."""

    @abstractmethod
    def update_weights(self, shards: Sequence[dict[str, torch.Tensor | bytes]]) -> None:
        """Install part of a push: for each engine rank, {engine parameter: whole local parameter}.

        A tensor, or the bytes `export_shard` made of one in another process. Raises
        WeightSyncError.
        """

    @abstractmethod
    def end_update(self, version: int) -> None:
        """Finish the push: drop cached prefixes, stamp `version`. Raises WeightSyncError on any
        doubt.
        """

    @abstractmethod
    def checksums(self) -> list[dict[str, str]]:
        """Per engine rank: {parameter: digest of its bytes}, to prove what arrived."""

    @staticmethod
    @abstractmethod
    def export_shard(tensor: torch.Tensor) -> torch.Tensor | bytes:
        """Make a local shard passable to the leader's process (CPU shared memory or a CUDA IPC
        handle).
        """

    @abstractmethod
    def sleep(self) -> None:
        """Release the KV cache and weights to training (no-op where nothing can be released)."""

    @abstractmethod
    def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Undo `sleep`; weights first, push, then kv_cache."""

    @abstractmethod
    def abort(self) -> None:
        """Stop all running requests; they come back with finish_reason "abort"."""

    @abstractmethod
    def close(self) -> None:
        """Stop every process of the engine. Safe to call twice."""
