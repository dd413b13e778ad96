"""`megarl sft`: supervised warm start on the same model, packing and optimizer as the RL loop."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from megarl.common.log import configure_logging, get_logger
from megarl.common.timing import PhaseTimer
from megarl.config.schema import SftConfig
from megarl.data import DataError, PromptDataset, PromptOrder, assign, load_tokenizer, pack
from megarl.models import MegatronModel
from megarl.parallel import ParallelGroups, World, all_agree, init_world
from megarl.trainer.failure import leave, run_guarded
from megarl.trainer.metrics import (
    MetricWriter,
    Reducer,
    combine,
    masked_mean,
    reduce_values,
    to_floats,
)
from megarl.trainer.rundir import open_run_dir
from megarl.trainer.setup import build_groups, set_threads_and_seed
from megarl.types import Sample, TokenScores, TrainBatch

__all__ = ["sft"]

logger = get_logger(__name__)

SFT_METRICS: dict[str, Reducer] = {"sft/loss": "mean"}


def sft(config: SftConfig) -> int:
    """Train on `extra_info.answer` of each row; returns the process's exit status."""
    configure_logging()
    world = init_world(device=config.trainer.device, timeout_s=config.parallel.timeout_s)
    code = run_guarded(world, lambda: _train(config, world), lambda: None)
    if code:
        leave(code)
    return code


def _train(config: SftConfig, world: World) -> None:
    output_dir, trainer = Path(config.trainer.output_dir), config.trainer
    all_agree("making the run directory", lambda: open_run_dir(config, output_dir, world.rank))
    set_threads_and_seed(world, num_threads=trainer.num_threads, seed=trainer.seed)
    groups = build_groups(config.parallel, world)
    rows = all_agree("reading the data", lambda: load_rows(config))
    logger.info("training rows: %d", len(rows))
    model = MegatronModel.build(
        config.model, groups, device=world.device, trainable=config.optim,
        num_steps=trainer.num_steps, seed=trainer.seed,
    )  # fmt: skip
    hidden_size = json.loads((Path(config.model.path) / "config.json").read_text())["hidden_size"]
    order = PromptOrder(
        len(rows), trainer.rows_per_step, shuffle=config.data.shuffle, seed=config.data.seed
    )
    writer = MetricWriter(output_dir) if world.rank == 0 else None
    timer = PhaseTimer()
    for step in range(1, trainer.num_steps + 1):
        batches = _batches(config, world, groups, [rows[i] for i in order.next_rows()], hidden_size)
        metrics = _step(model, groups, world, batches)
        if writer is not None:
            writer.write(step, metrics)
            if step % max(1, trainer.num_steps // 10) == 0 or step == 1:
                logger.info(
                    "sft step %d/%d loss %.4f grad %.3g, %.0f s",
                    step, trainer.num_steps, metrics["sft/loss"], metrics["sft/grad_norm"],
                    timer.total_s,
                )  # fmt: skip
    model.save_hf(output_dir / "final")
    if writer is not None:
        writer.close()
        logger.info("saved %s", output_dir / "final")


def load_rows(config: SftConfig) -> list[Sample]:
    """Each row as a finished sample: prompt, then the answer and the end-of-sequence token."""
    tokenizer = load_tokenizer(config.model.path, chat_template=config.model.chat_template)
    prompts = PromptDataset(
        config.data.train_files, tokenizer, max_prompt_tokens=config.data.max_prompt_tokens,
        overlong=config.data.overlong_prompt,
    )  # fmt: skip
    rows: list[Sample] = []
    num_dropped = prompts.num_dropped
    for i in range(len(prompts)):
        prompt = prompts[i]
        answer = prompt.extra_info.get("answer")
        if not isinstance(answer, str) or not answer:
            raise DataError(
                f"row {prompt.row}: extra_info.answer={answer!r} must be the text to imitate; "
                "`megarl prepare` writes it"
            )
        ids = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
        if len(prompt.prompt_ids) + len(ids) > config.trainer.max_tokens:
            num_dropped += 1
            continue
        rows.append(
            Sample(
                group=i, index=0, prompt_ids=prompt.prompt_ids, response_ids=ids,
                rollout_log_probs=[0.0] * len(ids), finish_reason="stop", weight_version=0,
            )
        )  # fmt: skip
    if num_dropped:
        logger.warning("%d rows longer than the limits were dropped", num_dropped)
    return rows


def _batches(
    config: SftConfig,
    world: World,
    groups: ParallelGroups,
    rows: Sequence[Sample],
    hidden_size: int,
) -> list[TrainBatch]:
    """This data-parallel rank's micro-batches; every rank computes the same assignment."""
    dims = groups.dims
    multiple = dims.tp if dims.sequence_parallel else 1
    plan = assign(
        [r.num_tokens for r in rows], num_parts=dims.dp,
        max_tokens=config.trainer.max_tokens_per_microbatch,
        multiple=multiple, hidden_size=hidden_size,
    )  # fmt: skip
    return [
        pack(rows, part, multiple=multiple).to(world.device)
        for part in plan.parts[groups.coordinate.dp]
    ]


def _step(
    model: MegatronModel, groups: ParallelGroups, world: World, batches: Sequence[TrainBatch]
) -> dict[str, float]:
    """One update on the mean negative log-likelihood per answer token, counted over all ranks."""
    num_tokens = torch.tensor(
        sum(float(b.response_mask.sum()) for b in batches), dtype=torch.float64, device=world.device
    )
    dist.all_reduce(num_tokens, group=groups.dp_cp)

    def loss_fn(
        scores: TokenScores, batch: TrainBatch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        nll = torch.where(batch.response_mask > 0, -scores.log_probs, 0.0)
        return nll.sum() / float(num_tokens), {"sft/loss": masked_mean(nll, batch.response_mask)}

    parts = model.forward_backward(batches, loss_fn, temperature=1.0, with_entropy=False)
    metrics = to_floats(
        reduce_values(combine(parts, SFT_METRICS), SFT_METRICS, groups.dp_cp), SFT_METRICS
    )
    stats = model.step()
    if not stats.is_finite:
        raise FloatingPointError(
            f"gradient norm is {stats.grad_norm}; the optimizer step was not taken"
        )
    return {**metrics, "sft/grad_norm": stats.grad_norm, "sft/lr": stats.lr}
