"""log_prob_from_logits: checks, dispatch and autograd.

d log_prob / d x_j = ([j = target] - p_j) / temperature
d entropy  / d x_j = -p_j (log p_j + entropy) / temperature
"""

from __future__ import annotations

from typing import Any

import torch
from megarl_kernels.dispatch import choose_backend
from megarl_kernels.log_prob.partials import merge, new_partials
from megarl_kernels.log_prob.primitives import add_partials, write_gradient
from torch.distributed import ProcessGroup

__all__ = ["log_prob_from_logits", "real_columns", "row_gradients"]


def log_prob_from_logits(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    group: ProcessGroup | None = None,
    with_entropy: bool = True,
    inplace_backward: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of the target and entropy of softmax(logits / temperature), per token.

    Args:
        logits: [T, V_tp] floating point, this rank's columns vocab_start .. vocab_start + V_tp.
            -inf is probability 0.
        targets: [T] int64, ids in [0, vocab_size); the same on every rank of `group`. An id outside
            gives a meaningless log-prob, no error: looking would make the GPU wait.
        temperature: > 0.
        vocab_start: id of this rank's first column.
        vocab_size: V, real columns over all ranks; from V on they are padding and take no part.
            None: vocab_start + V_tp, which is right for one rank only.
        group: ranks that hold the other columns; None: there are none.
        with_entropy: False returns zeros for the entropy and saves its cost.
        inplace_backward: write the gradient over `logits` in the backward pass, which then needs no
            memory and can run once. Nobody else may use the logits after the forward pass.

    Returns:
        (log_probs [T], entropy [T]), float32 (float64 for float64 logits), natural logarithm, both
        differentiable. NaN where a logit is NaN or all are -inf.

    Raises:
        ValueError: shapes, dtypes or temperature do not fit.
        RuntimeError: second backward pass with inplace_backward.
    """
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ValueError(
            f"logits {tuple(logits.shape)} {logits.dtype} must be [T, V_tp] floating point"
        )
    if targets.shape != logits.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(
            f"targets {tuple(targets.shape)} {targets.dtype} must be [{logits.size(0)}] int64"
        )
    if targets.device != logits.device:
        raise ValueError(f"targets are on {targets.device}, logits on {logits.device}")
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be > 0")
    if logits.size(1) > 1 and logits.stride(1) != 1:
        if inplace_backward:
            raise ValueError("inplace_backward needs logits whose last dimension is contiguous")
        logits = logits.contiguous()
    if group is not None and group.size() == 1:
        group = None
    num_columns = real_columns(logits.size(1), vocab_start, vocab_size, group)
    backend = choose_backend("log_prob_from_logits", logits)
    scores: tuple[torch.Tensor, torch.Tensor] = _LogProb.apply(  # type: ignore[no-untyped-call]
        logits, targets.contiguous(), 1.0 / temperature, vocab_start, num_columns, group,
        with_entropy, inplace_backward, backend,
    )  # fmt: skip
    return scores


def real_columns(
    vocab_tp: int, vocab_start: int, vocab_size: int | None, group: ProcessGroup | None
) -> int:
    """How many of this rank's columns are not padding.

    Raises:
        ValueError: vocab_size is missing although others hold columns too.
    """
    if vocab_size is None:
        if group is not None:
            raise ValueError("vocab_size is required when the vocabulary is split over a group")
        return vocab_tp
    return min(max(vocab_size - vocab_start, 0), vocab_tp)


def row_gradients(
    grad_log_probs: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    entropy: torch.Tensor,
    with_entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Incoming gradients as contiguous [T]; None for an entropy gradient that changes nothing.

    The entropy is mostly a metric. Its gradient costs another pass over the logits, so a zero one,
    which is what stacking it with log_probs leaves, is worth looking for.
    """
    if grad_log_probs is None:
        grad_log_probs = torch.zeros_like(entropy)
    if grad_entropy is not None and not (with_entropy and bool(grad_entropy.any())):
        grad_entropy = None
    return (
        grad_log_probs.contiguous(),
        None if grad_entropy is None else grad_entropy.contiguous(),
    )


class _LogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        scale: float,
        vocab_start: int,
        num_columns: int,
        group: ProcessGroup | None,
        with_entropy: bool,
        inplace_backward: bool,
        backend: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        partials = new_partials(logits.size(0), dtype, logits.device)
        add_partials(
            backend, logits[:, :num_columns], targets, partials,
            first_column=vocab_start, scale=scale, with_entropy=with_entropy,
        )  # fmt: skip
        stats = merge(
            partials, targets, vocab_start=vocab_start, num_columns=num_columns, scale=scale,
            group=group, with_entropy=with_entropy,
        )  # fmt: skip
        ctx.save_for_backward(logits, targets, stats.entropy, stats.top, stats.log_total)
        ctx.scale, ctx.vocab_start, ctx.num_columns = scale, vocab_start, num_columns
        ctx.with_entropy, ctx.backend = with_entropy, backend
        ctx.inplace_backward, ctx.is_used = inplace_backward, False
        ctx.set_materialize_grads(False)
        return stats.log_probs, stats.entropy

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        if ctx.is_used:
            raise RuntimeError("inplace_backward has overwritten the logits: backward runs once")
        logits, targets, entropy, top, log_total = ctx.saved_tensors
        if ctx.inplace_backward:
            ctx.is_used = True
            out = logits.detach()
            # other operators that kept these logits for their backward pass must not use them now
            torch.autograd.graph.increment_version(logits)
        else:
            out = torch.empty_like(logits)
        grads = row_gradients(grad_log_probs, grad_entropy, entropy, ctx.with_entropy)
        n = ctx.num_columns
        write_gradient(
            ctx.backend, logits[:, :n], out[:, :n], targets, top, log_total, entropy, *grads,
            first_column=ctx.vocab_start, scale=ctx.scale,
        )  # fmt: skip
        out[:, n:] = 0
        return (out, *[None] * 8)
