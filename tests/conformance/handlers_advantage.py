"""Advantages, KL, masked statistics: a padded case through our packed functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megarl.algorithms.groups import group_counts, group_index, group_mean, group_std
from megarl.algorithms.kl import kl_penalty, kl_shaped_rewards
from megarl.algorithms.kl_controllers import AdaptiveKLController
from megarl.algorithms.outcome_advantages import (
    gdpo,
    gpg,
    grpo,
    grpo_passk,
    opo,
    reinforce_plus_plus_baseline,
    rloo,
)
from megarl.algorithms.packed import (
    masked_mean,
    masked_sum,
    masked_var,
    sequence_lengths,
    sequence_mean,
    whiten,
)
from megarl.algorithms.token_advantages import (
    gae,
    optimal_token_baseline,
    reinforce_plus_plus,
    remax,
)
from tests.conformance.vectors import Case, Packing

__all__ = ["HANDLERS", "KL_NAMES"]

KL_NAMES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
Tensors = tuple[torch.Tensor, torch.Tensor]


def _mask(case: Case) -> torch.Tensor:
    return case.inputs["response_mask" if "response_mask" in case.inputs else "mask"]


def without_masked_rewards(
    case: Case, packing: Packing, estimate: Callable[[torch.Tensor], Tensors]
) -> dict[str, torch.Tensor]:
    """Estimate; where the case has rewards on masked tokens, check that they are refused, then drop
    them.
    """
    rewards = packing.pack(case.inputs["token_level_rewards"])
    if bool(((packing.mask == 0) & (rewards != 0)).any()):
        try:
            estimate(rewards)
        except ValueError:
            rewards = rewards * packing.mask
        else:
            raise AssertionError("a reward on a masked token was accepted")
    advantages, returns = estimate(rewards)
    return {"advantages": packing.unpack(advantages), "returns": packing.unpack(returns)}


def _gae(case: Case) -> Any:
    packing = Packing(_mask(case))
    values = packing.pack(case.inputs["values"])
    should_whiten = case.family == "gae"

    def estimate(rewards: torch.Tensor) -> Tensors:
        advantages, returns = gae(
            rewards, values, packing.mask, packing.cu_seqlens,
            gamma=case.params["gamma"], lam=case.params["lam"],
        )  # fmt: skip
        return (whiten(advantages, packing.mask) if should_whiten else advantages), returns

    return without_masked_rewards(case, packing, estimate)


def _reinforce_plus_plus(case: Case) -> Any:
    packing = Packing(_mask(case))
    gamma = case.params.get("gamma", 1.0)
    return without_masked_rewards(
        case,
        packing,
        lambda r: reinforce_plus_plus(r, packing.mask, packing.cu_seqlens, gamma=gamma),
    )


def _remax(case: Case) -> Any:
    packing, baselines = Packing(_mask(case)), case.inputs["reward_baselines"]
    return without_masked_rewards(
        case,
        packing,
        lambda r: remax(r, packing.mask, packing.cu_seqlens, reward_baselines=baselines),
    )


def _token_baseline(case: Case) -> Any:
    packing, inputs = Packing(_mask(case)), case.inputs
    return without_masked_rewards(
        case,
        packing,
        lambda r: optimal_token_baseline(
            r, packing.mask, packing.cu_seqlens, groups=inputs["index"],
            old_log_probs=packing.pack(inputs["old_log_probs"]),
            sum_pi_squared=packing.pack(inputs["sum_pi_squared"]),
            by_trained_token=case.family.startswith("tir"),
        ),
    )  # fmt: skip


def _outcome(case: Case) -> Any:
    packing, groups = Packing(_mask(case)), case.inputs["index"]
    rewards = case.inputs["token_level_rewards"].sum(1)
    lengths = sequence_lengths(packing.mask, packing.cu_seqlens)
    by_std = case.params.get("norm_adv_by_std_in_grpo", True)
    eps = case.params.get("epsilon", 1e-6)
    name = case.family.removesuffix("_vectorized")
    estimators: dict[str, Callable[[], torch.Tensor]] = {
        "grpo": lambda: grpo(rewards, groups, normalize_by_std=by_std, eps=eps),
        "grpo_passk": lambda: grpo_passk(rewards, groups, normalize_by_std=by_std, eps=eps),
        "rloo": lambda: rloo(rewards, groups),
        "opo": lambda: opo(rewards, groups, lengths),
        "gpg": lambda: gpg(rewards, groups),
        "reinforce_plus_plus_baseline": lambda: reinforce_plus_plus_baseline(
            rewards, groups, lengths
        ),
    }
    return _on_tokens(estimators[name](), case)


def _on_tokens(advantages: torch.Tensor, case: Case) -> torch.Tensor:
    """[N] -> [B, L] as the trainer puts them on tokens."""
    return advantages[:, None] * _mask(case)


def _gdpo(case: Case) -> Any:
    packing, inputs = Packing(_mask(case)), case.inputs
    kinds = [
        v.double() for k, v in inputs.items()
        if k not in ("response_mask", "index", "token_level_rewards")
    ]  # fmt: skip
    lengths = sequence_lengths(packing.mask, packing.cu_seqlens)
    advantages = gdpo(kinds, inputs["index"], lengths, weights=case.params.get("weights"))
    return _on_tokens(advantages, case)


def _group_mean_std(case: Case) -> Any:
    labels = list(case.inputs["index"])
    scores, index = case.inputs["scores"].double(), group_index(labels)
    first = [labels.index(label) for label in sorted(set(labels))]
    return {
        "mean": group_mean(scores, index)[first],
        "std": group_std(scores, index)[first],
        "count": group_counts(index)[first],
    }


def _masked(case: Case) -> Any:
    packing = Packing(_mask(case))
    values, mask = packing.pack(case.inputs["values"]), packing.mask
    if case.family == "masked_sum":
        return masked_sum(values, mask)
    if case.family == "masked_mean_axis":
        return sequence_mean(values, mask, packing.cu_seqlens)
    if case.family == "masked_mean":
        return masked_mean(values, mask)
    if case.family == "masked_whiten":
        return packing.unpack(whiten(values, mask))
    return masked_var(values, mask, is_unbiased=case.family == "masked_var_unbiased")


def _kl_penalty(case: Case) -> Any:
    name = case.id.split("/")[1].removesuffix("_extreme")
    base = name.removesuffix("+")
    estimator = KL_NAMES.get(base, base) + ("+" if name.endswith("+") else "")
    estimator = "k2" if estimator == "k2+" else estimator
    log_probs = case.inputs["logprob"].clone().requires_grad_()
    value = kl_penalty(log_probs.flatten(), case.inputs["ref_logprob"].flatten(), estimator)
    if not isinstance(case.outputs, dict):
        return value.reshape(log_probs.shape)
    # the file names its reduction: (out * MASK).sum()
    mask = case.shared[case.inputs["reduce"].split("*")[1].split(")")[0].strip()]
    value = value.reshape(log_probs.shape)
    (value * mask).sum().backward()
    return {"value": value, "grad_logprob": log_probs.grad}


def _compute_rewards(case: Case) -> Any:
    scores = case.inputs["token_level_scores"]
    return kl_shaped_rewards(
        scores.flatten(), case.inputs["old_log_prob"].flatten(),
        case.inputs["ref_log_prob"].flatten(), torch.ones_like(scores).flatten(),
        coef=case.params["kl_ratio"],
    ).reshape(scores.shape)  # fmt: skip


def _adaptive(case: Case) -> Any:
    controller = AdaptiveKLController(
        case.inputs["init"], target=case.inputs["target"], horizon=case.inputs["horizon"]
    )
    out = []
    for kl, steps, _ in case.outputs:
        controller.update(kl, steps)
        out.append([kl, steps, controller.value])
    return out


HANDLERS: dict[str, Callable[[Case], Any]] = {
    **dict.fromkeys(("gae", "gae_unwhitened"), _gae),
    **dict.fromkeys(
        (
            "grpo",
            "grpo_vectorized",
            "grpo_passk",
            "rloo",
            "rloo_vectorized",
            "opo",
            "gpg",
            "reinforce_plus_plus_baseline",
        ),
        _outcome,
    ),
    **dict.fromkeys(("otb", "tir_otb"), _token_baseline),
    **dict.fromkeys(
        (
            "masked_sum",
            "masked_mean",
            "masked_mean_axis",
            "masked_var_unbiased",
            "masked_var_biased",
            "masked_whiten",
        ),
        _masked,
    ),
    **dict.fromkeys(("kl_penalty", "kl_penalty_grad"), _kl_penalty),
    "reinforce_plus_plus": _reinforce_plus_plus,
    "remax": _remax,
    "gdpo": _gdpo,
    "group_mean_std": _group_mean_std,
    "compute_rewards": _compute_rewards,
    "adaptive_kl_controller": _adaptive,
}
