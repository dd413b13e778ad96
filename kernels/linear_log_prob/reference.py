"""The slow truth for linear_log_prob: one process, all logits at once, torch's own autograd."""

from __future__ import annotations

import torch

__all__ = ["linear_log_prob_reference"]


def linear_log_prob_reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log softmax(hidden weight^T / temperature)[target] and the entropy of that distribution.

    Args:
        hidden: [T, H].
        weight: [V_padded, H]; rows from vocab_size on do not exist.
        targets: [T] int64 in [0, vocab_size).
        temperature: > 0.
        vocab_size: V; None: all rows.

    Returns:
        (log_probs [T], entropy [T]) in the dtype of the inputs, at least float32.
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    logits = (hidden @ weight[:vocab_size].t()).to(dtype) / temperature
    log_probs = torch.log_softmax(logits, dim=-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return log_probs.gather(-1, targets[:, None]).squeeze(-1), entropy
