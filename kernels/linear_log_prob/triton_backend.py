"""Output projection fused with the softmax passes on Hopper: tensor-core products fed by TMA.

Forward: a program multiplies a tile of tokens with one part of the vocabulary after another and
keeps only the running softmax. Backward: logits are recomputed tile by tile and leave the kernel as
their gradient; the two large products that follow are cuBLAS's.
"""

# mypy: allow-untyped-defs
# Triton reads the kernels' parameters itself; annotations other than constexpr mislead it.
from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

__all__ = [
    "TILE",
    "fused_gradient",
    "fused_partials",
    "linear_gradient",
    "linear_partials",
    "takes",
]

# tokens, rows, hidden, warps, stages: checked for sm_90 by compile_check.py
TILE = (128, 128, 64, 8, 4)
INTERPRETER_TILE = (32, 64, 32, 4, 1)
LOG2_E = 1.4426950408889634


def takes(hidden: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the tensors suit TMA (16-byte rows) and the tensor cores (16-bit numbers).

    The interpreter multiplies bfloat16 wrongly, so there only float32 is taken.
    """
    if hidden.size(1) * hidden.element_size() % 16 or weight.data_ptr() % 16:
        return False
    if os.environ.get("TRITON_INTERPRET") == "1":
        return hidden.dtype == torch.float32
    return hidden.dtype in (torch.bfloat16, torch.float16)


@triton.jit
def linear_partials(
    hidden,  # descriptor of [T, H], block [BM, BK]
    rows,  # descriptor of [n, H], block [BN, BK]
    targets,  # [T] int64
    partials,  # [parts, 4, T] float32, written: top, total, weighted, target of each part
    num_tokens, num_rows, first_row, rows_per_part, hidden_size, scale,
    ENTROPY: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    num_tiles = tl.cdiv(num_tokens, BM)
    tile = program % num_tiles  # neighbours share the vocabulary part, which stays in the L2 cache
    part = program // num_tiles
    token = tile * BM + tl.arange(0, BM)
    inside = token < num_tokens
    target = (tl.load(targets + token, mask=inside, other=-1) - first_row).to(tl.int32)
    top = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    weighted = tl.zeros((BM,), tl.float32)
    target_logit = tl.zeros((BM,), tl.float32)
    first = part * rows_per_part
    end = tl.minimum(first + rows_per_part, num_rows)
    for n in range(first, end, BN):
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, hidden_size, BK):
            acc = tl.dot(hidden.load([tile * BM, k]), rows.load([n, k]).T, acc)
        row = n + tl.arange(0, BN)
        target_logit += tl.sum(tl.where(row[None, :] == target[:, None], acc, 0.0), 1)
        acc = tl.where((row < end)[None, :], acc, -1e30)
        new_top = tl.maximum(top, tl.max(acc, 1))
        acc = (acc - new_top[:, None]) * scale  # log2 of the probability, one live tile
        p = tl.exp2(acc)
        shift = (top - new_top) * scale
        ratio = tl.exp2(shift)
        if ENTROPY:
            old = tl.where(total > 0, ratio * (weighted + total * shift), 0.0)
            weighted = old + tl.sum(p * acc, 1)
        total = total * ratio + tl.sum(p, 1)
        top = new_top
    out = partials + part * 4 * num_tokens + token
    tl.store(out, top, mask=inside)
    tl.store(out + num_tokens, total, mask=inside)
    if ENTROPY:
        weighted = weighted * 0.6931471805599453  # from log2 to log
    tl.store(out + 2 * num_tokens, weighted, mask=inside)
    tl.store(out + 3 * num_tokens, target_logit, mask=inside)


@triton.jit
def linear_gradient(
    hidden,  # descriptor of [T, H], block [BM, BK]
    rows,  # descriptor of [n, H], block [BN, BK]
    targets,  # [T] int64
    tops, log_totals, entropies, grad_log_probs, grad_entropies,  # [T] float32
    out,  # [T, n], rows out_stride apart, written
    num_tokens, num_rows, first_row, out_stride, hidden_size, scale,
    ENTROPY: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    tiles_m = tl.cdiv(num_tokens, BM)
    tiles_n = tl.cdiv(num_rows, BN)
    group = program // (GROUP * tiles_n)  # GROUP token tiles share each tile of rows in L2
    size = tl.minimum(tiles_m - group * GROUP, GROUP)
    tile_m = group * GROUP + (program % (GROUP * tiles_n)) % size
    tile_n = (program % (GROUP * tiles_n)) // size
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, hidden_size, BK):
        acc = tl.dot(hidden.load([tile_m * BM, k]), rows.load([tile_n * BN, k]).T, acc)
    token = tile_m * BM + tl.arange(0, BM)
    row = tile_n * BN + tl.arange(0, BN)
    inside = token < num_tokens
    top = tl.load(tops + token, mask=inside, other=0.0)
    log_total = tl.load(log_totals + token, mask=inside, other=0.0)
    g = tl.load(grad_log_probs + token, mask=inside, other=0.0) * scale
    target = (tl.load(targets + token, mask=inside, other=-1) - first_row).to(tl.int32)
    log_p = (acc - top[:, None]) * scale - log_total[:, None]
    p = tl.exp(log_p)
    grad = tl.where(row[None, :] == target[:, None], g[:, None], 0.0) - g[:, None] * p
    idle = g == 0
    if ENTROPY:
        e = tl.load(grad_entropies + token, mask=inside, other=0.0) * scale
        entropy = tl.load(entropies + token, mask=inside, other=0.0)
        grad -= e[:, None] * p * (tl.maximum(log_p, -1e30) + entropy[:, None])
        idle = idle & (e == 0)
    grad = tl.where(idle[:, None], 0.0, grad)
    at = token[:, None].to(tl.int64) * out_stride + row[None, :]
    tl.store(
        out + at, grad.to(out.dtype.element_ty), mask=inside[:, None] & (row < num_rows)[None, :]
    )


def _tile() -> tuple[int, int, int, int, int]:
    return INTERPRETER_TILE if os.environ.get("TRITON_INTERPRET") == "1" else TILE


def _descriptors(hidden: torch.Tensor, rows: torch.Tensor) -> tuple[TensorDescriptor, ...]:
    bm, bn, bk, _, _ = _tile()
    return (
        TensorDescriptor(hidden, list(hidden.shape), list(hidden.stride()), [bm, bk]),
        TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [bn, bk]),
    )


def fused_partials(
    hidden: torch.Tensor,  # [T, H] contiguous
    rows: torch.Tensor,  # [n, H] contiguous
    targets: torch.Tensor,  # [T]
    partials: torch.Tensor,  # [4, T] fresh, written
    *,
    first_row: int,
    scale: float,
    with_entropy: bool,
) -> None:
    """Softmax partials of hidden rows^T."""
    num_tokens, num_rows = hidden.size(0), rows.size(0)
    if not num_tokens or not num_rows:
        return
    bm, bn, bk, warps, stages = _tile()
    tiles, blocks = triton.cdiv(num_tokens, bm), triton.cdiv(num_rows, bn)
    num_programs = 8 if not hidden.is_cuda else _num_sms(hidden.device)
    parts = min(blocks, max(1, 4 * num_programs // tiles))  # about four waves
    rows_per_part = triton.cdiv(blocks, parts) * bn
    parts = triton.cdiv(num_rows, rows_per_part)
    pieces = torch.empty(parts, 4, num_tokens, dtype=torch.float32, device=hidden.device)
    linear_partials[(tiles * parts,)](
        *_descriptors(hidden, rows), targets, pieces, num_tokens, num_rows, first_row,
        rows_per_part, hidden.size(1), scale * LOG2_E, ENTROPY=with_entropy, BM=bm, BN=bn, BK=bk,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    top, total, weighted, target = pieces.unbind(1)
    partials[0] = top.amax(0)
    shift = (top - partials[0]) * scale
    ratio = shift.exp()
    partials[1] = (total * ratio).sum(0)
    partials[2] = (ratio * (weighted + total * shift)).sum(0)
    partials[3] = target.sum(0)


def fused_gradient(
    hidden: torch.Tensor,  # [T, H] contiguous
    rows: torch.Tensor,  # [n, H] contiguous
    targets: torch.Tensor,  # [T]
    per_token: tuple[torch.Tensor | None, ...],  # top, log_total, entropy, both gradients: [T]
    out: torch.Tensor,  # [T, n] contiguous, written
    *,
    first_row: int,
    scale: float,
) -> None:
    """d loss / d (hidden rows^T)."""
    top, log_total, entropy, grad_log_probs, grad_entropy = per_token
    bm, bn, bk, warps, stages = _tile()
    tiles = triton.cdiv(hidden.size(0), bm) * triton.cdiv(rows.size(0), bn)
    linear_gradient[(tiles,)](
        *_descriptors(hidden, rows), targets, top, log_total, entropy, grad_log_probs,
        top if grad_entropy is None else grad_entropy, out, hidden.size(0), rows.size(0),
        first_row, out.stride(0), hidden.size(1), scale, ENTROPY=grad_entropy is not None,
        BM=bm, BN=bn, BK=bk, GROUP=8, num_warps=warps, num_stages=stages,
    )  # fmt: skip


def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
