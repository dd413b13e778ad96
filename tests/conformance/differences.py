"""Where we differ from the reference on purpose: which ids, why, and the right answer worked out on
its own.

The answers come from slow loops over padded rows that share no code with megarl. An id is listed
only when its right answer differs from the file's; our result must then equal the right answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from math import exp, log
from typing import Any

import torch

from tests.conformance.vectors import Case

__all__ = ["DIFFERENCES", "Difference", "find"]


@dataclass(frozen=True)
class Difference:
    """One kind of deliberate difference."""

    pattern: str  # of ids
    reason: str
    right: Callable[[Case], Any]  # the whole right output, shaped like the case's
    # where `right` does not build on the file's output: the reference's number with its fault. The
    # file
    # must hold it, else the difference is not the one described here.
    theirs: Callable[[Case], Any] | None = None


def _rows(case: Case) -> tuple[list[list[float]], list[list[float]], list[str]]:
    """(mask, rewards, groups) as lists."""
    mask = case.inputs["response_mask"].tolist()
    rewards = case.inputs.get("token_level_rewards")
    return mask, [] if rewards is None else rewards.tolist(), case.inputs.get("index", [])


def _is_single(case: Case) -> list[bool]:
    labels = case.inputs["index"]
    sizes = Counter(labels)
    return [sizes[x] == 1 for x in labels]


def _singles_zero(case: Case) -> Any:
    """The file's advantages with 0 in the rows of groups of one, and 0 under the mask."""
    keep = torch.tensor([not s for s in _is_single(case)])[:, None] * case.inputs["response_mask"]
    if isinstance(case.outputs, dict):
        return {
            "advantages": case.outputs["advantages"] * keep,
            "returns": case.outputs["returns"] * case.inputs["response_mask"],
        }
    return case.outputs * keep


def _whitened(rows: list[list[float]], mask: list[list[float]]) -> torch.Tensor:
    kept = [v for r, m in zip(rows, mask, strict=True) for v, x in zip(r, m, strict=True) if x]
    mean = sum(kept) / len(kept)
    variance = sum((v - mean) ** 2 for v in kept) / (len(kept) - 1)
    return torch.tensor(
        [
            [(v - mean) / (variance + 1e-8) ** 0.5 if x else 0.0 for v, x in zip(r, m, strict=True)]
            for r, m in zip(rows, mask, strict=True)
        ],
        dtype=torch.float64,
    )


def _centred(
    scores: list[float], labels: list[str], *, by_std: bool, keeps_single: bool
) -> list[float]:
    """Minus the group's mean (and over its std). A group of one: 0, or the raw score if
    keeps_single.
    """
    out = []
    for score, label in zip(scores, labels, strict=True):
        group = [s for s, other in zip(scores, labels, strict=True) if other == label]
        mean = sum(group) / len(group)
        std = (sum((s - mean) ** 2 for s in group) / max(len(group) - 1, 1)) ** 0.5
        if len(group) == 1 and keeps_single:
            mean, std = 0.0, 1.0
        out.append((score - mean) / ((std + 1e-6) if by_std else 1.0))
    return out


def _baseline_whitened(case: Case, *, keeps_single: bool = False) -> Any:
    mask, rewards, labels = _rows(case)
    values = _centred([sum(r) for r in rewards], labels, by_std=False, keeps_single=keeps_single)
    return _whitened([[v] * len(m) for v, m in zip(values, mask, strict=True)], mask)


def _gdpo(case: Case, *, keeps_single: bool = False) -> Any:
    mask, _, labels = _rows(case)
    names = [k for k in case.inputs if k not in ("response_mask", "index", "token_level_rewards")]
    scales = case.params.get("weights") or [1.0] * len(names)
    total = [0.0] * len(mask)
    for name, scale in zip(names, scales, strict=True):
        scores = case.inputs[name].double().tolist()
        values = _centred(scores, labels, by_std=True, keeps_single=keeps_single)
        total = [t + scale * v for t, v in zip(total, values, strict=True)]
    return _whitened([[v] * len(m) for v, m in zip(total, mask, strict=True)], mask)


def _group_mean_std(case: Case) -> Any:
    labels = case.inputs["index"]
    scores = case.inputs["scores"].double().tolist()
    groups = {
        x: [s for s, o in zip(scores, labels, strict=True) if o == x] for x in sorted(set(labels))
    }
    single = torch.tensor([len(g) == 1 for g in groups.values()])
    means = torch.tensor([sum(g) / len(g) for g in groups.values()])
    return {
        "mean": torch.where(single, means, case.outputs["mean"]),
        "std": torch.where(single, 0.0, case.outputs["std"]),
        "count": case.outputs["count"],
    }


def _zero_under_mask(case: Case) -> Any:
    """The file's numbers on trained tokens, 0 elsewhere."""
    mask = case.inputs["response_mask" if "response_mask" in case.inputs else "mask"]
    if isinstance(case.outputs, dict):
        return {k: v * mask for k, v in case.outputs.items()}
    return case.outputs * mask


def _geo_mean(case: Case, *, counts_all: bool = False) -> Any:
    """The file's loss and gradient; clip fractions of the tokens whose clip is in force."""
    low, high = case.params["clip_ratio_low"], case.params["clip_ratio_high"]
    rows = [
        case.inputs[k].tolist() for k in ("response_mask", "advantages", "log_prob", "old_log_prob")
    ]
    up = down = count = 0.0
    for row in zip(*rows, strict=True):
        for m, a, new, old in zip(*row, strict=True):
            if m:
                count += 1
                above, below = new - old > high, new - old < -low
                up += a > 0 and (above or (counts_all and below))
                down += a < 0 and (below or (counts_all and above))
    metrics = {"actor/pg_clipfrac": up / count, "actor/pg_clipfrac_lower": down / count}
    return {**case.outputs, "metrics": {**case.outputs["metrics"], **metrics}}


def rejection(case: Case, *, is_inverted: bool = False) -> Any:
    """Rejection and its metrics, row by row. is_inverted: k1 bounds on 1 / ratio, as the reference
    has them.
    """
    mask, ratios = case.inputs["response_mask"].tolist(), case.inputs["log_ratio"].tolist()
    names = [n.strip() for n in case.params["rollout_rs"].split(",")]
    specs = [s.strip() for s in str(case.params["threshold"]).split(",")] * len(names)
    tokens = [
        [min(max(x, -20.0), 20.0) for x, k in zip(r, m, strict=True) if k]
        for r, m in zip(ratios, mask, strict=True)
    ]
    kept = [[True] * len(row) for row in tokens]
    metrics: dict[str, float] = {}
    for name, spec in zip(names, specs, strict=False):
        level, kind = name.rsplit("_", 1)
        stat = {
            "k1": lambda x: -x, "k2": lambda x: x * x / 2, "k3": lambda x: exp(x) - 1 - x,
        }[kind]  # fmt: skip
        values = [[stat(x) for x in row] for row in tokens]
        if level != "token":
            over = {"seq_sum": sum, "seq_mean": lambda r: sum(r) / len(r), "seq_max": max}[level]
            values = [[over(row)] * len(row) if row else [] for row in values]
        low, high = 0.0, float(spec.split("_")[-1])
        if kind == "k1":
            bounds = (float(spec.split("_")[0]) if "_" in spec else 1 / high), high
            # the ratio lies in [a, b] where -log ratio lies in [-log b, -log a]
            low, high = (
                (log(bounds[0]), log(bounds[1]))
                if is_inverted
                else (-log(bounds[1]), -log(bounds[0]))
            )
        inside = [[low <= v <= high for v in row] for row in values]
        kept = [
            [a and b for a, b in zip(x, y, strict=True)] for x, y in zip(kept, inside, strict=True)
        ]
        found = _rejection_metrics(values, inside, low, high, level != "token", kind == "k1")
        metrics |= {f"rollout_rs_{name}_{k}": v for k, v in found.items()}
    flat = [k for row in kept for k in row]
    metrics["rollout_rs_masked_fraction"] = 1 - sum(flat) / len(flat)
    used = [row for row in kept if row]
    metrics["rollout_rs_seq_masked_fraction"] = sum(not all(row) for row in used) / len(used)
    out = torch.zeros(case.inputs["response_mask"].shape, dtype=torch.float64)
    out[case.inputs["response_mask"] > 0] = torch.tensor(flat, dtype=torch.float64)
    return {"mask": out, "metrics": metrics}


def _rejection_metrics(
    values: list[list[float]], inside: list[list[bool]], low: float, high: float,
    is_sequence: bool, has_low: bool,
) -> dict[str, float]:  # fmt: skip
    flat = [v for row in values for v in row]
    means = [sum(row) / len(row) for row in values if row]
    over = means if is_sequence else flat
    bounded = [min(max(v, low), high) for v in flat]
    centre = sum(bounded) / len(bounded)
    seq_mean = sum(means) / len(means)
    spread = sum((v - seq_mean) ** 2 for v in means) / max(len(means) - 1, 1)
    out = {
        "mean": sum(flat) / len(flat), "max": max(over), "min": min(over),
        "fraction_high": sum(v > high for v in over) / len(over),
        "fraction_low": sum(v < low for v in over) / len(over) if has_low else 0.0,
        "std": (sum((v - centre) ** 2 for v in bounded) / len(bounded)) ** 0.5,
        "seq_mean": seq_mean, "seq_std": spread**0.5, "seq_max": max(means), "seq_min": min(means),
        "seq_max_deviation": max(abs(v) for v in means),
        "seq_fraction_high": sum(v > high for v in means) / len(means),
        "masked_fraction": sum(not k for row in inside for k in row) / len(flat),
        "seq_masked_fraction": sum(not all(r) for r in inside if r) / len(means),
    }  # fmt: skip
    return {**out, "seq_fraction_low": sum(v < low for v in means) / len(means)} if has_low else out


ONE = "a group of one has advantage 0 (the reference keeps its raw reward)"
HOLES = "a masked token inside a response has advantage and return 0, not a neighbour's value"
DIFFERENCES = (
    Difference("grpo/*", ONE, _singles_zero),
    Difference("grpo_vectorized/*", ONE, _singles_zero),
    Difference("rloo", ONE, _singles_zero),
    Difference("opo", ONE, _singles_zero),
    Difference("gpg*", ONE, _singles_zero),
    Difference("otb/*", ONE + "; " + HOLES, _singles_zero),
    Difference("tir_otb/*", ONE + "; " + HOLES, _singles_zero),
    Difference(
        "reinforce_plus_plus_baseline",
        ONE + ", before whitening",
        _baseline_whitened,
        partial(_baseline_whitened, keeps_single=True),
    ),
    Difference("gdpo", ONE + ", before whitening", _gdpo, partial(_gdpo, keeps_single=True)),
    Difference(
        "group_mean_std", "a group of one has its own mean and std 0, not 0 and 1", _group_mean_std
    ),
    Difference(
        "masked_whiten", "0 outside the mask, where the reference leaves numbers", _zero_under_mask
    ),
    Difference(
        "gae/*/response_mask/*", "0 after the last token (no padding here)", _zero_under_mask
    ),
    Difference(
        "gae/rew_dense/response_mask_multiturn/*",
        HOLES + "; a reward there is refused, so it is dropped first",
        _zero_under_mask,
    ),
    Difference("gae*", HOLES, _zero_under_mask),
    Difference(
        "policy_loss/geo_mean*",
        "clip fractions count tokens whose clip is in force; the reference counts every ratio "
        "outside the bounds, also where the minimum takes the unclipped one",
        _geo_mean,
        partial(_geo_mean, counts_all=True),
    ),
    Difference(
        "rollout_rs/*k1*",
        "bounds are bounds on pi_train / pi_rollout; the reference applies them to its inverse",
        rejection,
        partial(rejection, is_inverted=True),
    ),
)


def find(case: Case) -> Difference | None:
    """The first row of the table whose pattern the id has."""
    return next((d for d in DIFFERENCES if fnmatch(case.id, d.pattern)), None)
