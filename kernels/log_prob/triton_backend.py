"""Partials and gradient over logits on a GPU: one pass over memory each, 16-byte accesses."""

# mypy: allow-untyped-defs
# Triton reads the kernels' parameters itself; annotations other than constexpr mislead it.
from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["add_partials", "log_prob_gradient", "log_prob_partials", "write_gradient"]

# A program reads tiles of ROWS x lanes: each lane keeps its own running softmax, rescaled once per
# tile, so the loop has no exchange between threads. 8 warps x 32 threads x 16 bytes.
ROWS = 4
LANES = {torch.float32: 1024, torch.bfloat16: 2048, torch.float16: 2048}
GRADIENT_BLOCK = 4096


@triton.jit
def log_prob_partials(
    logits,  # [T, n], rows `stride` apart
    targets,  # [T] int64
    partials,  # [4, T] float32 with rows partial_stride apart: top, total, weighted, target
    num_columns, first_column, stride, partial_stride, scale,
    ENTROPY: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * stride
    top = tl.full((LANES,), -float("inf"), tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    weighted = tl.zeros((LANES,), tl.float32)
    offsets = tl.arange(0, ROWS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    for start in range(0, num_columns, ROWS * LANES):
        at = start + offsets
        x = tl.load(row + at, mask=at < num_columns, other=-float("inf")).to(tl.float32)
        new_top = tl.maximum(top, tl.max(x, 0))
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        z = (x - base[None, :]) * scale
        p = tl.exp(z)
        shift = tl.where(top == -float("inf"), 0.0, (top - base) * scale)
        ratio = tl.exp(shift)
        if ENTROPY:
            weighted = ratio * (weighted + total * shift) + tl.sum(p * tl.maximum(z, -1e30), 0)
        total = total * ratio + tl.sum(p, 0)
        top = new_top
    # lanes, then what earlier columns left
    old_top = tl.load(partials + token)
    old_total = tl.load(partials + partial_stride + token)
    old_weighted = tl.load(partials + 2 * partial_stride + token)
    all_top = tl.maximum(tl.max(top, 0), old_top)
    base = tl.where(all_top == -float("inf"), 0.0, all_top)
    shift = tl.where(top == -float("inf"), 0.0, (top - base) * scale)
    old_shift = tl.where(old_top == -float("inf"), 0.0, (old_top - base) * scale)
    ratio = tl.exp(shift)
    old_ratio = tl.exp(old_shift)
    tl.store(partials + token, all_top)
    tl.store(partials + partial_stride + token, tl.sum(total * ratio, 0) + old_total * old_ratio)
    if ENTROPY:
        weighted = tl.sum(ratio * (weighted + total * shift), 0)
        weighted += old_ratio * (old_weighted + old_total * old_shift)
        tl.store(partials + 2 * partial_stride + token, weighted)
    target = tl.load(targets + token) - first_column
    here = (target >= 0) & (target < num_columns)
    logit = tl.load(row + target, mask=here, other=0.0).to(tl.float32)
    tl.store(partials + 3 * partial_stride + token, logit, mask=here)


@triton.jit
def log_prob_gradient(
    logits,  # [T, n], rows `stride` apart
    out,  # [T, n], rows out_stride apart; may be logits
    targets,  # [T] int64
    tops, log_totals, entropies, grad_log_probs, grad_entropies,  # [T] float32
    num_columns, first_column, stride, out_stride, scale,
    ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_columns
    x = tl.load(logits + token * stride + at, mask=inside, other=-float("inf")).to(tl.float32)
    g = tl.load(grad_log_probs + token) * scale
    log_p = (x - tl.load(tops + token)) * scale - tl.load(log_totals + token)
    p = tl.exp(log_p)
    hit = at == (tl.load(targets + token) - first_column)
    grad = tl.where(hit, g, 0.0) - g * p
    idle = g == 0
    if ENTROPY:
        e = tl.load(grad_entropies + token) * scale
        grad -= e * p * (tl.maximum(log_p, -1e30) + tl.load(entropies + token))
        idle = idle & (e == 0)
    grad = tl.where(idle, 0.0, grad)
    tl.store(out + token * out_stride + at, grad.to(out.dtype.element_ty), mask=inside)


def add_partials(
    logits: torch.Tensor,
    targets: torch.Tensor,
    first_column: int,
    scale: float,
    partials: torch.Tensor,
    with_entropy: bool,
) -> None:
    """As in torch_backend."""
    if logits.numel():
        log_prob_partials[(logits.size(0),)](
            logits, targets, partials, logits.size(1), first_column, logits.stride(0),
            partials.stride(0), scale, ENTROPY=with_entropy, ROWS=ROWS, LANES=LANES[logits.dtype],
            num_warps=8,
        )  # fmt: skip


def write_gradient(
    logits: torch.Tensor,
    out: torch.Tensor,
    targets: torch.Tensor,
    first_column: int,
    scale: float,
    top: torch.Tensor,
    log_total: torch.Tensor,
    entropy: torch.Tensor,
    grad_log_probs: torch.Tensor,
    grad_entropy: torch.Tensor | None,
) -> None:
    """As in torch_backend."""
    if logits.numel():
        grid = (logits.size(0), triton.cdiv(logits.size(1), GRADIENT_BLOCK))
        log_prob_gradient[grid](
            logits, out, targets, top, log_total, entropy, grad_log_probs,
            top if grad_entropy is None else grad_entropy, logits.size(1), first_column,
            logits.stride(0), out.stride(0), scale, ENTROPY=grad_entropy is not None,
            BLOCK=GRADIENT_BLOCK, num_warps=8,
        )  # fmt: skip
