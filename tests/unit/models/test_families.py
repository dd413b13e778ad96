"""config.json -> ModelSpec: what is read, and what is refused as it would change the numbers."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.config.errors import ConfigError
from megarl.models.families import FAMILIES, model_spec

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
    "attention_dropout": 0.0,
}


def config(**change: Any) -> dict[str, Any]:
    return {**SMOLLM2, **change}


def test_sizes_are_read_and_defaults_follow_hugging_face() -> None:
    spec = model_spec(config())
    assert (spec.num_layers, spec.hidden_size, spec.num_heads, spec.num_kv_heads) == (30, 576, 9, 3)
    assert (spec.head_dim, spec.ffn_size, spec.vocab_size, spec.is_tied) == (64, 1536, 49152, True)
    bare = {
        k: v
        for k, v in SMOLLM2.items()
        if k not in ("head_dim", "num_key_value_heads", "tie_word_embeddings")
    }
    spec = model_spec(bare)
    assert (spec.head_dim, spec.num_kv_heads, spec.is_tied) == (64, 9, False)


def test_parameter_count_of_smollm2_is_the_published_one() -> None:
    shapes = model_spec(config()).canonical_shapes()
    total = 0
    for shape in shapes.values():
        size = 1
        for n in shape:
            size *= n
        total += size
    assert total == 134_515_008  # the model card says 135M; counted with transformers


@pytest.mark.parametrize(
    ("rope", "theta", "factor"),
    [
        ({}, 10000.0, None),
        ({"rope_theta": 1e5}, 1e5, None),
        ({"rope_theta": 1e5, "rope_scaling": None}, 1e5, None),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, 1e6, None),
        (
            {
                "rope_theta": 5e5,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 32.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                },
            },
            5e5,
            32.0,
        ),
    ],
)
def test_rope_is_read_in_old_and_new_spelling(
    rope: dict[str, Any], theta: float, factor: float | None
) -> None:
    spec = model_spec(config(**rope))
    assert (spec.rope_theta, spec.rope_llama3_factor) == (theta, factor)


def test_families_differ_in_bias_and_query_key_norm_only() -> None:
    names = {
        a: {
            n.removeprefix("model.layers.0.")
            for n in model_spec(config(architectures=[a])).canonical_shapes()
        }
        for a in FAMILIES
    }
    base = names["LlamaForCausalLM"]
    assert names["Qwen2ForCausalLM"] - base == {
        f"{p}.bias" for p in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    } | {f"model.layers.{i}.self_attn.{x}_proj.bias" for i in range(1, 30) for x in "qkv"}
    extra = {n for n in names["Qwen3ForCausalLM"] - base if not n.startswith("model.layers.")}
    assert extra == {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            r"architectures=\['MambaForCausalLM'\] is not supported; use one",
        ),
        ({"architectures": None}, r"architectures=\[\] is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not implemented"),
        ({"attention_bias": True}, "attention_bias=True is not implemented"),
        ({"mlp_bias": True}, "mlp_bias=True is not implemented"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "only full attention is implemented",
        ),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            "rope_scaling.rope_type='yarn' is not implemented",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
            "partial_rotary_factor=0.25",
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "original_max_position_embeddings": 4096,
                }
            },
            "original_max_position_embeddings=4096 .* 8192",
        ),
    ],
)
def test_unsupported_options_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model_spec(config(**change))
