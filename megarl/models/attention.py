"""Core attention over packed sequences, causal within each segment; one module on both devices."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

try:  # optional, CUDA only; without it each segment is one SDPA call
    from flash_attn import flash_attn_varlen_func
except ImportError:
    flash_attn_varlen_func = None

__all__ = ["PackedAttention"]


class PackedAttention(MegatronModule):  # type: ignore[misc]  # untyped base
    """softmax(q k^T * scale) v within each packed sequence. Never builds a [T, T] mask."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: object,
    ) -> None:
        super().__init__(config)
        assert pg_collection is not None, "process groups are always passed explicitly"
        if pg_collection.cp.size() > 1:
            raise NotImplementedError(
                "packed attention has no context parallelism; use parallel.cp=1"
            )
        self.tp_group = pg_collection.tp  # read by MegatronModule.sharded_state_dict
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Attend within segments.

        Args:
            query: [T, heads of this tp rank, head_dim].
            key, value: [T, KV heads of this tp rank, head_dim].
            attention_mask, attn_mask_type, attention_bias: unused, part of megatron's interface.
            packed_seq_params: cu_seqlens_q [S+1] int32 that ends at T; required.

        Returns:
            [T, heads * head_dim], dtype of query.
        """
        assert packed_seq_params is not None, "only packed batches are implemented"
        cu_seqlens = packed_seq_params.cu_seqlens_q
        if query.is_cuda and flash_attn_varlen_func is not None:
            longest = packed_seq_params.max_seqlen_q
            out = flash_attn_varlen_func(
                query, key, value, cu_seqlens, cu_seqlens, longest, longest,
                softmax_scale=self.scale, causal=True,
            )  # fmt: skip
            return torch.flatten(out, 1)
        bounds = cu_seqlens.tolist()
        lengths = [b - a for a, b in pairwise(bounds)]
        parts = [
            self._attend(q, k, v)
            for q, k, v in zip(*(torch.split(x, lengths) for x in (query, key, value)), strict=True)
        ]
        return torch.cat(parts)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Causal attention of one sequence: [L, heads, head_dim] -> [L, heads * head_dim]."""
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.scale, enable_gqa=q.size(1) != k.size(1)
        )
        return out.squeeze(0).transpose(0, 1).flatten(1)
