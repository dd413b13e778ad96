"""SGLang's layout as data: every element of every tensor lands once, where SGLang puts it."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.rollout.sglang_layout import (
    hf_weight_layout,
    hf_weight_shapes,
    padded_vocab,
    sglang_weight_layout,
)

BASE: dict[str, Any] = {
    "vocab_size": 200, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
FAMILIES = [
    {"model_type": "llama"},
    {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    {"model_type": "llama", "tie_word_embeddings": True},
    {"model_type": "qwen2"},
    {"model_type": "qwen3", "tie_word_embeddings": True},
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_the_ranks_together_hold_every_element(family: dict[str, Any], tp: int) -> None:
    """Split tensors once; norms, row-parallel biases once per rank; KV heads tp / kv times."""
    config = BASE | family
    counts: dict[str, dict[tuple[int, ...], int]] = {}
    for rank in range(tp):
        layout = sglang_weight_layout(config, tp, rank)
        layout.check()
        for p in layout.placements:
            rows = range(p.source.start[0], p.source.stop[0])
            columns = range(
                *((p.source.start[1], p.source.stop[1]) if len(p.source.start) > 1 else (0, 1))
            )
            seen = counts.setdefault(p.canonical, {})
            for row in rows:
                for column in (columns[0], columns[-1]):
                    seen[row, column] = seen.get((row, column), 0) + 1
    shapes = hf_weight_shapes(config)
    assert counts.keys() == shapes.keys()
    for name, seen in counts.items():
        assert {row for row, _ in seen} == set(range(shapes[name][0]))
        if "k_proj" in name or "v_proj" in name:
            expected = max(1, tp // 2)
        elif "norm" in name or name.endswith(("o_proj.bias", "down_proj.bias")):
            expected = tp
        else:
            expected = 1
        edges = (
            1 if len(shapes[name]) > 1 else 2
        )  # a vector's only column was counted as both edges
        assert set(seen.values()) == {expected * edges}


def test_no_element_of_a_local_parameter_is_written_twice() -> None:
    layout = sglang_weight_layout(BASE | {"model_type": "qwen2"}, 2, 1)
    for name, written in layout.covered_elements():
        size = 1
        for extent in layout.parameters[name]:
            size *= extent
        if "embed_tokens" in name or "lm_head" in name:
            assert written == (200 - 128) * 64  # rank 1 holds rows 128..255, of which 200..255 pad
        else:
            assert written == size


def test_more_ranks_than_kv_heads_share_a_head() -> None:
    def kv_rows(rank: int) -> tuple[int, int]:
        layout = sglang_weight_layout(BASE | {"model_type": "llama"}, 4, rank)
        (p,) = [
            p for p in layout.placements if p.canonical == "model.layers.0.self_attn.k_proj.weight"
        ]
        return p.source.start[0], p.source.stop[0]

    assert [kv_rows(rank) for rank in range(4)] == [(0, 16), (0, 16), (16, 32), (16, 32)]


def test_q_k_v_are_stacked_in_this_order() -> None:
    layout = sglang_weight_layout(BASE | {"model_type": "llama"}, 2, 1)
    stacked = [
        (p.canonical.split(".")[-2], p.source.start[0], p.target.start[0], p.target.stop[0])
        for p in layout.placements
        if p.parameter == "model.layers.1.self_attn.qkv_proj.weight"
    ]
    assert stacked == [("q_proj", 64, 0, 64), ("k_proj", 16, 64, 80), ("v_proj", 16, 80, 96)]
    assert layout.parameters["model.layers.1.self_attn.qkv_proj.weight"] == (96, 64)


@pytest.mark.parametrize(
    ("vocab", "tp", "expected"), [(200, 1, 256), (256, 1, 256), (200, 2, 256), (200, 3, 384)]
)
def test_the_vocabulary_is_padded_for_64_and_for_the_ranks(
    vocab: int, tp: int, expected: int
) -> None:
    assert padded_vocab(vocab, tp) == expected


def test_a_tied_head_is_not_a_parameter() -> None:
    config = BASE | {"model_type": "qwen2", "tie_word_embeddings": True}
    assert "lm_head.weight" not in sglang_weight_layout(config, 1, 0).parameters
    assert "lm_head.weight" not in hf_weight_layout(config).parameters


@pytest.mark.parametrize(
    ("changes", "tp", "message"),
    [
        ({"model_type": "gpt2"}, 1, "model_type='gpt2' has no weight layout"),
        ({"model_type": "llama"}, 3, "does not divide num_attention_heads=8"),
        ({"model_type": "llama", "num_attention_heads": 12, "num_key_value_heads": 3}, 2,
         "neither divides nor is a multiple of num_key_value_heads=3"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(
    changes: dict[str, Any], tp: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        sglang_weight_layout(BASE | changes, tp, 0)
