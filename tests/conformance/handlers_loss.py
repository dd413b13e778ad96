"""Aggregation, policy and value losses, rollout correction: a padded case through our packed
functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megarl.algorithms.aggregation import MinibatchCounts, aggregate, token_weights
from megarl.algorithms.distribution import entropy, log_probs_of, sum_pi_squared
from megarl.algorithms.mismatch import policy_mismatch, rejection_metrics, weight_metrics
from megarl.algorithms.packed import keep, masked_mean, sequence_lengths, sequence_sum
from megarl.algorithms.policy_losses import (
    POLICY_LOSSES,
    SELECTIONS,
    LossInputs,
    LossSettings,
    TokenLoss,
    weighted_loss,
)
from megarl.algorithms.rollout_correction import (
    Rejection,
    normalize_weights,
    raw_weights,
    reject,
    restrict_weights,
    weight_mean,
)
from megarl.algorithms.value_loss import clipped_value_loss
from tests.conformance.vectors import Case, Packing

__all__ = ["HANDLERS", "parse_bounds", "parse_rejections"]


def _weights(
    packing: Packing, mask: torch.Tensor, mode: str, counts: MinibatchCounts | None = None,
    factor: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """Token weights; the file's default horizon is its padded width."""
    counts = counts or MinibatchCounts.of(mask, packing.cu_seqlens)
    max_length: Any = factor or packing.inside.shape[1]
    return token_weights(
        mode.replace("-", "_"), mask, packing.cu_seqlens, counts, max_length=max_length
    )


def _agg_loss(case: Case) -> Any:
    packing = Packing(case.inputs["loss_mask"])
    loss = packing.pack(case.inputs["loss_mat"])
    weights = _weights(
        packing, packing.mask, case.id.split("/")[1], factor=case.params.get("loss_scale_factor")
    )
    return aggregate(loss, weights, packing.mask)


def _agg_loss_distributed(case: Case) -> Any:
    """Each part on its own with the given global counts; the reference multiplies by dp and
    averages over it.
    """
    inputs, mode = case.inputs, case.id.split("/")[1]
    counts = MinibatchCounts(inputs["batch_num_tokens"], inputs["global_batch_size"])
    dp_size, parts = inputs["dp_size"], []
    for span in inputs["split"].replace(";", ",").split("["):
        if ":" not in span or "]" not in span:
            continue
        start, stop = (int(x) for x in span.split("]")[0].split(":"))
        packing = Packing(inputs["loss_mask"][start:stop])
        loss = packing.pack(inputs["loss_mat"][start:stop])
        parts.append(
            aggregate(loss, _weights(packing, packing.mask, mode, counts), packing.mask) * dp_size
        )
    whole = Packing(inputs["loss_mask"])
    single = aggregate(
        whole.pack(inputs["loss_mat"]), _weights(whole, whole.mask, mode, counts), whole.mask
    )
    total = torch.stack(parts)
    return {"parts": total, "total": total.sum() / dp_size, "reference_single": single}


def _settings(params: dict[str, Any]) -> LossSettings:
    extra = params.get("policy_loss") or {}
    frac = "kl_cov_ratio" if params.get("_loss") == "kl_cov" else "clip_cov_ratio"
    return LossSettings(
        clip_low=params.get("clip_ratio_low", 0.2),
        clip_high=params.get("clip_ratio_high", 0.2),
        clip_dual=params.get("clip_ratio_c", 3.0),
        cov_frac=extra.get(frac, 2e-4),
        cov_low=extra.get("clip_cov_lb", 1.0),
        cov_high=extra.get("clip_cov_ub", 5.0),
        cov_kl_coef=extra.get("ppo_kl_coef", 1.0),
        dro_beta=extra.get("dro_beta") or 0.1,
        sapo_tau_pos=params.get("tau_pos", 1.0),
        sapo_tau_neg=params.get("tau_neg", 1.05),
    )


# what the reference aggregates whole sequences by, whatever loss_agg_mode says
BY_SEQUENCE = ("gspo", "sapo", "geo_mean")


def _select(name: str, tokens: LossInputs, settings: LossSettings, seed: int) -> torch.Tensor:
    trained = tokens.response_mask > 0
    selected = torch.zeros_like(trained)
    selected[trained] = SELECTIONS[name](
        tokens.log_probs.detach()[trained], tokens.old_log_probs[trained],
        tokens.advantages[trained], settings, seed=seed,
    )  # fmt: skip
    return selected


def _tokens(case: Case, packing: Packing, mask: torch.Tensor) -> LossInputs:
    inputs = case.inputs
    return LossInputs(
        log_probs=packing.pack(inputs["log_prob"]).requires_grad_(),
        old_log_probs=packing.pack(inputs["old_log_prob"]),
        advantages=packing.pack(inputs["advantages"]),
        response_mask=mask,
        cu_seqlens=packing.cu_seqlens,
    )


def _policy_loss(case: Case) -> Any:
    name = case.function.removeprefix("policy loss ").strip()
    if name == "bypass_mode":
        return _bypass(case)
    name = {"vanilla": "ppo_clip"}.get(name, name)
    packing = Packing(case.inputs["response_mask"])
    settings = _settings({**case.params, "_loss": name})
    tokens = _tokens(case, packing, packing.mask)
    if name in SELECTIONS:
        selected = _select(name, tokens, settings, case.params.get("torch_manual_seed") or 0)
        tokens = LossInputs(**{**vars(tokens), "selected": selected})
    mode = "seq-mean-token-mean" if name in BY_SEQUENCE else case.params["loss_agg_mode"]
    rollout = case.inputs.get("rollout_is_weights")
    loss, out = weighted_loss(
        POLICY_LOSSES[name], tokens, settings, weights=_weights(packing, packing.mask, mode),
        rollout_weights=None if rollout is None else packing.pack(rollout),
    )  # fmt: skip
    return _result(case, packing, tokens, loss, _metrics(name, tokens, out))


def _result(
    case: Case, packing: Packing, tokens: LossInputs, loss: torch.Tensor, metrics: dict[str, Any]
) -> Any:
    loss.backward()
    assert tokens.log_probs.grad is not None
    return {
        "loss": loss.detach(),
        "grad_log_prob": packing.unpack(tokens.log_probs.grad),
        "metrics": metrics,
    }


def _metrics(name: str, tokens: LossInputs, out: TokenLoss) -> dict[str, Any]:
    """Under the reference's names; it reports other things under them for geo_mean, clip_cov and
    kl_cov.
    """
    mask, difference = tokens.response_mask, tokens.log_probs.detach() - tokens.old_log_probs
    clipped, dual = out.is_clipped, out.is_clipped_dual
    if name == "geo_mean":
        clipped, dual = clipped * (tokens.advantages > 0), clipped * (tokens.advantages < 0)
    if name == "clip_cov":
        assert tokens.selected is not None
        clipped = tokens.selected.to(mask.dtype)
    kl = difference.abs() if name == "kl_cov" else -difference
    return {
        "actor/pg_clipfrac": masked_mean(clipped, mask),
        "actor/pg_clipfrac_lower": masked_mean(dual, mask),
        "actor/ppo_kl": masked_mean(kl, mask),
    }


def parse_bounds(spec: str | float) -> tuple[float | None, float]:
    """ "0.5_2.0" -> (0.5, 2.0); 2.0 -> (None, 2.0)."""
    low, _, high = str(spec).rpartition("_")
    return (float(low) if low else None), float(high)


def parse_rejections(names: str, thresholds: str | float) -> list[Rejection]:
    options = [n.strip() for n in names.split(",")]
    specs = [s.strip() for s in str(thresholds).split(",")]
    specs = specs * len(options) if len(specs) == 1 else specs
    bounds = [parse_bounds(s) for s in specs]
    return [Rejection(n, high=b[1], low=b[0]) for n, b in zip(options, bounds, strict=True)]


def _apply_weights(
    level: str, threshold: str | float, normalize: bool, log_rho: torch.Tensor, packing: Packing
) -> tuple[torch.Tensor, dict[str, float]]:
    mask, cu_seqlens = packing.mask, packing.cu_seqlens
    low, high = parse_bounds(threshold)
    raw = raw_weights(log_rho, mask, cu_seqlens, level=level)
    weights = restrict_weights(raw, high=high, low=low)
    metrics = weight_metrics(weights, raw, mask, cu_seqlens, level=level, high=high, low=low)
    if normalize:
        total = weight_mean(weights, mask, cu_seqlens, level=level)
        weights = normalize_weights(weights, total)
        metrics["batch_norm_factor"] = float(total[0] / total[1])
    return weights, {f"rollout_is_{k}": v for k, v in metrics.items()}


def _apply_rejections(
    rejections: list[Rejection], log_rho: torch.Tensor, packing: Packing
) -> tuple[torch.Tensor, dict[str, float]]:
    mask, cu_seqlens = packing.mask, packing.cu_seqlens
    kept = reject(rejections, log_rho, mask, cu_seqlens)
    metrics = {
        f"rollout_rs_{r.name}_{k}": v
        for r in rejections
        for k, v in rejection_metrics(r, log_rho, mask, cu_seqlens).items()
    }
    lost = sequence_sum(mask - kept, mask, cu_seqlens) > 0
    is_used = sequence_lengths(mask, cu_seqlens) > 0
    metrics["rollout_rs_masked_fraction"] = float(masked_mean(1 - kept, mask))
    metrics["rollout_rs_seq_masked_fraction"] = float(lost[is_used].double().mean())
    return kept, metrics


def _bypass(case: Case) -> Any:
    """Old policy = rollout policy; weights (reinforce only) and rejection by the current one."""
    cfg = case.params["rollout_correction"]
    packing = Packing(case.inputs["response_mask"])
    rollout = packing.pack(case.inputs["old_log_prob"])
    current = packing.pack(case.inputs["log_prob"])
    weights, metrics = None, {}
    if cfg.get("rollout_is"):
        weights, metrics = _apply_weights(
            cfg["rollout_is"], cfg["rollout_is_threshold"],
            cfg.get("rollout_is_batch_normalize", False), current - rollout, packing,
        )  # fmt: skip
    kept = packing.mask
    if cfg.get("rollout_rs"):
        rejections = parse_rejections(cfg["rollout_rs"], cfg["rollout_rs_threshold"])
        kept, more = _apply_rejections(rejections, current - rollout, packing)
        metrics |= more
    metrics |= policy_mismatch(current, rollout, packing.mask, packing.cu_seqlens)
    is_ppo = cfg["loss_type"] == "ppo_clip"
    name, mode = (
        ("ppo_clip" if is_ppo else "reinforce"),
        case.params.get("loss_agg_mode", "token-mean"),
    )
    tokens = _tokens(case, packing, kept)
    loss, out = weighted_loss(
        POLICY_LOSSES[name], tokens, _settings(case.params), weights=_weights(packing, kept, mode),
        rollout_weights=None if is_ppo else weights,
    )  # fmt: skip
    ours = {**_metrics(name, tokens, out), **{f"rollout_corr/{k}": v for k, v in metrics.items()}}
    return _result(case, packing, tokens, loss, ours)


def _rollout_is(case: Case) -> Any:
    packing, params = Packing(case.inputs["response_mask"]), case.params
    weights, metrics = _apply_weights(
        params["rollout_is"], params["threshold"], params.get("batch_normalize", False),
        packing.pack(case.inputs["log_ratio"]), packing,
    )  # fmt: skip
    return {"weights": packing.unpack(weights), "metrics": metrics}


def _rollout_rs(case: Case) -> Any:
    packing = Packing(case.inputs["response_mask"])
    rejections = parse_rejections(case.params["rollout_rs"], case.params["threshold"])
    kept, metrics = _apply_rejections(rejections, packing.pack(case.inputs["log_ratio"]), packing)
    return {"mask": packing.unpack(kept), "metrics": metrics}


def _offpolicy(case: Case) -> Any:
    packing = Packing(case.inputs["response_mask"])
    return policy_mismatch(
        packing.pack(case.inputs["old_log_prob"]), packing.pack(case.inputs["rollout_log_prob"]),
        packing.mask, packing.cu_seqlens,
    )  # fmt: skip


def _value_loss(case: Case) -> Any:
    packing, inputs = Packing(case.inputs["response_mask"]), case.inputs
    values = packing.pack(inputs["vpreds"]).requires_grad_()
    losses, clipped = clipped_value_loss(
        values, packing.pack(inputs["values"]), packing.pack(inputs["returns"]),
        clip=case.params["cliprange_value"],
    )  # fmt: skip
    mode = case.params.get("loss_agg_mode", case.id.split("/")[1])
    loss = aggregate(losses, _weights(packing, packing.mask, mode), packing.mask)
    loss.backward()
    assert values.grad is not None
    return {
        "vf_loss": loss.detach(),
        "vf_clipfrac": masked_mean(clipped, packing.mask).detach(),
        "grad_vpreds": packing.unpack(values.grad),
    }


def _from_logits(case: Case) -> Any:
    logits = case.inputs["logits"]
    rows, flat = logits.shape[:-1], logits.flatten(0, -2)
    if case.family == "logprobs_from_logits":
        return log_probs_of(flat, case.inputs["labels"].flatten()).reshape(rows)
    return (entropy if case.family == "entropy_from_logits" else sum_pi_squared)(flat).reshape(rows)


def _entropy_loss(case: Case) -> Any:
    logits = case.inputs["logits"]
    packing = Packing(case.inputs["response_mask"])
    values = packing.pack(entropy(logits.flatten(0, -2)).reshape(logits.shape[:-1]))
    mode = case.params.get("loss_agg_mode", "token-mean")
    return aggregate(
        keep(values, packing.mask), _weights(packing, packing.mask, mode), packing.mask
    )


HANDLERS: dict[str, Callable[[Case], Any]] = {
    "agg_loss": _agg_loss,
    "agg_loss_distributed": _agg_loss_distributed,
    "policy_loss": _policy_loss,
    "value_loss": _value_loss,
    "rollout_is": _rollout_is,
    "rollout_rs": _rollout_rs,
    "offpolicy_metrics": _offpolicy,
    "compute_entropy_loss": _entropy_loss,
    **dict.fromkeys(
        ("logprobs_from_logits", "entropy_from_logits", "sum_pi_squared"), _from_logits
    ),
}
