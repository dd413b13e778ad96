"""RMSNorm in megatron's calling convention, the same module on CPU and GPU."""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = ["RMSNorm"]


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm whose weight says that its gradient is partial under sequence parallelism.

    Under sequence parallelism a tp rank sees T / tp tokens, so finalize_model_grads must sum the
    weight's gradient over tp; it does so for parameters with `sequence_parallel` set. megatron's
    own torch norm refuses sequence parallelism.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
