"""Masks, truncation, resampling and balancing: a case through our functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megarl.algorithms.rewards import resample, resampling_weights
from megarl.algorithms.spans import mask_after_stop, truncate
from megarl.data.balance import karmarkar_karp, sequence_cost
from tests.conformance.vectors import Case

__all__ = ["HANDLERS"]


def _response_mask(case: Case) -> Any:
    ids, stop = case.inputs["response_id"], case.inputs["eos_token"]
    rows, width = ids.shape
    cu_seqlens = torch.arange(rows + 1) * width
    stops = stop if isinstance(stop, list) else [stop]
    return mask_after_stop(ids.flatten(), cu_seqlens, stops).reshape(rows, width)


def _truncation(case: Case) -> Any:
    """Truncate packed, then pad as the reference does; padding is the runner's, not ours."""
    ids, mask = case.inputs["input_ids"], case.inputs["attention_mask"]
    width, pad = case.inputs["max_length"], case.inputs["pad_token_id"]
    side = case.params.get("truncation", case.id.split("/")[1])
    lengths = mask.sum(1)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    cut, cut_lengths = truncate(
        ids[mask > 0], cu_seqlens, max_length=width, side="right" if side == "right" else "left"
    )
    is_left_padded = case.params.get("left_pad", True)
    out = torch.full((ids.shape[0], width), pad)
    out_mask = torch.zeros_like(out)
    for row, part in enumerate(cut.split(cut_lengths.diff().tolist())):
        at = slice(width - len(part), width) if is_left_padded else slice(0, len(part))
        out[row, at], out_mask[row, at] = part, 1
    return [out, out_mask]


def _pf_ppo(case: Case) -> Any:
    params = case.params
    scores = case.inputs["token_level_scores"].sum(1)
    weights = resampling_weights(scores, params["reweight_method"], power=params["weight_pow"])
    drawn = resample(weights, seed=params["torch_manual_seed"])
    labels = case.inputs["uid"]
    return {
        "weights_before_eps": weights,
        "sample_indices": drawn,
        "uid": [labels[i] for i in drawn.tolist()],
    }


def _balanced(case: Case) -> Any:
    lengths, inputs = case.inputs["seqlen_list"], case.inputs
    parts = karmarkar_karp(lengths, inputs["k_partitions"], equal_size=inputs["equal_size"])
    return {"partitions": parts, "sums": [sum(lengths[i] for i in part) for part in parts]}


def _workload(case: Case) -> Any:
    """The reference's formula is for width 2048 and in units of one attention pair."""
    width = 2048
    return torch.tensor(
        [round(12 * width * sequence_cost(n, width)) for n in case.inputs["seqlen"].tolist()]
    )


HANDLERS: dict[str, Callable[[Case], Any]] = {
    "get_response_mask": _response_mask,
    "truncation": _truncation,
    "pf_ppo": _pf_ppo,
    "seqlen_balanced": _balanced,
    "calculate_workload": _workload,
}
