"""The tensors of a Hugging Face checkpoint and how either side cuts them, from config.json alone.

Merge candidate: megarl.models.families and megarl.rollout.sglang_layout say the same tensor by
tensor for the dense families (their packages import torch); a test holds the three equal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from megarl.config.errors import ConfigError, require
from megarl.reshard.plan.rect import Rect

__all__ = ["ARCHITECTURES", "Cut", "ModelShape", "TensorKind", "model_shape", "read_config"]

ARCHITECTURES = (
    "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM",
    "DeepseekV3ForCausalLM",
)  # fmt: skip
ENGINE_VOCAB_MULTIPLE = 64  # SGLang's padding


class Cut(Enum):
    """How a tensor is cut over tp (experts: etp)."""

    NONE = "every rank holds all of it"
    ROWS = "equal rows"
    COLUMNS = "equal columns"
    VOCAB = "rows, after padding their number"
    QUERY = "query heads"
    KEY = "key heads, first of two like it in Megatron's fused rows"
    VALUE = "value heads"


@dataclass(frozen=True)
class TensorKind:
    """Tensors that differ only in layer and expert."""

    name: str
    rows: int
    columns: int
    cut: Cut
    place: str = "layer"  # "first", "last", "ends" (tied: both), "layer" or "expert"
    layers: range = range(0)

    @property
    def num_elements(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    num_layers: int
    num_heads: int
    num_kv_heads: int  # with latent attention: num_heads
    head_dim: int
    num_experts: int
    kinds: tuple[TensorKind, ...]

    def num_tensors(self, kind: TensorKind) -> int:
        return (len(kind.layers) or 1) * (self.num_experts if kind.place == "expert" else 1)

    @property
    def num_elements(self) -> int:
        return sum(k.num_elements * self.num_tensors(k) for k in self.kinds)

    def rects(self, kind: TensorKind, side: str, size: int) -> list[Rect | None]:
        """Per tp (etp) index of `size`: the rectangle of `kind` it holds, None: only padding."""
        whole = Rect(0, kind.rows, 0, kind.columns)
        if kind.cut is Cut.NONE:
            return [whole] * size
        if kind.cut is Cut.COLUMNS:
            width = self._divide(kind, side, size, kind.columns)
            return [Rect(0, kind.rows, i * width, (i + 1) * width) for i in range(size)]
        spans = [self._rows(kind, side, size, i) for i in range(size)]
        return [Rect(a, b, 0, kind.columns) if a < b else None for a, b in spans]

    def _rows(self, kind: TensorKind, side: str, size: int, index: int) -> tuple[int, int]:
        if kind.cut is Cut.VOCAB:
            height = _padded_vocab(kind.rows, side, size) // size
            return min(index * height, kind.rows), min((index + 1) * height, kind.rows)
        if kind.cut in (Cut.QUERY, Cut.KEY, Cut.VALUE):
            if side == "train":
                return self._fused_rows(kind, size, index)
            kv = self.num_kv_heads
            if kind.cut is not Cut.QUERY and size > kv:  # several ranks repeat a head
                require(
                    size % kv == 0, "rollout.tp", size,
                    f"is not a multiple of num_key_value_heads={kv}", "use a multiple or a divisor",
                )  # fmt: skip
                head = index * kv // size
                return head * self.head_dim, (head + 1) * self.head_dim
            heads = self._divide(kind, side, size, kind.rows // self.head_dim)
            return index * heads * self.head_dim, (index + 1) * heads * self.head_dim
        height = self._divide(kind, side, size, kind.rows)
        return index * height, (index + 1) * height

    def _fused_rows(self, kind: TensorKind, size: int, index: int) -> tuple[int, int]:
        """Rows of q, k or v in slice `index` of Megatron's fused weight: per KV group q..q k v."""
        per_group = self.num_heads // self.num_kv_heads * self.head_dim
        group = per_group + 2 * self.head_dim
        height = self._divide(kind, "train", size, group * self.num_kv_heads)
        first, length = {
            Cut.QUERY: (0, per_group),
            Cut.KEY: (per_group, self.head_dim),
            Cut.VALUE: (per_group + self.head_dim, self.head_dim),
        }[kind.cut]

        def rows_before(fused: int) -> int:
            whole, rest = divmod(fused, group)
            return whole * length + min(max(rest - first, 0), length)

        return rows_before(index * height), rows_before((index + 1) * height)

    def _divide(self, kind: TensorKind, side: str, size: int, length: int) -> int:
        key = f"{side}.{'etp' if kind.place == 'expert' else 'tp'}"
        require(
            length % size == 0, key, size, f"does not divide {length} of {kind.name}",
            f"use a divisor of {length}",
        )  # fmt: skip
        return length // size


def _padded_vocab(vocab: int, side: str, size: int) -> int:
    if side == "train":
        return -(-vocab // size) * size
    padded = -(-vocab // ENGINE_VOCAB_MULTIPLE) * ENGINE_VOCAB_MULTIPLE
    unit = ENGINE_VOCAB_MULTIPLE * size
    return padded if padded % size == 0 else -(-vocab // unit) * unit


def read_config(path: str) -> dict[str, Any]:
    """Content of a config.json, given itself or its folder. Raises ConfigError."""
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    remedy = "give a Hugging Face folder or its config.json"
    require(file.is_file(), "--model", path, "has no config.json", remedy)
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model={path!r} is not readable JSON: {error}; {remedy}") from None
    require(isinstance(config, dict), "--model", path, "is not a JSON object", remedy)
    return dict(config)


class _Config:
    """config.json with complaints that name the key."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def size(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        require(
            type(value) is int and value > 0, f"config.json {key}", value,
            "is not a positive integer", "give the model's own config.json",
        )  # fmt: skip
        assert isinstance(value, int)
        return value

    def flag(self, key: str) -> bool:
        return bool(self.values.get(key, False))


def model_shape(hf_config: Mapping[str, Any]) -> ModelShape:
    """Tensors of the model of a config.json. DeepSeek's multi-token-prediction layers are left out.

    Raises:
        ConfigError: unknown architecture, or an option whose tensors are not described.
    """
    names = hf_config.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else names
    require(
        name in ARCHITECTURES, "config.json architectures", names, "is not supported",
        f"use one of {', '.join(ARCHITECTURES)}",
    )  # fmt: skip
    for key in ("attention_bias", "mlp_bias", "quantization_config"):
        require(
            not hf_config.get(key), f"config.json {key}", hf_config.get(key),
            "is not described", f"use a model without {key}",
        )  # fmt: skip
    config = _Config(hf_config)
    layers, heads = config.size("num_hidden_layers"), config.size("num_attention_heads")
    hidden, vocab = config.size("hidden_size"), config.size("vocab_size")
    if name == "DeepseekV3ForCausalLM":
        kv_heads, head_dim = (
            heads,
            config.size("qk_nope_head_dim") + config.size("qk_rope_head_dim"),
        )
        attention = _latent_attention(config, hidden, heads)
    else:
        kv_heads = config.size("num_key_value_heads", heads)
        head_dim = config.size("head_dim", hidden // heads)
        attention = _grouped_attention(
            hidden, heads * head_dim, kv_heads * head_dim, head_dim,
            has_bias=name == "Qwen2ForCausalLM", has_norm=str(name).startswith("Qwen3"),
        )  # fmt: skip
    require(
        heads % kv_heads == 0, "config.json num_key_value_heads", kv_heads,
        f"does not divide num_attention_heads={heads}", "give the model's own config.json",
    )  # fmt: skip
    every = range(layers)
    tied = config.flag("tie_word_embeddings")
    kinds = [
        TensorKind(
            "model.embed_tokens.weight", vocab, hidden, Cut.VOCAB, "ends" if tied else "first"
        )
    ]
    kinds += [_in_layer(every, *a) for a in attention]
    kinds += [
        _in_layer(every, f"{n}.weight", hidden, 1, Cut.NONE)
        for n in ("input_layernorm", "post_attention_layernorm")
    ]
    mlp, num_experts = _mlp(config, str(name), hidden, layers)
    kinds += mlp
    kinds.append(TensorKind("model.norm.weight", hidden, 1, Cut.NONE, "last"))
    if not tied:
        kinds.append(TensorKind("lm_head.weight", vocab, hidden, Cut.VOCAB, "last"))
    return ModelShape(
        num_layers=layers, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim,
        num_experts=num_experts, kinds=tuple(kinds),
    )  # fmt: skip


def _in_layer(layers: range, name: str, rows: int, columns: int, cut: Cut) -> TensorKind:
    place = "expert" if "{expert}" in name else "layer"
    return TensorKind(f"model.layers.{{layer}}.{name}", rows, columns, cut, place, layers)


Row = tuple[str, int, int, Cut]


def _grouped_attention(
    hidden: int, q: int, kv: int, head_dim: int, *, has_bias: bool, has_norm: bool
) -> list[Row]:
    parts = (("q", q, Cut.QUERY), ("k", kv, Cut.KEY), ("v", kv, Cut.VALUE))
    out = [(f"self_attn.{x}_proj.weight", rows, hidden, cut) for x, rows, cut in parts]
    out.append(("self_attn.o_proj.weight", hidden, q, Cut.COLUMNS))
    if has_bias:
        out += [(f"self_attn.{x}_proj.bias", rows, 1, cut) for x, rows, cut in parts]
    if has_norm:
        out += [(f"self_attn.{x}_norm.weight", head_dim, 1, Cut.NONE) for x in ("q", "k")]
    return out


def _latent_attention(config: _Config, hidden: int, heads: int) -> list[Row]:
    """DeepSeek's latent attention as plain tensors: the down projections are on every rank."""
    q_rank, kv_rank = config.size("q_lora_rank"), config.size("kv_lora_rank")
    nope, rope = config.size("qk_nope_head_dim"), config.size("qk_rope_head_dim")
    value = config.size("v_head_dim")
    return [
        ("self_attn.q_a_proj.weight", q_rank, hidden, Cut.NONE),
        ("self_attn.q_a_layernorm.weight", q_rank, 1, Cut.NONE),
        ("self_attn.q_b_proj.weight", heads * (nope + rope), q_rank, Cut.ROWS),
        ("self_attn.kv_a_proj_with_mqa.weight", kv_rank + rope, hidden, Cut.NONE),
        ("self_attn.kv_a_layernorm.weight", kv_rank, 1, Cut.NONE),
        ("self_attn.kv_b_proj.weight", heads * (nope + value), kv_rank, Cut.ROWS),
        ("self_attn.o_proj.weight", hidden, heads * value, Cut.COLUMNS),
    ]


def _gated(prefix: str, hidden: int, width: int) -> list[Row]:
    return [
        (f"{prefix}.gate_proj.weight", width, hidden, Cut.ROWS),
        (f"{prefix}.up_proj.weight", width, hidden, Cut.ROWS),
        (f"{prefix}.down_proj.weight", hidden, width, Cut.COLUMNS),
    ]


def _mlp(config: _Config, name: str, hidden: int, layers: int) -> tuple[list[TensorKind], int]:
    """Kinds of the MLPs, dense and sparse, and the number of experts (0: dense)."""
    is_deepseek = name == "DeepseekV3ForCausalLM"
    if not is_deepseek and name != "Qwen3MoeForCausalLM":
        dense = _gated("mlp", hidden, config.size("intermediate_size"))
        return [_in_layer(range(layers), *k) for k in dense], 0
    if is_deepseek:
        experts, num_dense = config.size("n_routed_experts"), config.size("first_k_dense_replace")
    else:
        experts, num_dense = config.size("num_experts"), 0
        for key, plain in (("decoder_sparse_step", 1), ("mlp_only_layers", [])):
            value = config.values.get(key, plain)
            require(
                value == plain, f"config.json {key}", value, "is not described",
                f"use a model with {key}={plain}",
            )  # fmt: skip
    width, sparse = config.size("moe_intermediate_size"), range(num_dense, layers)
    rows = [("mlp.gate.weight", experts, hidden, Cut.NONE)]
    if is_deepseek:
        rows.append(("mlp.gate.e_score_correction_bias", experts, 1, Cut.NONE))
        shared = config.size("n_shared_experts", 1) * width
        rows += _gated("mlp.shared_experts", hidden, shared)
    rows += _gated("mlp.experts.{expert}", hidden, width)
    kinds = [_in_layer(sparse, *k) for k in rows]
    if num_dense:
        dense = _gated("mlp", hidden, config.size("intermediate_size"))
        kinds += [_in_layer(range(num_dense), *k) for k in dense]
    return kinds, experts
