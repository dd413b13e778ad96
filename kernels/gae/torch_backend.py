"""gae in plain torch: log2(longest sequence) doubling steps over all sequences at once."""

from __future__ import annotations

import torch

__all__ = ["gae_torch"]


def gae_torch(
    rewards: torch.Tensor,  # [T]
    values: torch.Tensor | None,  # [T]; None: zeros
    cu_seqlens: torch.Tensor,  # [S + 1] int32
    mask: torch.Tensor | None,  # [T] bool
    bootstrap: torch.Tensor | None,  # [S]
    gamma: float,
    lam: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages [T], returns [T]) in `dtype`.

    Masked tokens are dropped: what remains is A_t = delta_t + decay_t A_{t+1}, decay 0 at the last
    token of a sequence. After the step of width w, each element spans 2 w tokens.
    """
    num_tokens = rewards.numel()
    lengths = cu_seqlens.long().diff()
    sequence = torch.repeat_interleave(
        torch.arange(lengths.numel(), device=rewards.device), lengths, output_size=num_tokens
    )
    at = None if mask is None else mask.nonzero().squeeze(1)
    r = rewards.to(dtype)
    v = torch.zeros_like(r) if values is None else values.to(dtype)
    if at is not None:
        sequence, r, v = sequence[at], r[at], v[at]
    is_last = torch.ones_like(sequence, dtype=torch.bool)
    is_last[:-1] = sequence[1:] != sequence[:-1]
    end_value = r.new_zeros(()) if bootstrap is None else bootstrap.to(dtype)[sequence]
    next_value = torch.where(is_last, end_value, torch.cat([v[1:], v[:1]]))
    advantages = r + gamma * next_value - v
    decay = torch.where(is_last, 0.0, torch.full_like(r, gamma * lam))
    longest = int(lengths.max()) if lengths.numel() else 0
    width = 1
    while width < min(longest, r.numel()):
        advantages[:-width] += decay[:-width] * advantages[width:]
        decay[:-width] = decay[:-width] * decay[width:]
        width *= 2
    returns = advantages + v
    if at is None:
        return advantages, returns
    full = [torch.zeros(num_tokens, dtype=dtype, device=rewards.device) for _ in range(2)]
    return full[0].index_copy_(0, at, advantages), full[1].index_copy_(0, at, returns)
