"""The loop: one line per stage of a sample's life, from prompt to update."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megarl.common.timing import PhaseTimer
from megarl.parallel import all_agree
from megarl.rollout import SamplingParams
from megarl.rollout.seeds import derive_seed
from megarl.trainer.console import progress_line
from megarl.trainer.evaluate import evaluate
from megarl.trainer.experience import Experience, assemble, generate, score, set_advantages
from megarl.trainer.memory import resident_bytes, trim_memory
from megarl.trainer.metrics import gather_samples
from megarl.trainer.setup import Run
from megarl.trainer.update import add_log_probs, update
from megarl.types import SampleGroup

__all__ = ["train_loop"]


def train_loop(run: Run) -> None:
    """Run every step; the held-out accuracy is taken before the first and after the last."""
    trainer = run.config.trainer
    sync_weights(run, must_change=False)
    evaluate(run, step=0)
    started = PhaseTimer()
    for step in range(1, trainer.num_steps + 1):
        timer = PhaseTimer()
        prompts = [run.train_prompts[row] for row in run.order.next_rows()]
        with timer("generate"):
            groups = generate(
                run, prompts, sampling(run), name=f"rollout/{step}", seed=step_seed(run, step)
            )
            sleep(run)
        with timer("reward"):
            score(run, groups)
        with timer("assemble"):
            experience = assemble(run, prompts, groups)
            advantages = set_advantages(run, experience)
        with timer("log_probs"):
            add_log_probs(run, experience)
        with timer("update"):
            metrics = update(run, experience)
        with timer("sync"):
            sync_weights(
                run, must_change=metrics["update/grad_norm"] > 0 and metrics["update/lr"] > 0
            )
        metrics |= describe(run, experience, advantages, timer)
        if trainer.eval_every and step % trainer.eval_every == 0 and step < trainer.num_steps:
            evaluate(run, step=step)
        report(run, step, metrics, groups, started)
        trim_memory(run.world.device)
    evaluate(run, step=trainer.num_steps)


def sampling(run: Run) -> SamplingParams:
    """How training responses are drawn."""
    cfg = run.config.rollout
    return SamplingParams(
        max_new_tokens=cfg.max_new_tokens,
        temperature=cfg.temperature, top_p=cfg.top_p, top_k=cfg.top_k,
        stop_token_ids=tuple(cfg.stop_token_ids), num_samples=cfg.num_samples,
    )  # fmt: skip


def step_seed(run: Run, step: int) -> int:
    """A stream of draws of its own for every step."""
    return derive_seed(run.config.rollout.seed, step)


def sleep(run: Run) -> None:
    """Give the engines' memory to training; `sync_weights` takes it back in two parts."""
    all_agree("putting the engine to sleep", lambda: run.engine.sleep() if run.engine else None)


def sync_weights(run: Run, *, must_change: bool) -> None:
    """Push the actor's weights into every engine as the next version."""

    def wake(tag: str) -> None:
        all_agree("waking the engine", lambda: run.engine.wake((tag,)) if run.engine else None)

    run.weight_version += 1
    wake("weights")
    run.push.push(run.actor.named_parameters(), version=run.weight_version, must_change=must_change)
    wake("kv_cache")


def describe(
    run: Run, experience: Experience, advantages: torch.Tensor, timer: PhaseTimer
) -> dict[str, float]:
    """Metrics of the step's samples, tokens per second and seconds per phase."""
    metas = experience.metas
    rewards = torch.tensor([m.reward for m in metas], dtype=torch.float64)
    lengths = torch.tensor([m.num_response_tokens for m in metas], dtype=torch.float64)
    num_response = float(lengths.sum())
    num_tokens = sum(experience.num_prompt_tokens) + num_response
    total_s = timer.total_s
    n = len(metas)
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std(unbiased=False)),
        "reward/accuracy": sum(m.accuracy for m in metas) / n,
        "reward/parsed_frac": sum(m.is_parsed for m in metas) / n,
        "reward/informative_frac": float((advantages != 0).double().mean()),
        "rollout/length/mean": float(lengths.mean()),
        "rollout/length/max": float(lengths.max()),
        "rollout/truncated_frac": sum(m.finish_reason == "length" for m in metas) / n,
        "rollout/weight_version": float(run.weight_version - 1),
        "batch/num_tokens": float(num_tokens),
        "batch/num_response_tokens": num_response,
        "batch/num_microbatches": float(len(experience.batches)),
        "batch/padding_frac": experience.padding_frac,
        "batch/imbalance": experience.imbalance,
        "memory/resident_bytes": float(resident_bytes()),
        "time/step_s": total_s,
        "time/tokens_per_s": num_tokens / total_s,
        "time/response_tokens_per_s": num_response / total_s,
        **{f"time/{phase}_s": s for phase, s in timer.seconds.items()},
    }


def report(
    run: Run,
    step: int,
    metrics: dict[str, float],
    groups: Sequence[SampleGroup],
    started: PhaseTimer,
) -> None:
    """Write metrics and samples and print the step's line.

    Collective: samples come from every replica.
    """
    rows = gather_samples(groups, step=step, limit=run.config.trainer.num_dump_samples)
    if run.writer is not None:
        run.writer.write(step, metrics)
        run.writer.write_samples(rows)
        progress_line(step, run.config.trainer.num_steps, metrics, elapsed_s=started.total_s)
