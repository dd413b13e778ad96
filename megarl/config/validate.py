"""Rules across sections: layout against model and ranks, limits against each other, files, names.

Pure reading: nothing is created, no process group and no torch. A rule on one section alone is in
schema.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd
from pathlib import Path

from megarl.config.choices import ADVANTAGES, POLICY_LOSSES, REWARD_OPTIONS, REWARDS
from megarl.config.errors import ConfigError, require
from megarl.config.modelfolder import ModelShape, read_model_shape
from megarl.config.schema import (
    DataConfig,
    ParallelConfig,
    RewardConfig,
    SftConfig,
    TrainConfig,
)
from megarl.config.typecheck import did_you_mean

__all__ = ["ResolvedDims", "validate_sft", "validate_train"]


@dataclass(frozen=True, kw_only=True)
class ResolvedDims:
    """The training mesh and the number of rollout replicas on `world_size` ranks."""

    tp: int
    cp: int
    pp: int
    dp: int
    num_replicas: int


def validate_train(config: TrainConfig, *, world_size: int) -> ResolvedDims:
    """Check every rule of `megarl train` that needs more than one section.

    Raises:
        ConfigError: key, value, rule and remedy of the first broken rule.
    """
    _check_names(config)
    shape = read_model_shape(config.model)
    _check_training_layout(config.parallel, shape)
    _check_rollout_layout(config, shape, world_size)
    dims = _resolve_dims(config.parallel, world_size, num_replicas=world_size // config.rollout.tp)
    _check_batch(config, dims)
    _check_lengths(config, shape)
    _check_files(config.data)
    _check_output_dir(config.trainer.output_dir)
    return dims


def validate_sft(config: SftConfig, *, world_size: int) -> ResolvedDims:
    """Check every rule of `megarl sft` across sections; errors as in validate_train."""
    shape = read_model_shape(config.model)
    _check_training_layout(config.parallel, shape)
    dims = _resolve_dims(config.parallel, world_size, num_replicas=0)
    trainer = config.trainer
    require(
        trainer.rows_per_step >= dims.dp, "trainer.rows_per_step", trainer.rows_per_step,
        f"is less than dp={dims.dp}: a rank would have no row", f"use at least {dims.dp}",
    )  # fmt: skip
    _check_fits_microbatch(
        trainer.max_tokens, "trainer.max_tokens", trainer.max_tokens_per_microbatch, config.parallel
    )
    require(
        trainer.max_tokens <= shape.max_positions, "trainer.max_tokens", trainer.max_tokens,
        f"exceeds the model's max_position_embeddings={shape.max_positions}",
        f"use at most {shape.max_positions}",
    )  # fmt: skip
    require(
        config.data.max_prompt_tokens <= trainer.max_tokens
        or config.data.overlong_prompt == "drop",
        "data.max_prompt_tokens",
        config.data.max_prompt_tokens,
        f"exceeds trainer.max_tokens={trainer.max_tokens}",
        f"use at most {trainer.max_tokens}",
    )
    require(
        not config.data.val_files,
        "data.val_files",
        config.data.val_files,
        "is not used by megarl sft",
        "remove it; `megarl train` evaluates",
    )
    _check_files(config.data)
    _check_output_dir(trainer.output_dir)
    return dims


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _listing(numbers: Iterable[int]) -> str:
    return "use " + ", ".join(map(str, numbers))


def _check_names(config: TrainConfig) -> None:
    algorithm = config.algorithm
    for key, name, known in (
        ("algorithm.advantage", algorithm.advantage, ADVANTAGES),
        ("algorithm.policy_loss", algorithm.policy_loss, POLICY_LOSSES),
        ("reward.name", config.reward.name, REWARDS),
    ):
        rule = "is not a known name" + did_you_mean(name, known)
        require(name in known, key, name, rule, f"use {', '.join(known)}")
    _check_reward_options(config.reward)


def _check_reward_options(reward: RewardConfig) -> None:
    known = REWARD_OPTIONS[reward.name]
    for option, value in reward.options.items():
        key = f"reward.options.{option}"
        if option not in known:
            raise ConfigError(
                f"unknown key {key}{did_you_mean(option, known)}; valid options of {reward.name}: "
                f"{', '.join(known)}"
            )
        valid = known[option]
        rule = "is not a valid choice" + did_you_mean(str(value), valid)
        require(not valid or value in valid, key, value, rule, f"use {', '.join(valid)}")


def _check_training_layout(parallel: ParallelConfig, shape: ModelShape) -> None:
    valid = _divisors(gcd(shape.num_heads, shape.num_kv_heads, shape.ffn_size))
    for name, size in (
        ("num_attention_heads", shape.num_heads),
        ("num_key_value_heads", shape.num_kv_heads),
        ("intermediate_size", shape.ffn_size),
    ):
        rule = f"does not divide {name}={size}"
        require(size % parallel.tp == 0, "parallel.tp", parallel.tp, rule, _listing(valid))
    require(
        shape.num_layers % parallel.pp == 0,
        "parallel.pp",
        parallel.pp,
        f"does not divide num_hidden_layers={shape.num_layers}",
        _listing(_divisors(shape.num_layers)),
    )


def _resolve_dims(parallel: ParallelConfig, world_size: int, *, num_replicas: int) -> ResolvedDims:
    """tp * cp * pp * dp = world_size, dp filled in when it is not given."""
    model_ranks = parallel.tp * parallel.cp * parallel.pp
    product = f"parallel.tp={parallel.tp} * cp={parallel.cp} * pp={parallel.pp}"
    if world_size % model_ranks:
        valid = ", ".join(map(str, _divisors(world_size)))
        raise ConfigError(
            f"{product} = {model_ranks} does not divide the number of ranks {world_size}; "
            f"use a tp * cp * pp among {valid}, or start a multiple of {model_ranks} ranks"
        )
    dp = world_size // model_ranks
    require(
        parallel.dp in (None, dp), "parallel.dp", parallel.dp,
        f"times {product} is not the number of ranks {world_size}",
        f"use parallel.dp={dp} or null, or start {model_ranks * (parallel.dp or 1)} ranks",
    )  # fmt: skip
    return ResolvedDims(
        tp=parallel.tp, cp=parallel.cp, pp=parallel.pp, dp=dp, num_replicas=num_replicas
    )


def _check_rollout_layout(config: TrainConfig, shape: ModelShape, world_size: int) -> None:
    tp = config.rollout.tp

    def fits_kv_heads(
        size: int,
    ) -> bool:  # an engine replicates KV heads when there are fewer than ranks
        return shape.num_kv_heads % size == 0 or size % shape.num_kv_heads == 0

    valid = [d for d in _divisors(gcd(shape.num_heads, shape.ffn_size)) if fits_kv_heads(d)]
    for name, size in (
        ("num_attention_heads", shape.num_heads),
        ("intermediate_size", shape.ffn_size),
    ):
        require(size % tp == 0, "rollout.tp", tp, f"does not divide {name}={size}", _listing(valid))
    require(
        fits_kv_heads(tp),
        "rollout.tp",
        tp,
        f"neither divides nor is divided by num_key_value_heads={shape.num_kv_heads}",
        _listing(valid),
    )
    require(
        world_size % tp == 0, "rollout.tp", tp, f"does not divide the number of ranks {world_size}",
        _listing([d for d in valid if world_size % d == 0]),
    )  # fmt: skip


def _check_batch(config: TrainConfig, dims: ResolvedDims) -> None:
    prompts, minibatches = config.trainer.prompts_per_step, config.algorithm.num_minibatches
    require(
        prompts % minibatches == 0, "algorithm.num_minibatches", minibatches,
        f"does not divide trainer.prompts_per_step={prompts}", _listing(_divisors(prompts)),
    )  # fmt: skip
    num_samples = prompts // minibatches * config.rollout.num_samples
    per_group = minibatches * dims.dp
    least = -(-per_group // config.rollout.num_samples)
    least = -(-least // minibatches) * minibatches
    require(
        num_samples >= dims.dp, "trainer.prompts_per_step", prompts,
        f"times rollout.num_samples={config.rollout.num_samples} over "
        f"algorithm.num_minibatches={minibatches} is {num_samples} samples, less than dp={dims.dp}",
        f"use a multiple of {minibatches} from {least}",
    )  # fmt: skip


def _check_lengths(config: TrainConfig, shape: ModelShape) -> None:
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_new_tokens
    longest = prompt + response
    what = f"plus rollout.max_new_tokens={response} is {longest} tokens, more than"
    limits = [
        ("the model's max_position_embeddings", shape.max_positions),
        ("rollout.max_total_tokens", config.rollout.max_total_tokens),
    ]
    if config.rollout.context_length is not None:
        limits.append(("rollout.context_length", config.rollout.context_length))
    for name, limit in limits:
        if longest > limit:
            raise ConfigError(
                f"data.max_prompt_tokens={prompt} {what} {name}={limit}; "
                f"lower their sum to {limit}{'' if name.startswith('the') else f' or raise {name}'}"
            )
    key = f"data.max_prompt_tokens={prompt} + rollout.max_new_tokens"
    _check_fits_microbatch(
        longest, key, config.trainer.max_tokens_per_microbatch, config.parallel, response
    )


def _check_fits_microbatch(
    longest: int, key: str, limit: int, parallel: ParallelConfig, value: int | None = None
) -> None:
    """The longest sequence, padded for sequence parallelism, fits into one micro-batch."""
    multiple = parallel.tp if parallel.sequence_parallel else 1
    padded = -(-longest // multiple) * multiple
    note = f" (padded to a multiple of tp={multiple})" if padded != longest else ""
    require(
        padded <= limit, key, longest if value is None else value,
        f"is {padded} tokens{note}, more than trainer.max_tokens_per_microbatch={limit}",
        f"use trainer.max_tokens_per_microbatch={padded} or more, or lower the lengths",
    )  # fmt: skip


def _check_files(data: DataConfig) -> None:
    for key, files in (("data.train_files", data.train_files), ("data.val_files", data.val_files)):
        for file in files:
            require(
                Path(file).is_file(), key, file, "does not exist or is not a file",
                "give Parquet files; `megarl prepare` writes them",
            )  # fmt: skip


def _check_output_dir(output_dir: str) -> None:
    path = Path(output_dir)
    key = "trainer.output_dir"
    require(not path.exists() or path.is_dir(), key, output_dir, "is a file", "give a new folder")
    require(
        not path.is_dir() or not any(path.iterdir()), key, output_dir, "is not empty",
        "give a new folder, or move the old run away",
    )  # fmt: skip
    parent = next(p for p in (path, *path.absolute().parents) if p.exists())
    require(
        os.access(parent, os.W_OK), key, output_dir, f"cannot be written below {parent}",
        "give a folder you may write to",
    )  # fmt: skip
