"""Rollout engines: prompts in, samples out, weights pushed in between.

Importing this package imports no engine; `create_engine` imports the one that is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

from megarl.config.schema import RolloutConfig
from megarl.rollout.base import (
    Completion,
    GenerationRequest,
    RolloutEngine,
    RolloutError,
    SamplingParams,
    WeightSyncError,
)
from megarl.rollout.model_files import read_hf_config
from megarl.rollout.sglang_layout import hf_weight_layout, sglang_weight_layout
from megarl.rollout.shards import digest
from megarl.types import WeightLayout

__all__ = [
    "Completion", "GenerationRequest", "RolloutEngine", "RolloutError", "SamplingParams",
    "WeightSyncError", "create_engine", "digest", "engine_class", "engine_weight_layout",
]  # fmt: skip


def engine_class(config: RolloutConfig) -> type[RolloutEngine]:
    """The class of `rollout.engine`; imports it."""
    if config.engine == "sglang":
        from megarl.rollout.sglang_engine import SGLangEngine

        return SGLangEngine
    from megarl.rollout.hf_engine import HFEngine

    return HFEngine


def create_engine(
    config: RolloutConfig,
    *,
    model_path: str,
    dtype: str,
    devices: Sequence[int] | None = None,
    num_threads: int | None = None,
    seed: int = 0,
) -> RolloutEngine:
    """Start this replica's engine; called by the replica's leader.

    Args:
        config: section `rollout`.
        model_path: Hugging Face folder it starts from.
        dtype: "float32" or "bfloat16".
        devices: CUDA device of each engine rank as this process numbers them; None: CPU.
        num_threads: cores of this replica on CPU; None: torch's default.
        seed: seed of what has no seed of its own.

    Raises:
        RolloutError: it did not start; the message says why.
    """
    return engine_class(config)(  # type: ignore[call-arg]
        config,
        model_path=model_path,
        dtype=dtype,
        devices=devices,
        num_threads=num_threads,
        seed=seed,
    )


def engine_weight_layout(config: RolloutConfig, *, model_path: str, tp_rank: int) -> WeightLayout:
    """What rank `tp_rank` of an engine of this kind holds, without an engine: for ranks that lead
    none.
    """
    hf_config = read_hf_config(model_path)
    if config.engine == "sglang":
        return sglang_weight_layout(hf_config, config.tp, tp_rank)
    return hf_weight_layout(hf_config)
