"""weight_layout against counting every element and an independent construction of the shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megarl.config.errors import ConfigError
from megarl.models import weight_layout
from megarl.models.weight_layout import padded_vocab_size, pipeline_split
from megarl.parallel import Coordinate, ParallelDims

TINY = {
    "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6, "vocab_size": 13,
    "max_position_embeddings": 32, "rms_norm_eps": 1e-6,
}  # fmt: skip
ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def tiny(architecture: str = "Qwen2ForCausalLM", *, tied: bool = False) -> dict[str, Any]:
    return {**TINY, "architectures": [architecture], "tie_word_embeddings": tied}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2), (2, 3)])
def test_every_element_has_one_source_and_every_canonical_element_a_holder(
    architecture: str, tied: bool, tp: int, pp: int
) -> None:
    config = tiny(architecture, tied=tied)
    dims = ParallelDims(tp=tp, pp=pp, dp=2)
    held: dict[str, torch.Tensor] = {}
    for rank in dims.ranks:
        layout = weight_layout(config, dims, rank)
        layout.check()
        counts = {name: torch.zeros(shape) for name, shape in layout.parameters.items()}
        for p in layout.placements:
            counts[p.parameter][p.target.slices] += 1
            held.setdefault(p.canonical, torch.zeros(layout.canonical_shapes[p.canonical]))[
                p.source.slices
            ] += 1
        for name, count in counts.items():
            is_last_shard = dims.coordinate(rank).tp == tp - 1
            num_padding = 14 - 13 if tp == 2 and is_last_shard else 0
            if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                assert torch.equal(
                    count[: len(count) - num_padding], torch.ones(len(count) - num_padding, 8)
                ), name
                assert torch.equal(
                    count[len(count) - num_padding :], torch.zeros(num_padding, 8)
                ), name
            else:
                assert torch.equal(count, torch.ones_like(count)), name
    assert set(held) == set(layout.canonical_shapes)
    assert ("lm_head.weight" in held) is not tied
    for name, count in held.items():
        copies = 2  # dp
        if "norm" in name:
            copies *= tp
        if tied and pp > 1 and name == "model.embed_tokens.weight":
            copies *= 2  # first and last stage
        assert torch.equal(count, torch.full_like(count, copies)), name


def canonical(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    shapes = weight_layout(config, ParallelDims(), 0).canonical_shapes
    out, start = {}, 0
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        out[name] = torch.arange(start, start + size, dtype=torch.float64).view(shape)
        start += size
    return out


def fill(config: dict[str, Any], dims: ParallelDims, rank: int) -> dict[str, torch.Tensor]:
    layout, tensors = weight_layout(config, dims, rank), canonical(config)
    local = {n: torch.zeros(shape, dtype=torch.float64) for n, shape in layout.parameters.items()}
    for p in layout.placements:
        local[p.parameter][p.target.slices] = tensors[p.canonical][p.source.slices]
    return local


@pytest.mark.parametrize("what", ["weight", "bias"])
def test_qkv_is_interleaved_by_kv_group_and_cut_between_groups(what: str) -> None:
    config, tensors = tiny(), canonical(tiny())
    q, k, v = (tensors[f"model.layers.1.self_attn.{x}_proj.{what}"] for x in "qkv")
    groups, head = 2, 6
    parts = [x.view(groups, -1, head, *x.shape[1:]) for x in (q, k, v)]
    merged = torch.cat(parts, dim=1)  # [2, 2 + 1 + 1, 6, ..]
    for rank, want in enumerate(merged.flatten(0, 2).chunk(2)):
        local = fill(config, ParallelDims(tp=2), rank)
        assert torch.equal(local[f"decoder.layers.1.self_attention.linear_qkv.{what}"], want)


def test_gate_and_up_are_cut_before_they_are_stacked() -> None:
    config, tensors = tiny(), canonical(tiny())
    gate, up = (tensors[f"model.layers.2.mlp.{x}_proj.weight"] for x in ("gate", "up"))
    for rank in range(2):
        local = fill(config, ParallelDims(tp=2), rank)
        want = torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]])
        assert torch.equal(local["decoder.layers.2.mlp.linear_fc1.weight"], want)


def test_row_parallel_weights_are_cut_along_their_input() -> None:
    config, tensors = tiny(), canonical(tiny())
    for parameter, name in (
        ("self_attention.linear_proj", "self_attn.o_proj"),
        ("mlp.linear_fc2", "mlp.down_proj"),
    ):
        for rank in range(2):
            local = fill(config, ParallelDims(tp=2), rank)
            want = tensors[f"model.layers.0.{name}.weight"].chunk(2, dim=1)[rank]
            assert torch.equal(local[f"decoder.layers.0.{parameter}.weight"], want)


def test_a_later_pipeline_stage_counts_its_layers_from_zero() -> None:
    config, tensors = tiny(), canonical(tiny())
    dims = ParallelDims(pp=2)
    last = fill(config, dims, dims.rank(Coordinate(tp=0, cp=0, dp=0, pp=1)))
    assert torch.equal(
        last["decoder.layers.0.mlp.linear_fc2.weight"],
        tensors["model.layers.2.mlp.down_proj.weight"],
    )
    assert "decoder.layers.1.mlp.linear_fc2.weight" not in last
    assert "embedding.word_embeddings.weight" not in last


def test_a_tied_output_layer_exists_only_away_from_the_embedding() -> None:
    config, tensors = tiny(tied=True), canonical(tiny(tied=True))
    assert "output_layer.weight" not in fill(config, ParallelDims(), 0)
    assert torch.equal(
        fill(config, ParallelDims(pp=2), 1)["output_layer.weight"],
        tensors["model.embed_tokens.weight"],
    )


@pytest.mark.parametrize(
    ("num_layers", "pp", "want"),
    [(4, 1, [4]), (4, 2, [2, 2]), (3, 2, [2, 1]), (30, 4, [7, 8, 8, 7]), (7, 4, [2, 2, 2, 1]),
     (5, 4, [2, 1, 1, 1]), (9, 8, [2, 1, 1, 1, 1, 1, 1, 1]), (15, 8, [2, 2, 2, 2, 2, 2, 2, 1])],
)  # fmt: skip
def test_layers_are_split_so_that_only_the_ends_differ(
    num_layers: int, pp: int, want: list[int]
) -> None:
    assert pipeline_split(num_layers, pp) == want


@pytest.mark.parametrize("num_layers", range(1, 40))
def test_every_split_gives_each_stage_a_layer(num_layers: int) -> None:
    for pp in range(1, num_layers + 1):
        split = pipeline_split(num_layers, pp)
        assert sum(split) == num_layers
        assert len(split) == pp
        assert min(split) >= 1
        assert len(set(split[1:-1])) <= 1


def test_vocabulary_is_padded_to_the_next_multiple() -> None:
    assert [padded_vocab_size(13, tp) for tp in (1, 2, 4, 13, 16)] == [13, 14, 16, 13, 16]


def test_a_rank_beyond_a_tiny_vocabulary_holds_padding_only() -> None:
    config = {
        **tiny("LlamaForCausalLM"),
        "vocab_size": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    layout = weight_layout(config, ParallelDims(tp=4), 3)
    assert layout.parameters["embedding.word_embeddings.weight"] == (1, 8)
    assert not [p for p in layout.placements if p.parameter == "embedding.word_embeddings.weight"]


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        (
            ParallelDims(tp=4),
            r"parallel.tp=4 does not divide num_key_value_heads=2 .* use one of \[1, 2\]",
        ),
        (ParallelDims(tp=3), "parallel.tp=3 does not divide num_attention_heads=4"),
        (ParallelDims(pp=4), "parallel.pp=4 needs at least one of the 3 layers"),
    ],
)
def test_layouts_that_do_not_divide_are_refused(dims: ParallelDims, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        weight_layout(tiny(), dims, 0)
