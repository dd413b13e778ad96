"""Logits in chunks of tokens x vocabulary rows: never more than one chunk exists at a time.

Rows are the outer loop, so each row of the output matrix is read once per pass and its gradient is
written once. The matrix products are torch's on every backend.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from megarl_kernels.log_prob.primitives import add_partials, write_gradient

__all__ = ["chunk_partials", "partial_dtype", "recompute_gradients"]

# [tokens, rows] of one chunk. CPU: 16 MiB in float32, of the order of the caches and large enough
# for matrix products at full speed. Elsewhere: products that fill a GPU.
CPU_CHUNK = (2048, 2048)
DEVICE_CHUNK = (8192, 16384)


def chunk_partials(
    backend: str,
    hidden: torch.Tensor,  # [T, H]
    rows: torch.Tensor,  # [n, H]
    targets: torch.Tensor,  # [T]
    partials: torch.Tensor,  # [4, T], written
    *,
    first_row: int,
    scale: float,
    with_entropy: bool,
) -> None:
    """Softmax partials of hidden rows^T over these rows."""
    if backend == "triton":
        from megarl_kernels.linear_log_prob.triton_backend import fused_partials  # imports triton

        fused_partials(
            hidden, rows, targets, partials, first_row=first_row, scale=scale,
            with_entropy=with_entropy,
        )  # fmt: skip
        return
    buffer = _buffer(hidden, rows)
    for part in _row_parts(rows):
        for tokens in _token_parts(hidden):
            logits = _logits(hidden[tokens], rows[part], buffer)
            add_partials(
                backend, logits, targets[tokens], partials[:, tokens],
                first_column=first_row + part.start, scale=scale, with_entropy=with_entropy,
            )  # fmt: skip


def recompute_gradients(
    backend: str,
    hidden: torch.Tensor,  # [T, H]
    rows: torch.Tensor,  # [n, H]
    targets: torch.Tensor,  # [T]
    per_token: tuple[torch.Tensor | None, ...],  # top, log_total, entropy, both gradients: [T]
    grad_hidden: torch.Tensor | None,  # [T, H] zeros in the dtype of the sums, added to
    grad_rows: torch.Tensor | None,  # [n, H], written
    *,
    first_row: int,
    scale: float,
) -> None:
    """Gradients for hidden states and rows; logits are computed once more. None: not wanted."""
    buffer = _buffer(hidden, rows)
    is_split = hidden.size(0) > _chunk(hidden)[0]
    for part in _row_parts(rows):
        here = rows[part]
        sums = None
        if grad_rows is not None and is_split:  # blocks of tokens are summed in the wide dtype
            sums = torch.zeros(here.shape, dtype=partial_dtype(hidden), device=here.device)
        for tokens in _token_parts(hidden):
            x = hidden[tokens]
            dz = _logits_gradient(
                backend, x, here, targets[tokens],
                tuple(None if v is None else v[tokens] for v in per_token), buffer,
                first_row=first_row + part.start, scale=scale,
            )  # fmt: skip
            if grad_hidden is not None:
                _add_product(grad_hidden[tokens], dz, here)
            if sums is not None:
                _add_product(sums, dz.t(), x)
            elif grad_rows is not None:
                torch.mm(dz.t(), x, out=grad_rows[part])
        if sums is not None:
            grad_rows[part] = sums  # type: ignore[index]


def _logits_gradient(
    backend: str,
    hidden: torch.Tensor,
    rows: torch.Tensor,
    targets: torch.Tensor,
    per_token: tuple[torch.Tensor | None, ...],
    buffer: torch.Tensor,
    *,
    first_row: int,
    scale: float,
) -> torch.Tensor:
    """d loss / d logits of one chunk, in the buffer."""
    if backend == "triton":
        from megarl_kernels.linear_log_prob.triton_backend import fused_gradient  # imports triton

        dz = _view(buffer, hidden, rows)
        fused_gradient(
            hidden, rows, targets, per_token, dz, first_row=first_row, scale=scale
        )  # fmt: skip
        return dz
    dz = _logits(hidden, rows, buffer)
    write_gradient(
        backend, dz, dz, targets, *per_token, first_column=first_row, scale=scale
    )  # type: ignore[misc]  # fmt: skip
    return dz


def partial_dtype(hidden: torch.Tensor) -> torch.dtype:
    """Of sums and results: float32, float64 for float64."""
    return torch.promote_types(hidden.dtype, torch.float32)


def _add_product(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """out += a b; a product of narrow matrices is rounded to their dtype once."""
    if out.dtype == a.dtype:
        out.addmm_(a, b)
    else:
        out += a @ b


def _chunk(hidden: torch.Tensor) -> tuple[int, int]:
    return CPU_CHUNK if hidden.device.type == "cpu" else DEVICE_CHUNK


def _buffer(hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    tokens, columns = _chunk(hidden)
    return hidden.new_empty(min(tokens, hidden.size(0)) * min(columns, rows.size(0)))


def _logits(hidden: torch.Tensor, rows: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """hidden rows^T in the buffer: valid until the next call."""
    return torch.mm(hidden, rows.t(), out=_view(buffer, hidden, rows))


def _view(buffer: torch.Tensor, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    shape = hidden.size(0), rows.size(0)
    return buffer[: shape[0] * shape[1]].view(shape)


def _row_parts(rows: torch.Tensor) -> Iterator[slice]:
    return _parts(rows.size(0), _chunk(rows)[1])


def _token_parts(hidden: torch.Tensor) -> Iterator[slice]:
    return _parts(hidden.size(0), _chunk(hidden)[0])


def _parts(size: int, step: int) -> Iterator[slice]:
    return (slice(i, min(i + step, size)) for i in range(0, size, step))
