"""The specification of log_prob_from_logits: one process, torch's own softmax and autograd."""

from __future__ import annotations

import torch

__all__ = ["log_prob_from_logits_reference"]


def log_prob_from_logits_reference(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log softmax(logits / temperature)[target] and the entropy of that distribution.

    Args:
        logits: [T, V_padded]; columns from vocab_size on do not exist. -inf: probability 0.
        targets: [T] int64 in [0, vocab_size).
        temperature: > 0.
        vocab_size: V; None: all columns.

    Returns:
        (log_probs [T], entropy [T]) in the dtype of the logits, at least float32.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    scaled = torch.log_softmax(logits[:, :vocab_size].to(dtype) / temperature, dim=-1)
    entropy = -(scaled.exp() * scaled.clamp(min=-1e30)).sum(-1)  # 0 * -inf is 0
    return scaled.gather(-1, targets[:, None]).squeeze(-1), entropy
