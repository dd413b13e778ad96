"""Carriers of the data path: Prompt -> Sample -> SampleGroup -> TrainBatch.

Each field says its shape, its unit and which stage fills it. One layout between stages: packed
tokens [T] with cu_seqlens [S+1]. Per-token tensors sit on the token they score:
`log_probs[t] = log p(input_ids[t] | earlier tokens of its sequence)`, 0 on the first token of a
sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch

__all__ = ["FinishReason", "Prompt", "Sample", "SampleGroup", "TokenScores", "TrainBatch"]

FinishReason = Literal["stop", "length", "abort"]


@dataclass(kw_only=True)
class Prompt:
    """One row of a prompt file, tokenised. Filled by `data`."""

    row: int  # row index in the data set: a prompt's identity (two rows may have equal text)
    prompt_ids: list[int]
    messages: list[dict[str, str]]  # the chat as read, for dumps and for rewards that look at it
    data_source: str
    ground_truth: str
    extra_info: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Sample:
    """One response to one prompt. Filled by `rollout`, then `rewards`, then the trainer."""

    group: int  # position of the prompt in this step's batch: samples of one prompt share it
    index: int  # 0 .. num_samples-1 within the group
    prompt_ids: list[int]
    response_ids: list[
        int
    ]  # exactly the engine's ids, stop token included; never decoded and re-encoded
    rollout_log_probs: list[float]  # one per response id, natural log, at the sampling temperature
    finish_reason: FinishReason
    weight_version: int  # version of the weights that produced it
    reward: float = 0.0  # rewards: what the algorithm optimises
    accuracy: float = 0.0  # rewards: 1.0 if the answer is right, whatever the reward's shape
    parsed: str | None = None  # rewards: the answer read from the text, None if none was found
    text: str = ""  # decoded response, for rewards and dumps only

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(kw_only=True)
class SampleGroup:
    """All samples of one prompt, in order of `index`."""

    prompt: Prompt
    samples: list[Sample]


@dataclass(kw_only=True)
class TokenScores:
    """What the model says about the tokens of one TrainBatch.

    Filled by models; the same on all ranks of tp and pp.
    """

    log_probs: torch.Tensor  # [T] float32, 0 on the first token of each sequence and on padding
    entropy: torch.Tensor  # [T] float32, of the distribution input_ids[t] came from; 0 likewise


@dataclass(kw_only=True)
class TrainBatch:
    """One packed micro-batch. `data.packing` fills the first block, the trainer the second.

    T tokens, S sequences. A tail that makes T divisible (sequence parallelism) is a sequence of its
    own with `sample_index` -1 and response_mask 0.
    """

    input_ids: torch.Tensor  # [T] int64
    position_ids: torch.Tensor  # [T] int64, restarts at 0 in each sequence
    cu_seqlens: torch.Tensor  # [S+1] int32, cu_seqlens[0] = 0, cu_seqlens[S] = T
    response_mask: torch.Tensor  # [T] float32, 1 on trained tokens
    sample_index: torch.Tensor  # [S] int64, position in the step's list of samples; -1 for padding

    rollout_log_probs: torch.Tensor | None = None  # [T] float32, from the engine
    advantages: torch.Tensor | None = None  # [T] float32, 0 where response_mask is 0
    old_log_probs: torch.Tensor | None = None  # [T] float32, actor before this step's first update
    ref_log_probs: torch.Tensor | None = None  # [T] float32, frozen reference

    @property
    def num_tokens(self) -> int:
        return int(self.input_ids.numel())

    @property
    def num_sequences(self) -> int:
        """Sequences, the padding one included."""
        return int(self.cu_seqlens.numel()) - 1

    @property
    def max_seqlen(self) -> int:
        return int((self.cu_seqlens[1:] - self.cu_seqlens[:-1]).max())

    def to(self, device: torch.device) -> TrainBatch:
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        return TrainBatch(
            **{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in moved.items()}
        )
