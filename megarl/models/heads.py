"""Output heads: GPTModel's output layer changes class, so that no logits are made.

Hidden states reach a fused operator instead. The swapped layer keeps parameter, name and weight
tying; GPTModel itself is untouched.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megarl_kernels import linear_log_prob
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

__all__ = ["HeadRequest", "LogProbHead", "install_log_prob_head"]


@dataclass(frozen=True, kw_only=True)
class HeadRequest:
    """What the next forward pass computes."""

    targets: torch.Tensor  # [T] int64, the token each position predicts
    positions: torch.Tensor | None  # [N] int64, positions to score; None: all. Others get 0
    temperature: float
    with_entropy: bool


class LogProbHead(ColumnParallelLinear):  # type: ignore[misc]  # untyped base
    """[T, 1, H] hidden states -> [T, 1, 2] float32: log-prob of the target, entropy."""

    vocab_size: int  # without padding
    request: HeadRequest | None = None  # set before each forward pass

    def forward(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[torch.Tensor, None]:
        """Score `request.targets`.

        Args:
            input_: [T, 1, H]; [T / tp, 1, H] under sequence parallelism.
            weight: the embedding [V_tp, H] when tied on one stage; None: the layer's own weight.

        Returns:
            ([T, 1, 2], None), the same on every tp rank.
        """
        assert self.request is not None, "set .request before the forward pass"
        # The operator returns this tp rank's share of the hidden states' gradient; both mappings
        # sum the shares in their backward pass, by reduce-scatter and by all-reduce.
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                input_, tensor_parallel_output_grad=True, group=self.tp_group
            )
        else:
            hidden = copy_to_tensor_model_parallel_region(input_, group=self.tp_group)
        rows = self.weight if weight is None else weight
        targets, positions = self.request.targets, self.request.positions
        hidden = hidden.flatten(0, 1)
        num_tokens = hidden.size(0)
        if positions is not None:  # prompts can be most of the tokens
            hidden, targets = hidden[positions], targets[positions]
        scores = linear_log_prob(
            hidden, rows, targets,
            temperature=self.request.temperature, with_entropy=self.request.with_entropy,
            vocab_start=self.tp_group.rank() * rows.size(0), vocab_size=self.vocab_size,
            group=self.tp_group,
        )  # fmt: skip
        stacked = torch.stack(scores, dim=-1)
        if positions is not None:
            stacked = stacked.new_zeros(num_tokens, 2).index_copy(0, positions, stacked)
        return stacked.unsqueeze(1), None


def install_log_prob_head(model: GPTModel, vocab_size: int) -> LogProbHead | None:
    """Turn the output layer of the last stage into a LogProbHead; None on other stages."""
    if not model.post_process:
        return None
    head: LogProbHead = model.output_layer
    head.__class__ = LogProbHead
    head.vocab_size = vocab_size
    return head
