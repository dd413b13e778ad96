"""Tiny random models of each supported family, and the independent truth: Hugging Face, teacher-
forced.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from megarl.rollout import RolloutEngine
from megarl.types import WeightLayout

VOCAB, EOS = 200, 7  # not a multiple of 64: SGLang pads
_FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def build(folder: Path, family: str, *, seed: int, is_tied: bool = False, **changes: Any) -> str:
    """Write a float32 model of two layers to `folder` and return its path."""
    config_class, model_class = _FAMILIES[family]
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 512, "tie_word_embeddings": is_tied, "eos_token_id": EOS,
        "bos_token_id": None, "pad_token_id": None, "initializer_range": 0.2,
    }  # fmt: skip
    model = model_class(config_class(**{**settings, **changes})).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases and norms that are not zeros and ones
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return str(folder)


def load(path: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.no_grad()
def true_log_probs(
    model: torch.nn.Module, prompt_ids: list[int], response_ids: list[int], temperature: float
) -> list[float]:
    """log p(response[i] | earlier) at `temperature` from one pass over the whole sequence."""
    logits = model(torch.tensor([prompt_ids + response_ids])).logits[0].double() / temperature
    table = logits.log_softmax(-1)
    first = len(prompt_ids) - 1
    return [float(table[first + i, token]) for i, token in enumerate(response_ids)]


@torch.no_grad()
def greedy(model: torch.nn.Module, prompt_ids: list[int], max_new_tokens: int) -> list[int]:
    """The likeliest continuation, without a KV cache, up to the end-of-sequence id (included)."""
    ids = list(prompt_ids)
    while len(ids) < len(prompt_ids) + max_new_tokens:
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == EOS:
            break
    return ids[len(prompt_ids) :]


def prompts(count: int, *, seed: int = 0, longest: int = 40) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator)
    return [torch.randint(0, VOCAB, (int(n),), generator=generator).tolist() for n in lengths]


def shard(
    layout: WeightLayout, path: str, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """The local parameters `layout` asks for, cut from the model at `path`; padding is zero."""
    canonical = load(path).state_dict()
    local = {name: torch.zeros(shape, dtype=dtype) for name, shape in layout.parameters.items()}
    for p in layout.placements:
        local[p.parameter][p.target.slices] = canonical[p.canonical][p.source.slices].to(dtype)
    return local


def push(
    engine: RolloutEngine, path: str, *, version: int, tp: int = 1
) -> list[dict[str, torch.Tensor]]:
    """Give the engine the weights of the model at `path`, in two windows; returns the shards."""
    shards = [shard(engine.weight_layout(rank), path) for rank in range(tp)]
    engine.begin_update()
    for window in (0, 1):
        engine.update_weights(
            [{n: t for i, (n, t) in enumerate(s.items()) if i % 2 == window} for s in shards]
        )
    engine.end_update(version)
    return shards
