"""The policy update: epochs of minibatches, one guarded optimizer step each."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import torch
import torch.distributed as dist

from megarl.algorithms import (
    POLICY_LOSSES,
    SELECTIONS,
    LossInputs,
    LossSettings,
    MinibatchCounts,
    aggregate,
    keep,
    kl_penalty,
    positions,
    spread,
    token_weights,
    weighted_loss,
)
from megarl.common.log import get_logger
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

logger = get_logger(__name__)

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
    """An invariant of the update does not hold; that update changed no weight."""


def add_log_probs(run: Run, experience: Experience) -> None:
    """Fill old_log_probs (when a step has several updates) and ref_log_probs (when there is a
    reference).

    With one update per step the current log-probs are the old ones and no extra forward pass is
    made.
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
    parts = [MinibatchCounts.of(b.response_mask, b.cu_seqlens) for b in batches]
    local = torch.tensor(
        [sum(c.num_tokens for c in parts), sum(c.num_sequences for c in parts)],
        dtype=torch.float64, device=run.world.device,
    )  # fmt: skip
    dist.all_reduce(local, group=run.groups.dp_cp)
    return MinibatchCounts(num_tokens=float(local[0]), num_sequences=float(local[1]))


def loss_settings(cfg: AlgorithmConfig) -> LossSettings:
    """The numbers policy losses read."""
    return LossSettings(
        clip_low=cfg.clip_low, clip_high=cfg.clip_high, clip_dual=cfg.clip_dual,
        cov_frac=cfg.cov_frac, cov_low=cfg.cov_low, cov_high=cfg.cov_high,
        cov_kl_coef=cfg.cov_kl_coef, sapo_tau_pos=cfg.sapo_tau_pos,
        sapo_tau_neg=cfg.sapo_tau_neg, dro_beta=cfg.dro_beta,
    )  # fmt: skip


def token_keys(batch: TrainBatch) -> torch.Tensor:
    """A number for each token, [T] int64, that depends on its sample and place only, not on the
    packing.
    """
    return spread(batch.sample_index, batch.cu_seqlens) * 2**32 + positions(batch.cu_seqlens)


def select_tokens(run: Run, batches: Sequence[TrainBatch], *, seed: int) -> torch.Tensor | None:
    """Keys of the tokens that the loss singles out on the minibatch; None: the loss does not
    select.

    Costs a forward pass: the choice depends on the current log-probs of the whole minibatch. Every
    data-parallel rank makes it on all tokens in order of their keys, so the split has no influence.
    """
    cfg = run.config.algorithm
    if cfg.policy_loss not in SELECTIONS:
        return None
    scores = run.actor.score(batches, temperature=run.config.rollout.temperature, only_trained=True)
    rows = torch.cat([_trained_rows(s, b) for s, b in zip(scores, batches, strict=True)])
    rows = _gather_rows(rows, run.groups.dp_cp)
    keys, (log_probs, old_log_probs, advantages) = rows[:, 0].long(), rows[:, 1:].unbind(1)
    order = keys.argsort()
    chosen = SELECTIONS[cfg.policy_loss](
        log_probs[order], old_log_probs[order], advantages[order], loss_settings(cfg), seed=seed
    )
    return keys[order][chosen]


def _trained_rows(scores: TokenScores, batch: TrainBatch) -> torch.Tensor:
    """(key, log-prob, old log-prob, advantage) of each trained token, [N, 4] float64: exact for
    keys < 2^53.
    """
    assert batch.advantages is not None
    old = scores.log_probs if batch.old_log_probs is None else batch.old_log_probs
    fields = [token_keys(batch), scores.log_probs, old, batch.advantages]
    return torch.stack([f.double() for f in fields], dim=1)[batch.response_mask > 0]


def _gather_rows(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The rows of all ranks of the group, which may have different numbers of them."""
    count = torch.tensor([rows.size(0)], device=rows.device)
    counts = [torch.empty_like(count) for _ in range(dist.get_world_size(group))]
    dist.all_gather(counts, count, group=group)
    longest = int(max(int(c) for c in counts))
    padded = rows.new_zeros(longest, rows.size(1))
    padded[: rows.size(0)] = rows
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[: int(c)] for part, c in zip(parts, counts, strict=True)])


def policy_loss(
    scores: TokenScores,
    batch: TrainBatch,
    *,
    cfg: AlgorithmConfig,
    counts: MinibatchCounts,
    max_length: int,
    selected_keys: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """One micro-batch's share of the minibatch loss, and its metric sums (see UPDATE_METRICS)."""
    assert batch.advantages is not None
    assert batch.rollout_log_probs is not None
    mask = batch.response_mask
    weights = token_weights(
        cfg.loss_aggregation, mask, batch.cu_seqlens, counts, max_length=max_length
    )
    old = batch.old_log_probs if batch.old_log_probs is not None else scores.log_probs.detach()
    inputs = LossInputs(
        log_probs=scores.log_probs, old_log_probs=old, advantages=batch.advantages,
        response_mask=mask, cu_seqlens=batch.cu_seqlens,
        selected=None if selected_keys is None else torch.isin(token_keys(batch), selected_keys),
    )  # fmt: skip
    policy, tokens = weighted_loss(
        POLICY_LOSSES[cfg.policy_loss], inputs, loss_settings(cfg), weights=weights
    )
    loss = policy
    kl = torch.zeros_like(loss)
    ref_kl = torch.zeros_like(mask)
    if batch.ref_log_probs is not None:
        log_probs, ref = keep(scores.log_probs, mask), keep(batch.ref_log_probs, mask)
        kl = cfg.kl_coef * aggregate(kl_penalty(log_probs, ref, cfg.kl_estimator), weights, mask)
        ref_kl = log_probs - ref
        loss = loss + kl
    if cfg.entropy_coef:
        loss = loss - cfg.entropy_coef * aggregate(scores.entropy, weights, mask)
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
    has_moved = False  # an update of this step changed the weights
    for epoch in range(run.config.algorithm.num_epochs):
        for batches in experience.minibatches:
            # the version of the weights counts steps: a seed of its own for every update of the run
            seed = run.config.trainer.seed + (run.weight_version << 16) + len(history)
            values, last = _update_once(run, batches, seed=seed)
            history.append(values)
            if epoch and has_moved and is_on_policy(values):
                logger.warning(
                    "epoch %d: every ratio is exactly 1 although the weights changed; "
                    "old_log_probs are those of the current weights", epoch + 1,
                )  # fmt: skip
            has_moved |= last["update/grad_norm"] > 0 and last["update/lr"] > 0
    metrics = to_floats(combine(history, UPDATE_METRICS), UPDATE_METRICS)
    for name in (n for n, reducer in UPDATE_METRICS.items() if reducer == "sum"):
        metrics[name] /= len(history)
    return {**metrics, **last}


def is_on_policy(values: Values) -> bool:
    """Whether there are trained tokens and all of them have a ratio of exactly 1."""
    ratio, count = values["update/ratio"].tolist()
    return count > 0 and ratio == count and float(values["update/ppo_kl"][0]) == 0.0


def _update_once(
    run: Run, batches: Sequence[TrainBatch], *, seed: int
) -> tuple[Values, dict[str, float]]:
    cfg, rollout = run.config.algorithm, run.config.rollout
    counts = count_minibatch(run, batches)
    selected_keys = select_tokens(run, batches, seed=seed)

    def loss_fn(scores: TokenScores, batch: TrainBatch) -> tuple[torch.Tensor, Values]:
        return policy_loss(
            scores, batch, cfg=cfg, counts=counts, max_length=rollout.max_new_tokens,
            selected_keys=selected_keys,
        )  # fmt: skip

    parts = run.actor.forward_backward(batches, loss_fn, temperature=rollout.temperature)
    values = reduce_values(combine(parts, UPDATE_METRICS), UPDATE_METRICS, run.groups.dp_cp)
    _check(to_floats(values, UPDATE_METRICS), run.max_log_prob_diff)
    stats = run.actor.step()
    if not stats.is_finite:
        raise GuardTripped(f"gradient norm is {stats.grad_norm}; the optimizer step was not taken")
    return values, {"update/grad_norm": stats.grad_norm, "update/lr": stats.lr}


def _check(metrics: dict[str, float], max_log_prob_diff: float | None) -> None:
    """Stop before the optimizer when the numbers cannot be right. Metrics are equal on all ranks,
    so all stop.
    """
    if not isfinite(metrics["update/loss"]):
        raise GuardTripped(
            f"update/loss is {metrics['update/loss']}; the optimizer step was not taken"
        )
    diff = metrics.get("rollout/log_prob_diff/max", 0.0)
    if max_log_prob_diff is not None and not diff <= max_log_prob_diff:
        raise GuardTripped(
            f"engine and trainer differ by {diff:.3g} in the log-prob of a token, more than "
            f"rollout.max_log_prob_diff={max_log_prob_diff}: their weights, masks or numerics "
            "are not the same"
        )
