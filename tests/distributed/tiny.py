"""Tiny random models of every family, packed batches, and Hugging Face as the independent truth."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from distributed.pool import groups_of

from megarl.config.schema import ModelConfig, OptimConfig
from megarl.models import MegatronModel
from megarl.types import TokenScores, TrainBatch

__all__ = [
    "FAMILIES",
    "VOCAB",
    "frozen",
    "hf_scores",
    "loss_fn",
    "make_batch",
    "make_batches",
    "make_model",
    "trainable",
]

VOCAB = 131  # odd: tp=2 pads it
FAMILIES = ("llama", "qwen2", "qwen3")


def make_model(
    folder: Path, family: str, *, tied: bool, num_layers: int = 3, seed: int = 0, **options: object
) -> str:
    """Write a random model of 4 query and 2 KV heads; returns the folder."""
    import transformers

    config_class = {
        "llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
    }[family]  # fmt: skip
    if family == "qwen3":
        options.setdefault("head_dim", 12)  # not hidden / heads
    config = config_class(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=num_layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        rms_norm_eps=1e-6, tie_word_embeddings=tied, **options,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # norms start at 1 and biases at 0, where mistakes are invisible
            if parameter.dim() == 1:
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
            else:
                parameter.normal_(0.0, 0.15)
    model.save_pretrained(folder)
    return str(folder)


def make_batch(lengths: list[int], *, seed: int, multiple: int = 1) -> TrainBatch:
    """A packed micro-batch of random tokens, padded to a multiple by a segment of its own."""
    generator = torch.Generator().manual_seed(seed)
    pad = -sum(lengths) % multiple
    ids = torch.randint(VOCAB, (sum(lengths),), generator=generator)
    mask = (torch.rand(sum(lengths), generator=generator) < 0.7).float()
    every = lengths + ([pad] if pad else [])
    return TrainBatch(
        input_ids=torch.cat([ids, torch.zeros(pad, dtype=torch.int64)]),
        position_ids=torch.cat([torch.arange(n) for n in every]),
        cu_seqlens=torch.tensor([0, *every]).cumsum(0).to(torch.int32),
        response_mask=torch.cat([mask, torch.zeros(pad)]),
        sample_index=torch.tensor([*range(len(lengths)), *([-1] if pad else [])]),
    )


def make_batches(*, multiple: int = 1) -> list[TrainBatch]:
    """Four micro-batches of different length; the second needs padding for multiple=2."""
    lengths = [[5, 11, 8], [16, 3], [3, 9, 1, 5], [12]]
    return [make_batch(x, seed=i, multiple=multiple) for i, x in enumerate(lengths)]


def loss_fn(scores: TokenScores, batch: TrainBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Masked sum of log-probs and entropy, divided by a constant: nothing depends on the split."""
    tokens = -scores.log_probs - 0.1 * scores.entropy
    loss = (tokens * batch.response_mask).sum() / 60
    return loss, {"loss": loss.reshape(1), "num": batch.response_mask.sum().reshape(1)}


def hf_scores(model: torch.nn.Module, batch: TrainBatch, temperature: float) -> TokenScores:
    """The same scores by Hugging Face, one sequence at a time, differentiable."""
    log_probs, entropy = [], []
    bounds = batch.cu_seqlens.tolist()
    for start, stop in pairwise(bounds):
        ids = batch.input_ids[start:stop]
        every = (model(ids[None]).logits[0].float() / temperature).log_softmax(-1)[:-1]
        first = torch.zeros(1)
        log_probs.append(torch.cat([first, every.gather(-1, ids[1:, None])[:, 0]]))
        entropy.append(torch.cat([first, -(every.exp() * every).sum(-1)]))
    return TokenScores(log_probs=torch.cat(log_probs), entropy=torch.cat(entropy))


def frozen(path: str, layout: dict[str, Any] | None = None, **options: Any) -> MegatronModel:
    """A model without gradients in a layout given as axis sizes; `options` go to ModelConfig."""
    return MegatronModel.build(
        ModelConfig(path=path, **options),
        groups_of(**(layout or {})),
        device=torch.device("cpu"),
        trainable=None,
    )


def trainable(
    path: str, layout: dict[str, Any] | None = None, *, lr: float = 1e-3, **options: Any
) -> MegatronModel:
    """The same with an optimizer."""
    return MegatronModel.build(
        ModelConfig(path=path, **options), groups_of(**(layout or {})), device=torch.device("cpu"),
        trainable=OptimConfig(lr=lr), num_steps=10,
    )  # fmt: skip
