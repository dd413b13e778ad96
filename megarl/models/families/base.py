"""Model families as data: what a Hugging Face config.json means for megatron's GPTModel.

A family is a `Family` record. `model_spec` reads a config.json into a `ModelSpec` and refuses every
option that would silently change the numbers; `TensorRule`s say which Hugging Face tensors make up
which megatron parameter and how it is split over tensor-parallel ranks. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from megarl.config.errors import ConfigError, require

__all__ = ["Family", "ModelSpec", "Source", "Split", "TensorRule", "read_spec"]


class Split(Enum):
    """How a megatron parameter is made of its sources and cut into tp shards."""

    VOCAB = "rows cut over tp after padding their number to a multiple of tp"
    STACKED = "each source's rows cut over tp, then the sources' shares stacked (gate, up)"
    ROW = "columns cut over tp"
    QKV = "per KV group: its query heads, its key head, its value head; groups cut over tp"
    REPLICATED = "the same on every tp rank"


@dataclass(frozen=True)
class Source:
    """A Hugging Face tensor; `{layer}` in the name is the layer's number in the model."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TensorRule:
    """A megatron parameter; `{layer}` in the name is the layer's number on its pipeline stage."""

    parameter: str
    split: Split
    sources: tuple[Source, ...]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture: what its config.json leaves unsaid, and options with one valid value."""

    architecture: str  # config.json "architectures"[0]
    qkv_bias: bool = False
    qk_norm: bool = False  # RMSNorm over head_dim of queries and keys, before RoPE
    # config.json key -> the only value implemented; an absent key is fine
    fixed: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The numbers of one decoder-only model (RMSNorm, SwiGLU, RoPE, grouped-query attention)."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    rope_llama3_factor: float | None  # None: plain RoPE
    is_tied: bool  # output layer = embedding
    qkv_bias: bool
    qk_norm: bool

    def transformer_kwargs(self) -> dict[str, Any]:
        """The part of megatron's TransformerConfig that the checkpoint determines."""
        return {
            "num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "num_attention_heads": self.num_heads,
            "num_query_groups": self.num_kv_heads,
            "kv_channels": self.head_dim,
            "ffn_hidden_size": self.ffn_size,
            "layernorm_epsilon": self.norm_eps,
            "add_qkv_bias": self.qkv_bias,
            "qk_layernorm": self.qk_norm,
            "normalization": "RMSNorm",
            "gated_linear_unit": True,
            "add_bias_linear": False,
        }

    def first_rules(self) -> list[TensorRule]:
        """Parameters of the first pipeline stage besides its layers."""
        return [TensorRule("embedding.word_embeddings.weight", Split.VOCAB, (self._embedding,))]

    def last_rules(self, *, is_first_stage: bool) -> list[TensorRule]:
        """Parameters of the last stage; a tied output layer exists only away from the embedding."""
        norm = Source("model.norm.weight", (self.hidden_size,))
        rules = [TensorRule("decoder.final_layernorm.weight", Split.REPLICATED, (norm,))]
        if not (self.is_tied and is_first_stage):
            head = Source("lm_head.weight", (self.vocab_size, self.hidden_size))
            source = self._embedding if self.is_tied else head
            rules.append(TensorRule("output_layer.weight", Split.VOCAB, (source,)))
        return rules

    def layer_rules(self) -> list[TensorRule]:
        """Parameters of one layer, under the names of megatron's local layer spec."""
        hidden, ffn, head = self.hidden_size, self.ffn_size, self.head_dim
        q, kv = self.num_heads * head, self.num_kv_heads * head

        def rule(parameter: str, split: Split, *sources: tuple[str, tuple[int, ...]]) -> TensorRule:
            named = tuple(
                Source(f"model.layers.{{layer}}.{name}", shape) for name, shape in sources
            )
            return TensorRule(f"decoder.layers.{{layer}}.{parameter}", split, named)

        rules = [
            rule("input_layernorm.weight", Split.REPLICATED, ("input_layernorm.weight", (hidden,))),
            rule(
                "self_attention.linear_proj.weight", Split.ROW,
                ("self_attn.o_proj.weight", (hidden, q)),
            ),
            rule(
                "self_attention.linear_qkv.weight", Split.QKV,
                ("self_attn.q_proj.weight", (q, hidden)),
                ("self_attn.k_proj.weight", (kv, hidden)),
                ("self_attn.v_proj.weight", (kv, hidden)),
            ),
            rule(
                "pre_mlp_layernorm.weight", Split.REPLICATED,
                ("post_attention_layernorm.weight", (hidden,)),
            ),
            rule(
                "mlp.linear_fc1.weight", Split.STACKED,
                ("mlp.gate_proj.weight", (ffn, hidden)), ("mlp.up_proj.weight", (ffn, hidden)),
            ),
            rule("mlp.linear_fc2.weight", Split.ROW, ("mlp.down_proj.weight", (hidden, ffn))),
        ]  # fmt: skip
        if self.qkv_bias:
            biases = (("q", q), ("k", kv), ("v", kv))
            sources = [(f"self_attn.{x}_proj.bias", (size,)) for x, size in biases]
            rules.append(rule("self_attention.linear_qkv.bias", Split.QKV, *sources))
        if self.qk_norm:
            for x in ("q", "k"):
                source = (f"self_attn.{x}_norm.weight", (head,))
                rules.append(rule(f"self_attention.{x}_layernorm.weight", Split.REPLICATED, source))
        return rules

    def canonical_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the Hugging Face checkpoint, in file order."""
        sources = [s for r in self.first_rules() for s in r.sources]
        for layer in range(self.num_layers):
            for rule in self.layer_rules():
                sources += [Source(s.name.format(layer=layer), s.shape) for s in rule.sources]
        sources += [s for r in self.last_rules(is_first_stage=False) for s in r.sources]
        return {s.name: s.shape for s in sources}

    @property
    def _embedding(self) -> Source:
        return Source("model.embed_tokens.weight", (self.vocab_size, self.hidden_size))


COMMON_FIXED: Mapping[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "attention_dropout": 0.0,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read_spec(family: Family, hf_config: Mapping[str, Any]) -> ModelSpec:
    """Read a config.json of `family`. Raises ConfigError for an option that is not implemented."""
    for key, value in {**COMMON_FIXED, **family.fixed}.items():
        got = hf_config.get(key, value)
        require(
            got == value, f"config.json {key}", got,
            f"is not implemented for {family.architecture}", f"use a model with {key}={value!r}",
        )  # fmt: skip
    types = set(hf_config.get("layer_types") or ["full_attention"])
    require(
        types == {"full_attention"}, "config.json layer_types", sorted(types),
        "only full attention is implemented", "use a model without sliding-window layers",
    )  # fmt: skip
    theta, factor = _read_rope(hf_config)
    hidden, heads = int(hf_config["hidden_size"]), int(hf_config["num_attention_heads"])
    head_dim = hf_config.get("head_dim") or hidden // heads
    return ModelSpec(
        architecture=family.architecture,
        num_layers=int(hf_config["num_hidden_layers"]),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=int(hf_config.get("num_key_value_heads") or heads),
        head_dim=int(head_dim),
        ffn_size=int(hf_config["intermediate_size"]),
        vocab_size=int(hf_config["vocab_size"]),
        max_positions=int(hf_config["max_position_embeddings"]),
        norm_eps=float(hf_config["rms_norm_eps"]),
        rope_theta=theta,
        rope_llama3_factor=factor,
        is_tied=bool(hf_config.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
    )


def _read_rope(hf_config: Mapping[str, Any]) -> tuple[float, float | None]:
    """(theta, llama3 factor or None) from rope_parameters or from rope_theta and rope_scaling."""
    key = "rope_parameters" if hf_config.get("rope_parameters") else "rope_scaling"
    rope = hf_config.get(key) or {}
    theta = float(rope.get("rope_theta", hf_config.get("rope_theta", 10000.0)))
    partial = rope.get("partial_rotary_factor", 1.0)
    require(
        partial == 1.0, f"config.json {key}.partial_rotary_factor", partial,
        "is not implemented", "use a model that rotates all of head_dim",
    )  # fmt: skip
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ConfigError(
            f"config.json {key}.rope_type={kind!r} is not implemented; "
            "use a model with rope_type default or llama3, or remove the scaling"
        )
    for name, value in LLAMA3_ROPE.items():
        # megatron's RotaryEmbedding has these three as constants and takes only the factor
        require(
            rope.get(name, value) == value, f"config.json {key}.{name}", rope.get(name),
            f"is implemented for {value} only", f"use a model with {name}={value}",
        )  # fmt: skip
    return theta, float(rope["factor"])
