"""Which tokens of a sequence belong to it: up to the stop token, within a length."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megarl.algorithms.packed import cumsum

__all__ = ["mask_after_stop", "truncate"]


def mask_after_stop(
    response_ids: torch.Tensor, cu_seqlens: torch.Tensor, stop_token_ids: Sequence[int]
) -> torch.Tensor:
    """1 up to and including the first stop token of each sequence, 0 after it, [T] float32.

    Args:
        response_ids: [T] int64, responses only.
        cu_seqlens: [S+1] int32.
    """
    stops = torch.isin(response_ids, torch.tensor(list(stop_token_ids), dtype=response_ids.dtype))
    stops_before = cumsum(stops.long(), cu_seqlens) - stops.long()
    return (stops_before == 0).to(torch.float32)


def truncate(
    input_ids: torch.Tensor, cu_seqlens: torch.Tensor, *, max_length: int, side: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut each sequence to max_length tokens; side is where tokens are lost: "left" or "right".

    Returns:
        (input_ids [T'], cu_seqlens [S+1]). A shorter sequence stays as it is: nothing is padded.
    """
    if side not in ("left", "right"):
        raise ValueError(f"side={side!r} must be left or right")
    spans = zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)
    parts = [
        input_ids[max(start, stop - max_length) : stop]
        if side == "left"
        else input_ids[start : min(stop, start + max_length)]
        for start, stop in spans
    ]
    lengths = torch.tensor([0] + [p.numel() for p in parts], dtype=cu_seqlens.dtype)
    return torch.cat(parts), lengths.cumsum(0).to(cu_seqlens.dtype)
