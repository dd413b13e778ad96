"""linear_log_prob: vocabulary-parallel, chunked; checks, dispatch and autograd.

The mathematics is that of log_prob_from_logits (log_prob/partials.py, op.py), on logits that
exist one chunk at a time. Between the passes "recompute" keeps O(T) numbers, "keep" the
logits [T, V_tp] in the dtype of the hidden states and saves a quarter of the products.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from megarl_kernels.dispatch import choose_backend, triton_is_possible
from megarl_kernels.linear_log_prob.chunked import (
    chunk_partials,
    partial_dtype,
    recompute_gradients,
)
from megarl_kernels.log_prob.op import real_columns, row_gradients
from megarl_kernels.log_prob.partials import merge, new_partials
from megarl_kernels.log_prob.primitives import add_partials, write_gradient
from torch.distributed import ProcessGroup

__all__ = ["linear_log_prob"]


def linear_log_prob(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    group: ProcessGroup | None = None,
    with_entropy: bool = True,
    backward: Literal["recompute", "keep"] = "recompute",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of the target and entropy of softmax(hidden weight^T / temperature), per token.

    Args:
        hidden: [T, H], floating point; the same on every rank of `group`.
        weight: [V_tp, H], this rank's rows vocab_start .. vocab_start + V_tp of the output matrix;
            same dtype.
        targets: [T] int64, ids in [0, vocab_size); the same on every rank.
        temperature: > 0.
        vocab_start: first row of this rank.
        vocab_size: V, number of real rows over all ranks; rows from V on are padding and do not
            take part.
            None: vocab_start + V_tp, which is right for one rank only.
        group: ranks that hold the other rows; None: there are none.
        with_entropy: False returns zeros for the entropy and saves its cost.
        backward: "recompute" makes the logits again, chunk by chunk: no memory, 4 products of
            T x H x V_tp for both passes. "keep" holds them from forward to backward, which
            overwrites them with their gradient and can run once: 3 products.

    Returns:
        (log_probs [T], entropy [T]), float32 (float64 for float64 inputs), natural logarithm, both
        differentiable. The gradient for `hidden` is this rank's share: the sum over `group` is the
        gradient.

    Raises:
        ValueError: shapes, dtypes, temperature or backward do not fit.
        RuntimeError: second backward pass with "keep".
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.size(1) != weight.size(1):
        raise ValueError(
            f"hidden {tuple(hidden.shape)} must be [T, H], weight {tuple(weight.shape)} [V_tp, H]"
        )
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(
            f"targets {tuple(targets.shape)} {targets.dtype} must be [{hidden.size(0)}] int64"
        )
    if hidden.dtype != weight.dtype:
        raise ValueError(
            f"hidden is {hidden.dtype}, weight is {weight.dtype}; they must have one dtype"
        )
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be > 0")
    if backward not in ("recompute", "keep"):
        raise ValueError(f"backward={backward!r} must be 'recompute' or 'keep'")
    if group is not None and group.size() == 1:
        group = None
    num_rows = real_columns(weight.size(0), vocab_start, vocab_size, group)
    hidden, weight, targets = hidden.contiguous(), weight.contiguous(), targets.contiguous()
    scores: tuple[torch.Tensor, torch.Tensor] = _LinearLogProb.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, 1.0 / temperature, vocab_start, num_rows, group, with_entropy,
        backward == "keep", _backend(hidden, weight),
    )  # fmt: skip
    return scores


def _backend(hidden: torch.Tensor, weight: torch.Tensor) -> str:
    has_triton = False
    if triton_is_possible(hidden.device.type):
        from megarl_kernels.linear_log_prob.triton_backend import takes  # imports triton

        has_triton = takes(hidden, weight)
    return choose_backend("linear_log_prob", hidden, has_triton=has_triton)


class _LinearLogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        scale: float,
        vocab_start: int,
        num_rows: int,
        group: ProcessGroup | None,
        with_entropy: bool,
        keeps_logits: bool,
        backend: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = weight[:num_rows]
        partials = new_partials(hidden.size(0), partial_dtype(hidden), hidden.device)
        logits = None
        if keeps_logits and any(ctx.needs_input_grad):
            logits = hidden @ rows.t()
            add_partials(
                backend, logits, targets, partials, first_column=vocab_start, scale=scale,
                with_entropy=with_entropy,
            )  # fmt: skip
        else:
            chunk_partials(
                backend, hidden, rows, targets, partials, first_row=vocab_start, scale=scale,
                with_entropy=with_entropy,
            )  # fmt: skip
        stats = merge(
            partials, targets, vocab_start=vocab_start, num_columns=num_rows, scale=scale,
            group=group, with_entropy=with_entropy,
        )  # fmt: skip
        ctx.save_for_backward(hidden, weight, targets, stats.top, stats.log_total, stats.entropy)
        ctx.logits, ctx.keeps_logits = logits, keeps_logits
        ctx.scale, ctx.vocab_start, ctx.num_rows = scale, vocab_start, num_rows
        ctx.with_entropy, ctx.backend = with_entropy, backend
        ctx.set_materialize_grads(False)
        return stats.log_probs, stats.entropy

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, top, log_total, entropy = ctx.saved_tensors
        rows = weight[: ctx.num_rows]
        grads = row_gradients(grad_log_probs, grad_entropy, entropy, ctx.with_entropy)
        per_token = top, log_total, entropy, *grads
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = grad_weight = None
        if wants_weight:
            grad_weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
            grad_weight[ctx.num_rows :] = 0
            if not targets.numel():
                grad_weight.zero_()
        if ctx.keeps_logits:
            if ctx.logits is None:
                raise RuntimeError('backward="keep" has used up the logits: backward runs once')
            dz, ctx.logits = ctx.logits, None
            write_gradient(
                ctx.backend, dz, dz, targets, *per_token, first_column=ctx.vocab_start,
                scale=ctx.scale,
            )  # fmt: skip
            grad_hidden = dz @ rows if wants_hidden else None
            if grad_weight is not None:
                torch.mm(dz.t(), hidden, out=grad_weight[: ctx.num_rows])
        else:
            if wants_hidden:
                grad_hidden = torch.zeros_like(hidden, dtype=partial_dtype(hidden))
            recompute_gradients(
                ctx.backend, hidden, rows, targets, per_token, grad_hidden,
                None if grad_weight is None else grad_weight[: ctx.num_rows],
                first_row=ctx.vocab_start, scale=ctx.scale,
            )  # fmt: skip
            grad_hidden = None if grad_hidden is None else grad_hidden.to(hidden.dtype)
        return (grad_hidden, grad_weight, *[None] * 8)
