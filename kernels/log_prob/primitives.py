"""The two passes over logits, by backend: what both log-prob operators are made of."""

from __future__ import annotations

import torch
from megarl_kernels import native
from megarl_kernels.log_prob import torch_backend

__all__ = ["add_partials", "write_gradient"]


def add_partials(
    backend: str,
    logits: torch.Tensor,
    targets: torch.Tensor,
    partials: torch.Tensor,
    *,
    first_column: int,
    scale: float,
    with_entropy: bool,
) -> None:
    """Continue `partials` [4, T] with the columns of `logits` [T, n], last stride 1."""
    if backend == "torch":
        torch_backend.add_partials(logits, targets, first_column, scale, partials, with_entropy)
    elif backend == "triton":
        from megarl_kernels.log_prob import triton_backend  # imports triton

        triton_backend.add_partials(logits, targets, first_column, scale, partials, with_entropy)
    else:
        native.call(
            "megarl_log_prob_partials", logits.dtype, logits, logits.stride(0), logits.size(0),
            logits.size(1), targets, first_column, scale, with_entropy, partials,
            partials.stride(0),
        )  # fmt: skip


def write_gradient(
    backend: str,
    logits: torch.Tensor,
    out: torch.Tensor,
    targets: torch.Tensor,
    top: torch.Tensor,
    log_total: torch.Tensor,
    entropy: torch.Tensor,
    grad_log_probs: torch.Tensor,
    grad_entropy: torch.Tensor | None,
    *,
    first_column: int,
    scale: float,
) -> None:
    """d loss / d logits of these columns into `out` [T, n], which may be `logits`; last stride 1.

    The other tensors are [T] in the dtype of the sums, contiguous.
    """
    rows = top, log_total, entropy, grad_log_probs, grad_entropy
    if backend == "torch":
        torch_backend.write_gradient(logits, out, targets, first_column, scale, *rows)
    elif backend == "triton":
        from megarl_kernels.log_prob import triton_backend  # imports triton

        triton_backend.write_gradient(logits, out, targets, first_column, scale, *rows)
    else:
        native.call(
            "megarl_log_prob_gradient", logits.dtype, logits, logits.stride(0), out, out.stride(0),
            logits.size(0), logits.size(1), targets, first_column, scale, *rows,
        )  # fmt: skip
