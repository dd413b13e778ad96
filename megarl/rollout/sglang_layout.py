"""What an SGLang tensor-parallel rank holds of a Llama, Qwen2 or Qwen3 dense model, as data.

Pure: reads only config.json's fields, imports neither torch nor sglang. SGLang stacks q, k, v into
`qkv_proj` and gate, up into `gate_up_proj`, splits o_proj and down_proj by columns, pads the
vocabulary, and repeats a KV head on several ranks when there are more ranks than KV heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megarl.types import Box, Placement, WeightLayout

__all__ = ["FAMILIES", "hf_weight_layout", "hf_weight_shapes", "sglang_weight_layout"]

FAMILIES = ("llama", "qwen2", "qwen3")
VOCAB_MULTIPLE = 64  # SGLang pads the vocabulary to a multiple of it


@dataclass(frozen=True, kw_only=True)
class _Dims:
    """Sizes of a model, from its config.json."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    is_tied: bool
    has_qkv_bias: bool
    has_o_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool


def _dims(hf_config: Mapping[str, Any]) -> _Dims:
    family = hf_config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(
            f"model_type={family!r} has no weight layout for the rollout engine; "
            f"use one of {', '.join(FAMILIES)}"
        )
    heads = int(hf_config["num_attention_heads"])
    attention_bias = bool(hf_config.get("attention_bias", False))
    return _Dims(
        layers=int(hf_config["num_hidden_layers"]),
        hidden=int(hf_config["hidden_size"]),
        intermediate=int(hf_config["intermediate_size"]),
        heads=heads,
        kv_heads=int(hf_config.get("num_key_value_heads") or heads),
        head_dim=int(hf_config.get("head_dim") or hf_config["hidden_size"] // heads),
        vocab=int(hf_config["vocab_size"]),
        is_tied=bool(hf_config.get("tie_word_embeddings", False)),
        has_qkv_bias=family == "qwen2" or attention_bias,
        has_o_bias=family != "qwen2" and attention_bias,
        has_mlp_bias=family == "llama" and bool(hf_config.get("mlp_bias", False)),
        has_qk_norm=family == "qwen3",
    )


def hf_weight_shapes(hf_config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """{Hugging Face tensor name: shape}; a tied lm_head is left out."""
    d = _dims(hf_config)
    q, kv = d.heads * d.head_dim, d.kv_heads * d.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (d.vocab, d.hidden)}

    def linear(name: str, rows: int, columns: int, has_bias: bool) -> None:
        shapes[f"{name}.weight"] = (rows, columns)
        if has_bias:
            shapes[f"{name}.bias"] = (rows,)

    for i in range(d.layers):
        layer = f"model.layers.{i}"
        for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            linear(f"{layer}.self_attn.{name}", rows, d.hidden, d.has_qkv_bias)
        linear(f"{layer}.self_attn.o_proj", d.hidden, q, d.has_o_bias)
        if d.has_qk_norm:
            for name in ("q_norm", "k_norm"):
                shapes[f"{layer}.self_attn.{name}.weight"] = (d.head_dim,)
        for name in ("gate_proj", "up_proj"):
            linear(f"{layer}.mlp.{name}", d.intermediate, d.hidden, d.has_mlp_bias)
        linear(f"{layer}.mlp.down_proj", d.hidden, d.intermediate, d.has_mlp_bias)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}.{name}.weight"] = (d.hidden,)
    shapes["model.norm.weight"] = (d.hidden,)
    if not d.is_tied:
        shapes["lm_head.weight"] = (d.vocab, d.hidden)
    return shapes


def hf_weight_layout(hf_config: Mapping[str, Any]) -> WeightLayout:
    """The layout of one process that holds the whole model under its Hugging Face names."""
    shapes = hf_weight_shapes(hf_config)
    placements = [Placement(n, Box.full(s), n, Box.full(s)) for n, s in shapes.items()]
    return WeightLayout(shapes, dict(shapes), placements)


@dataclass
class _Builder:
    """Collects parameters and placements of one rank."""

    shapes: dict[str, tuple[int, ...]]
    parameters: dict[str, tuple[int, ...]] = field(default_factory=dict)
    placements: list[Placement] = field(default_factory=list)

    def whole(self, name: str) -> None:
        shape = self.shapes[name]
        self.parameters[name] = shape
        self.placements.append(Placement(name, Box.full(shape), name, Box.full(shape)))

    def rows(self, parameter: str, parts: list[tuple[str, int, int]], *, pad_to: int = 0) -> None:
        """Stack rows [start, stop) of each canonical tensor; pad the result to `pad_to` rows."""
        rest = self.shapes[parts[0][0]][1:]
        zeros, offset = (0,) * len(rest), 0
        for name, start, stop in parts:
            if stop > start:
                source = Box((start, *zeros), (stop, *rest))
                target = Box((offset, *zeros), (offset + stop - start, *rest))
                self.placements.append(Placement(name, source, parameter, target))
            offset += max(stop - start, 0)
        self.parameters[parameter] = (max(offset, pad_to), *rest)

    def columns(self, name: str, start: int, stop: int) -> None:
        rows = self.shapes[name][0]
        self.parameters[name] = (rows, stop - start)
        source, target = Box((0, start), (rows, stop)), Box.full((rows, stop - start))
        self.placements.append(Placement(name, source, name, target))


def sglang_weight_layout(hf_config: Mapping[str, Any], tp: int, tp_rank: int) -> WeightLayout:
    """SGLang's parameters on rank `tp_rank` of `tp`.

    Args:
        hf_config: content of config.json.
        tp: tensor parallel size of the engine.
        tp_rank: 0 .. tp-1.

    Raises:
        ValueError: unknown family, or `tp` does not divide heads, KV heads or the MLP width.
    """
    d = _dims(hf_config)
    _check_tp(d, tp)
    assert 0 <= tp_rank < tp, f"tp_rank={tp_rank} tp={tp}"
    shapes = hf_weight_shapes(hf_config)
    build = _Builder(shapes)
    q = d.heads * d.head_dim // tp
    kv = max(d.kv_heads // tp, 1) * d.head_dim
    kv_start = (
        tp_rank * d.kv_heads // tp * d.head_dim
    )  # several ranks share a head when tp > kv_heads
    mlp = d.intermediate // tp

    def vocab(name: str) -> None:
        per_rank = padded_vocab(d.vocab, tp) // tp
        start = min(tp_rank * per_rank, d.vocab)
        build.rows(name, [(name, start, min(start + per_rank, d.vocab))], pad_to=per_rank)

    vocab("model.embed_tokens.weight")
    for i in range(d.layers):
        attention, ffn = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        for kind in ("weight", "bias") if d.has_qkv_bias else ("weight",):
            spans = (("q", tp_rank * q, q), ("k", kv_start, kv), ("v", kv_start, kv))
            parts = [(f"{attention}.{x}_proj.{kind}", start, start + n) for x, start, n in spans]
            build.rows(f"{attention}.qkv_proj.{kind}", parts)
        build.columns(f"{attention}.o_proj.weight", tp_rank * q, (tp_rank + 1) * q)
        for kind in ("weight", "bias") if d.has_mlp_bias else ("weight",):
            parts = [
                (f"{ffn}.{x}_proj.{kind}", tp_rank * mlp, (tp_rank + 1) * mlp)
                for x in ("gate", "up")
            ]
            build.rows(f"{ffn}.gate_up_proj.{kind}", parts)
        build.columns(f"{ffn}.down_proj.weight", tp_rank * mlp, (tp_rank + 1) * mlp)
        _whole_of_layer(build, f"model.layers.{i}")
    build.whole("model.norm.weight")
    if not d.is_tied:
        vocab("lm_head.weight")
    return WeightLayout(shapes, build.parameters, build.placements)


def _whole_of_layer(build: _Builder, layer: str) -> None:
    """Norms and the biases of row-parallel layers, which every rank holds in full."""
    names = (
        "self_attn.q_norm.weight", "self_attn.k_norm.weight", "self_attn.o_proj.bias",
        "mlp.down_proj.bias", "input_layernorm.weight", "post_attention_layernorm.weight",
    )  # fmt: skip
    for name in names:
        if f"{layer}.{name}" in build.shapes:
            build.whole(f"{layer}.{name}")


def padded_vocab(vocab: int, tp: int) -> int:
    """SGLang's vocabulary size on all ranks together: a multiple of 64, and of 64 * tp if tp does
    not divide that.
    """
    padded = -(-vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    if padded % tp == 0:
        return padded
    return -(-vocab // (VOCAB_MULTIPLE * tp)) * VOCAB_MULTIPLE * tp


def _check_tp(d: _Dims, tp: int) -> None:
    for what, size in (("num_attention_heads", d.heads), ("intermediate_size", d.intermediate)):
        if size % tp:
            raise ValueError(f"rollout.tp={tp} does not divide {what}={size}; use a divisor of it")
    if d.kv_heads % tp and tp % d.kv_heads:
        raise ValueError(
            f"rollout.tp={tp} neither divides nor is a multiple of "
            f"num_key_value_heads={d.kv_heads}; use a divisor or a multiple of it"
        )
