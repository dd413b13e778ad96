"""linear_log_prob: vocabulary-parallel, token-chunked, recomputed in the backward pass.

With z = hidden weight^T / temperature, m = max_j z_j, Z = sum_j exp(z_j - m), lse = m + log Z and
p = exp(z - lse), all centred so that a common shift of z cancels:

    log_prob = (z_target - m) - log Z
    entropy  = log Z - sum_j exp(z_j - m) (z_j - m) / Z
    d log_prob / d z_j = [j = target] - p_j
    d entropy  / d z_j = -p_j (log p_j + entropy)

Between the passes only hidden, weight, targets, lse and entropy are kept: O(T) instead of O(T V).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

__all__ = ["linear_log_prob"]

# A chunk's logits: 2^24 float32 numbers, 64 MiB. Large enough for the matrix products to run at
# full speed, small enough to be re-used from one chunk to the next.
MAX_CHUNK_LOGITS = 2**24


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

    Returns:
        (log_probs [T], entropy [T]), float32 (float64 for float64 inputs), natural logarithm, both
        differentiable. The gradient for `hidden` is this rank's share: the sum over `group` is the
        gradient.

    Raises:
        ValueError: shapes, dtypes or temperature do not fit.
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
    if group is not None and group.size() == 1:
        group = None
    if vocab_size is None:
        if group is not None:
            raise ValueError("vocab_size is required when the vocabulary is split over a group")
        vocab_size = vocab_start + weight.size(0)
    num_rows = min(max(vocab_size - vocab_start, 0), weight.size(0))
    scores: tuple[torch.Tensor, torch.Tensor] = _LinearLogProb.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, temperature, vocab_start, num_rows, group, with_entropy
    )
    return scores


def _chunk_size(vocab_tp: int) -> int:
    """Tokens per chunk: a multiple of 64, so that matrix products keep full tiles."""
    return max(64, MAX_CHUNK_LOGITS // max(vocab_tp, 1) // 64 * 64)


class _LinearLogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        vocab_start: int,
        num_rows: int,
        group: ProcessGroup | None,
        with_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        num_tokens = hidden.size(0)
        rows = weight[:num_rows]
        log_probs, entropy, lse = (
            torch.zeros(num_tokens, dtype=dtype, device=hidden.device) for _ in range(3)
        )
        logits_of = _Logits(hidden, rows, temperature, dtype, _chunk_size(weight.size(0)))
        # chunks follow V_tp, not num_rows: their number is the number of collectives on every rank
        for part in _chunks(num_tokens, weight.size(0)):
            z = logits_of(part)
            top = z.amax(-1) if num_rows else z.new_full((z.size(0),), -torch.inf)
            if group is not None:
                dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
            z.sub_(top[:, None])
            sums = z.new_zeros(3, z.size(0))  # sum exp, target logit, sum exp * logit
            at, mine = _local_targets(targets[part], vocab_start, num_rows)
            sums[1, mine] = z[mine, at[mine]]
            if with_entropy:
                weights = z.exp()
                sums[0] = weights.sum(-1)
                sums[2] = weights.mul_(z).sum(-1)
            else:
                sums[0] = z.exp_().sum(-1)
            if group is not None:
                dist.all_reduce(sums, group=group)
            log_sum = sums[0].log()
            lse[part] = top + log_sum
            log_probs[part] = sums[1] - log_sum
            if with_entropy:
                entropy[part] = log_sum - sums[2] / sums[0]
        ctx.save_for_backward(hidden, weight, targets, lse, entropy)
        ctx.temperature, ctx.vocab_start, ctx.num_rows = temperature, vocab_start, num_rows
        ctx.with_entropy = with_entropy
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, lse, entropy = ctx.saved_tensors
        rows = weight[: ctx.num_rows]
        grad_log_probs = (
            torch.zeros_like(lse) if grad_log_probs is None else grad_log_probs / ctx.temperature
        )
        # The entropy is mostly a metric. Its gradient costs two passes over the logits, so a zero
        # one, which is what stacking it with log_probs leaves, is worth looking for.
        has_entropy = ctx.with_entropy and grad_entropy is not None and bool(grad_entropy.any())
        slope = grad_entropy / ctx.temperature if has_entropy else None
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=lse.dtype, device=weight.device)
        logits_of = _Logits(hidden, rows, ctx.temperature, lse.dtype, _chunk_size(weight.size(0)))
        for part in _chunks(hidden.size(0), weight.size(0)):
            z = logits_of(part).sub_(lse[part, None])  # log p
            g = grad_log_probs[part, None]
            if slope is not None:
                s = slope[part, None]
                p = z.exp()
                dz = z.mul_(-s).sub_(g + s * entropy[part, None]).mul_(p)
            else:
                dz = z.exp_().mul_(-g)
            at, mine = _local_targets(targets[part], ctx.vocab_start, ctx.num_rows)
            dz[mine, at[mine]] += g[mine, 0]
            dz = dz.to(hidden.dtype)
            torch.mm(dz, rows, out=grad_hidden[part])
            if weight.dtype == lse.dtype:
                grad_weight[: ctx.num_rows].addmm_(dz.t(), hidden[part])
            else:  # chunks are summed in float32; each product is rounded to the narrow dtype once
                grad_weight[: ctx.num_rows] += dz.t() @ hidden[part]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None, None


class _Logits:
    """Logits of a chunk of tokens over this rank's rows, in one buffer where the dtype allows."""

    def __init__(
        self,
        hidden: torch.Tensor,
        rows: torch.Tensor,
        temperature: float,
        dtype: torch.dtype,
        size: int,
    ) -> None:
        self.hidden, self.rows, self.temperature, self.dtype = hidden, rows, temperature, dtype
        size = min(hidden.size(0), size)
        self.buffer = hidden.new_empty(size, rows.size(0)) if hidden.dtype == dtype else None

    def __call__(self, part: slice) -> torch.Tensor:
        """[tokens of `part`, num_rows] in `dtype`; valid until the next call. May be written to."""
        hidden = self.hidden[part]
        if self.buffer is None:
            z = (hidden @ self.rows.t()).to(self.dtype)
        else:
            z = torch.mm(hidden, self.rows.t(), out=self.buffer[: hidden.size(0)])
        return z if self.temperature == 1.0 else z.div_(self.temperature)


def _chunks(num_tokens: int, vocab_tp: int) -> list[slice]:
    step = _chunk_size(vocab_tp)
    return [slice(i, min(i + step, num_tokens)) for i in range(0, num_tokens, step)]


def _local_targets(
    targets: torch.Tensor, vocab_start: int, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Targets as local rows, and the indices [N] of the tokens whose target this rank holds."""
    at = targets - vocab_start
    return at, ((at >= 0) & (at < num_rows)).nonzero().squeeze(-1)
