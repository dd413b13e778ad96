"""The policy update: epochs of minibatches, one optimizer step each, guarded before it is taken."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import torch
import torch.distributed as dist

from megarl.algorithms import (
    POLICY_LOSSES,
    ClipRange,
    MinibatchCounts,
    kl_penalty,
    sequence_lengths,
    token_weights,
)
from megarl.config.schema import AlgorithmConfig
from megarl.trainer.experience import Experience
from megarl.trainer.metrics import (
    Reducer,
    Values,
    combine,
    masked_max,
    masked_mean,
    reduce_values,
    to_floats,
)
from megarl.trainer.setup import Run
from megarl.types import TokenScores, TrainBatch

__all__ = ["UPDATE_METRICS", "GuardTripped", "add_log_probs", "update"]

UPDATE_METRICS: dict[str, Reducer] = {
    "update/loss": "sum",
    "update/policy_loss": "sum",
    "update/kl_loss": "sum",
    "update/entropy": "mean",
    "update/ratio": "mean",
    "update/clip_frac": "mean",
    "update/clip_dual_frac": "mean",
    "update/ppo_kl": "mean",
    "update/ref_kl": "mean",
    "rollout/log_prob_diff/mean": "mean",
    "rollout/log_prob_diff/max": "max",
    "rollout/kl": "mean",
}


class GuardTripped(RuntimeError):
    """An invariant of the update does not hold; the update that showed it changed no weight."""


def add_log_probs(run: Run, experience: Experience) -> None:
    """Fill old_log_probs (when a step has several updates) and ref_log_probs (with a reference).

    With one update per step the current log-probs are the old ones; no extra forward pass is made.
    """
    cfg, temperature = run.config.algorithm, run.config.rollout.temperature
    batches = experience.batches
    if cfg.num_epochs * len(experience.minibatches) > 1:
        for batch, scores in zip(
            batches,
            run.actor.score(batches, temperature=temperature, only_trained=True),
            strict=True,
        ):
            batch.old_log_probs = scores.log_probs
    if run.reference is not None:
        for batch, scores in zip(
            batches,
            run.reference.score(batches, temperature=temperature, only_trained=True),
            strict=True,
        ):
            batch.ref_log_probs = scores.log_probs


def count_minibatch(run: Run, batches: Sequence[TrainBatch]) -> MinibatchCounts:
    """Trained tokens and sequences of the minibatch over all data-parallel ranks, counted once."""
    lengths = [sequence_lengths(b.response_mask, b.cu_seqlens) for b in batches]
    local = torch.tensor(
        [sum(float(x.sum()) for x in lengths), sum(float((x > 0).sum()) for x in lengths)],
        dtype=torch.float64, device=run.world.device,
    )  # fmt: skip
    dist.all_reduce(local, group=run.groups.dp_cp)
    return MinibatchCounts(num_tokens=float(local[0]), num_sequences=float(local[1]))


def policy_loss(
    scores: TokenScores,
    batch: TrainBatch,
    *,
    cfg: AlgorithmConfig,
    counts: MinibatchCounts,
    max_length: int,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """One micro-batch's share of the minibatch loss, and its metric sums (see UPDATE_METRICS)."""
    assert batch.advantages is not None
    assert batch.rollout_log_probs is not None
    mask = batch.response_mask
    weights = token_weights(
        cfg.loss_aggregation, mask, batch.cu_seqlens, counts, max_length=max_length
    )
    old = batch.old_log_probs if batch.old_log_probs is not None else scores.log_probs.detach()

    def weighted(values: torch.Tensor) -> torch.Tensor:
        # where, not a product: NaN * 0 is NaN, and a masked position must have no effect
        return torch.where(mask > 0, values * weights, 0.0).sum()

    clip = ClipRange(cfg.clip_low, cfg.clip_high, cfg.clip_dual)
    tokens = POLICY_LOSSES[cfg.policy_loss](scores.log_probs, old, batch.advantages, clip=clip)
    policy = loss = weighted(tokens.loss)
    kl = torch.zeros_like(loss)
    ref_kl = torch.zeros_like(mask)
    if batch.ref_log_probs is not None:
        kl = cfg.kl_coef * weighted(
            kl_penalty(scores.log_probs, batch.ref_log_probs, cfg.kl_estimator)
        )
        ref_kl = scores.log_probs - batch.ref_log_probs
        loss = loss + kl
    if cfg.entropy_coef:
        loss = loss - cfg.entropy_coef * weighted(scores.entropy)
    drift = batch.rollout_log_probs - old
    metrics = {
        "update/loss": loss.detach().double().reshape(1),
        "update/policy_loss": policy.detach().double().reshape(1),
        "update/kl_loss": kl.detach().double().reshape(1),
        "update/entropy": masked_mean(scores.entropy, mask),
        "update/ratio": masked_mean(tokens.ratio, mask),
        "update/clip_frac": masked_mean(tokens.is_clipped, mask),
        "update/clip_dual_frac": masked_mean(tokens.is_clipped_dual, mask),
        "update/ppo_kl": masked_mean(old - scores.log_probs, mask),
        "update/ref_kl": masked_mean(ref_kl, mask if batch.ref_log_probs is not None else 0 * mask),
        "rollout/log_prob_diff/mean": masked_mean(drift.abs(), mask),
        "rollout/log_prob_diff/max": masked_max(drift.abs(), mask),
        "rollout/kl": masked_mean(drift, mask),
    }
    return loss, metrics


def update(run: Run, experience: Experience) -> dict[str, float]:
    """Train on the step's samples. Collective over the role.

    Returns:
        Metrics over all tokens of all updates; losses are the mean over updates, norm and lr those
        of the last.

    Raises:
        GuardTripped: non-finite loss or gradient, or engine and trainer disagree on the log-probs.
    """
    history: list[Values] = []
    last: dict[str, float] = {}
    for _ in range(run.config.algorithm.num_epochs):
        for batches in experience.minibatches:
            values, last = _update_once(run, batches)
            history.append(values)
    metrics = to_floats(combine(history, UPDATE_METRICS), UPDATE_METRICS)
    for name in (n for n, reducer in UPDATE_METRICS.items() if reducer == "sum"):
        metrics[name] /= len(history)
    return {**metrics, **last}


def _update_once(run: Run, batches: Sequence[TrainBatch]) -> tuple[Values, dict[str, float]]:
    cfg, rollout = run.config.algorithm, run.config.rollout
    counts = count_minibatch(run, batches)

    def loss_fn(scores: TokenScores, batch: TrainBatch) -> tuple[torch.Tensor, Values]:
        return policy_loss(scores, batch, cfg=cfg, counts=counts, max_length=rollout.max_new_tokens)

    parts = run.actor.forward_backward(batches, loss_fn, temperature=rollout.temperature)
    values = reduce_values(combine(parts, UPDATE_METRICS), UPDATE_METRICS, run.groups.dp_cp)
    _check(to_floats(values, UPDATE_METRICS), run.max_log_prob_diff)
    stats = run.actor.step()
    if not stats.is_finite:
        raise GuardTripped(f"gradient norm is {stats.grad_norm}; the optimizer step was not taken")
    return values, {"update/grad_norm": stats.grad_norm, "update/lr": stats.lr}


def _check(metrics: dict[str, float], max_log_prob_diff: float | None) -> None:
    """Stop before the optimizer when the numbers cannot be right.

    Metrics are equal on all ranks, so all stop.
    """
    if not isfinite(metrics["update/loss"]):
        raise GuardTripped(
            f"update/loss is {metrics['update/loss']}; the optimizer step was not taken"
        )
    diff = metrics.get("rollout/log_prob_diff/max", 0.0)
    if max_log_prob_diff is not None and not diff <= max_log_prob_diff:
        raise GuardTripped(
            f"engine and trainer differ by {diff:.3g} in the log-prob of a token, more than "
            f"rollout.max_log_prob_diff={max_log_prob_diff}: "
            "their weights, masks or numerics are not the same"
        )
