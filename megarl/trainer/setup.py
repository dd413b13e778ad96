"""Composition root: from a config to everything the loop uses, built in one order on every rank."""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from transformers import PreTrainedTokenizerBase

from megarl.common.log import get_logger
from megarl.config.schema import ParallelConfig, TrainConfig
from megarl.data import PromptDataset, PromptOrder, load_tokenizer
from megarl.models import MegatronModel
from megarl.parallel import ParallelDims, ParallelGroups, World, all_agree
from megarl.reshard import WeightPush
from megarl.rewards import Reward, create_reward
from megarl.rollout import RolloutEngine, create_engine, digest, engine_class, engine_weight_layout
from megarl.trainer.metrics import MetricWriter

__all__ = ["Replica", "Run", "build_run", "dims_of", "set_threads_and_seed"]

logger = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Replica:
    """This rank's place in the rollout layout: a replica is consecutive ranks, led by the first."""

    index: int
    num_replicas: int
    tp_rank: int
    group: ProcessGroup

    @property
    def is_leader(self) -> bool:
        return self.tp_rank == 0


@dataclass(kw_only=True)
class Run:
    """What the stages of the loop share."""

    config: TrainConfig
    world: World
    groups: ParallelGroups
    replica: Replica
    tokenizer: PreTrainedTokenizerBase
    train_prompts: PromptDataset
    val_prompts: PromptDataset | None
    order: PromptOrder
    reward: Reward
    actor: MegatronModel
    reference: MegatronModel | None
    engine: RolloutEngine | None  # on replica leaders
    push: WeightPush
    writer: MetricWriter | None  # on rank 0
    hidden_size: int
    max_log_prob_diff: float | None
    weight_version: int = 0
    evaluations: list[tuple[int, Any]] = field(default_factory=list)  # (step, evaluate.Interval)

    @property
    def is_main(self) -> bool:
        return self.world.rank == 0

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
        if self.writer is not None:
            self.writer.close()


def dims_of(parallel: ParallelConfig, world_size: int) -> ParallelDims:
    """The training mesh; dp fills the world when it is not given."""
    dp = parallel.dp or world_size // (parallel.tp * parallel.pp * parallel.cp)
    return ParallelDims(
        tp=parallel.tp,
        cp=parallel.cp,
        dp=dp,
        pp=parallel.pp,
        sequence_parallel=parallel.sequence_parallel,
    )


def threads_per_rank(world: World, num_threads: int | None) -> int:
    return num_threads or max(1, (os.cpu_count() or 1) // world.local_size)


def set_threads_and_seed(world: World, *, num_threads: int | None, seed: int) -> None:
    """torch threads that do not oversubscribe the machine, and the seeds of all generators."""
    torch.set_num_threads(threads_per_rank(world, num_threads))
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def build_groups(parallel: ParallelConfig, world: World) -> ParallelGroups:
    """The actor's groups; prints the layout once."""
    groups = ParallelGroups.build(dims_of(parallel, world.size), timeout_s=parallel.timeout_s)
    assert groups is not None, "one pool: every rank is in the role"
    if world.rank == 0:
        logger.info("training layout, %d ranks:\n%s", world.size, groups.describe())
    return groups


def build_run(config: TrainConfig, world: World, output_dir: Path) -> Run:
    """Build data, models and engines. Collective: every rank calls, failures are agreed on."""
    set_threads_and_seed(world, num_threads=config.trainer.num_threads, seed=config.trainer.seed)
    hf_config = json.loads((Path(config.model.path) / "config.json").read_text())
    groups = build_groups(config.parallel, world)
    tokenizer, reward, train_prompts, val_prompts = all_agree(
        "reading the data", lambda: _build_data(config)
    )
    if world.rank == 0:
        _report_data(train_prompts, val_prompts)
    algorithm = config.algorithm
    actor = MegatronModel.build(
        config.model, groups, device=world.device, trainable=config.optim,
        num_steps=config.trainer.num_steps * algorithm.num_epochs * algorithm.num_minibatches,
        seed=config.trainer.seed,
    )  # fmt: skip
    reference = None
    if algorithm.kl_coef > 0:
        reference = MegatronModel.build(
            config.model, groups, device=world.device, trainable=None, seed=config.trainer.seed
        )
    replica = _build_replica(config, world)
    engine = _start_engine(config, world, replica)
    push = _build_push(config, world, replica, engine, actor)
    diff = config.rollout.max_log_prob_diff
    return Run(
        config=config, world=world, groups=groups, replica=replica, tokenizer=tokenizer,
        train_prompts=train_prompts, val_prompts=val_prompts,
        order=PromptOrder(
            len(train_prompts), config.trainer.prompts_per_step,
            shuffle=config.data.shuffle, seed=config.data.seed,
        ),
        reward=reward, actor=actor, reference=reference, engine=engine, push=push,
        writer=MetricWriter(output_dir) if world.rank == 0 else None,
        hidden_size=hf_config["hidden_size"],
        max_log_prob_diff=1e-3 if diff is None and config.model.dtype == "float32" else diff,
    )  # fmt: skip


def _build_data(
    config: TrainConfig,
) -> tuple[PreTrainedTokenizerBase, Reward, PromptDataset, PromptDataset | None]:
    tokenizer = load_tokenizer(config.model.path, chat_template=config.model.chat_template)
    reward = create_reward(config.reward.name, config.reward.options)
    limits: dict[str, Any] = {
        "max_prompt_tokens": config.data.max_prompt_tokens,
        "overlong": config.data.overlong_prompt,
        "check_ground_truth": reward.check_ground_truth,
    }
    train = PromptDataset(config.data.train_files, tokenizer, **limits)
    val = (
        PromptDataset(config.data.val_files, tokenizer, **limits) if config.data.val_files else None
    )
    return tokenizer, reward, train, val


def _report_data(train: PromptDataset, val: PromptDataset | None) -> None:
    for name, prompts in (("training", train), ("held-out", val)):
        if prompts is not None:
            dropped = f", {prompts.num_dropped} longer than data.max_prompt_tokens dropped"
            logger.info(
                "%s prompts: %d%s", name, len(prompts), dropped if prompts.num_dropped else ""
            )


def _build_replica(config: TrainConfig, world: World) -> Replica:
    tp = config.rollout.tp
    group = None
    for first in range(0, world.size, tp):
        made = dist.new_group(
            list(range(first, first + tp)), timeout=timedelta(seconds=config.parallel.timeout_s)
        )
        group = made if first <= world.rank < first + tp else group
    assert group is not None
    return Replica(
        index=world.rank // tp, num_replicas=world.size // tp, tp_rank=world.rank % tp, group=group
    )


def _start_engine(config: TrainConfig, world: World, replica: Replica) -> RolloutEngine | None:
    if world.rank == 0:
        logger.info(
            "starting %d %s replica(s), tp=%d",
            replica.num_replicas,
            config.rollout.engine,
            config.rollout.tp,
        )

    def start() -> RolloutEngine | None:
        if not replica.is_leader:
            return None
        tp = config.rollout.tp
        on_cuda = world.device.type == "cuda"
        return create_engine(
            config.rollout, model_path=config.model.path, dtype=config.model.dtype,
            devices=range(world.local_rank, world.local_rank + tp) if on_cuda else None,
            num_threads=threads_per_rank(world, config.trainer.num_threads) * tp,
            seed=config.rollout.seed + replica.index,
        )  # fmt: skip

    return all_agree("starting the rollout engines", start)


def _build_push(
    config: TrainConfig,
    world: World,
    replica: Replica,
    engine: RolloutEngine | None,
    actor: MegatronModel,
) -> WeightPush:
    return WeightPush(
        actor.weight_layout(),
        engine_weight_layout(config.rollout, model_path=config.model.path, tp_rank=replica.tp_rank),
        replica_group=replica.group, engine=engine,
        export_shard=engine_class(config.rollout).export_shard, digest=digest,
        dtype=getattr(torch, config.model.dtype), device=world.device,
    )  # fmt: skip
