"""The compact layouts, element by element, against the trainer's and the engine's own
descriptions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from megarl.config.errors import ConfigError
from megarl.models import weight_layout
from megarl.models.weight_layout import pipeline_split
from megarl.parallel import ParallelDims
from megarl.reshard.plan import Mesh, model_shape
from megarl.reshard.plan.layouts import build_groups
from megarl.reshard.plan.mesh import engine_stages, parse_mesh, training_stages
from megarl.rollout.sglang_layout import hf_weight_shapes, sglang_weight_layout
from megarl.types import WeightLayout

TINY: dict[str, Any] = {
    "hidden_size": 8, "intermediate_size": 24, "num_hidden_layers": 5, "num_attention_heads": 12,
    "num_key_value_heads": 4, "head_dim": 2, "vocab_size": 130,
    "max_position_embeddings": 32, "rms_norm_eps": 1e-6,
}  # fmt: skip
FAMILIES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
Held = dict[tuple[str, int], np.ndarray]  # (tensor, rank) -> how often each element is held


def tiny(architecture: str, *, tied: bool = False, **more: Any) -> dict[str, Any]:
    names = {"architectures": [architecture], "model_type": FAMILIES[architecture]}
    return {**TINY, **names, "tie_word_embeddings": tied, **more}


def compact(
    config: dict[str, Any], train: Mesh, rollout: Mesh, *, max_item_bytes: int
) -> tuple[Held, Held]:
    """What each rank holds on both sides according to the groups."""
    model = model_shape(config)
    groups = build_groups(model, train, rollout, max_item_bytes=max_item_bytes, element_size=1)
    shapes = {k.name: (k.rows, k.columns) for k in model.kinds}
    source: Held = {}
    target: Held = {}
    for group in groups:
        for k in range(group.num_tensors):
            for held, shards in ((source, group.source), (target, group.target)):
                for shard in shards:
                    for rank in shard.ranks.tolist():
                        key = group.tensor_name(k), rank
                        count = held.setdefault(key, np.zeros(shapes[group.name], int))
                        a, b, c, d = shard.rect
                        count[a:b, c:d] += 1
    return source, target


def placed(layout_of: Callable[[int], WeightLayout], size: int) -> Held:
    """The same from WeightLayouts; a vector is a matrix with one column."""
    out: Held = {}
    for rank in range(size):
        layout = layout_of(rank)
        for p in layout.placements:
            shape = layout.canonical_shapes[p.canonical]
            count = out.setdefault(
                (p.canonical, rank), np.zeros((shape[0], *(shape[1:] or (1,))), int)
            )
            count[p.source.slices] += 1
    return out


def assert_same(got: Held, expected: Held) -> None:
    assert set(got) == set(expected)
    for key, count in got.items():
        # the tied output layer of a single-stage rank is the embedding; two parameters hold it
        # otherwise
        np.testing.assert_array_equal(count, np.minimum(expected[key], 1), err_msg=str(key))


@pytest.mark.parametrize("max_item_bytes", [100, 10**9])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize(
    ("tp", "pp", "dp"), [(1, 1, 2), (2, 1, 1), (4, 1, 2), (2, 2, 2), (2, 3, 1), (1, 5, 1)]
)
def test_training_side_equals_the_models_own_layout(
    architecture: str, tied: bool, tp: int, pp: int, dp: int, max_item_bytes: int
) -> None:
    config = tiny(architecture, tied=tied)
    dims = ParallelDims(tp=tp, pp=pp, dp=dp)
    train, rollout = Mesh(side="train", tp=tp, pp=pp, dp=dp, etp=tp), Mesh(side="rollout", dp=1)
    got, _ = compact(config, train, rollout, max_item_bytes=max_item_bytes)
    assert_same(got, placed(lambda rank: weight_layout(config, dims, rank), dims.size))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize(
    ("tp", "dp", "kv"), [(1, 1, 4), (2, 2, 4), (3, 1, 3), (4, 1, 2), (12, 1, 4)]
)
def test_rollout_side_equals_the_engines_own_layout(
    architecture: str, tied: bool, tp: int, dp: int, kv: int
) -> None:
    config = tiny(architecture, tied=tied, num_key_value_heads=kv)
    train, rollout = Mesh(side="train"), Mesh(side="rollout", tp=tp, dp=dp, etp=tp)
    _, got = compact(config, train, rollout, max_item_bytes=10**9)
    assert_same(got, placed(lambda rank: sglang_weight_layout(config, tp, rank % tp), tp * dp))


@pytest.mark.parametrize("architecture", FAMILIES)
def test_tensors_are_those_of_the_checkpoint(architecture: str) -> None:
    config = tiny(architecture)
    model = model_shape(config)
    got = {
        kind.name.format(layer=layer): (kind.rows, kind.columns)
        for kind in model.kinds
        for layer in kind.layers or [-1]
    }
    shapes = hf_weight_shapes(config)
    assert got == {name: (shape[0], *(shape[1:] or (1,))) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("layers", "pp"), [(80, 4), (61, 16), (5, 3), (7, 2), (9, 8), (94, 8), (3, 3)]
)
def test_stages_follow_megatron_and_sglang(layers: int, pp: int) -> None:
    counts = np.bincount(training_stages(layers, pp), minlength=pp)
    assert counts.tolist() == pipeline_split(layers, pp)
    # sglang.srt.distributed.utils.get_pp_indices: the last layers % pp stages have one more
    extra = layers % pp
    expected = [layers // pp] * (pp - extra) + [layers // pp + 1] * extra
    assert np.bincount(engine_stages(layers, pp), minlength=pp).tolist() == expected


def test_virtual_stages_alternate() -> None:
    assert training_stages(8, 2, 2).tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    with pytest.raises(ConfigError, match="vpp"):
        training_stages(6, 2, 2)


def test_of_64_query_and_2_kv_heads_at_tp8_ranks_3_and_7_own_the_kv_rows() -> None:
    config = tiny("LlamaForCausalLM", num_attention_heads=64, num_key_value_heads=2)
    source, target = compact(
        config, parse_mesh("train", "tp=8"), parse_mesh("rollout", "tp=8"), max_item_bytes=10**9
    )
    name = "model.layers.0.self_attn.k_proj.weight"
    assert {rank for tensor, rank in source if tensor == name} == {3, 7}
    # 68 heads of rows over 8 ranks: 8.5 each; rank 3 has 6.5 query heads, k and v
    assert source["model.layers.0.self_attn.q_proj.weight", 3].sum() == 6.5 * 2 * 8
    assert [int(target[name, rank][:, 0].argmax()) for rank in range(8)] == [0] * 4 + [2] * 4


def test_experts_lie_on_the_expert_mesh() -> None:
    config = {
        **TINY,
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 8,
        "moe_intermediate_size": 4,
    }
    train, rollout = parse_mesh("train", "tp=2,dp=4,ep=4"), parse_mesh("rollout", "tp=4,ep=2,dp=2")
    source, target = compact(config, train, rollout, max_item_bytes=10**9)
    name = "model.layers.4.mlp.experts.{}.gate_proj.weight"
    for expert in range(8):
        # training: etp 1, so ranks 0-3 and 4-7 are two expert groups of two experts per rank
        holders = {rank for tensor, rank in source if tensor == name.format(expert)}
        assert holders == {expert // 2, expert // 2 + 4}
        # rollout: 4 ranks are ep 2 x etp 2, etp fastest
        for rank in range(8):
            count = target.get((name.format(expert), rank))
            assert (count is not None) == (expert // 4 == rank % 4 // 2)
            if count is not None:
                assert count[:, 0].tolist() == ([1, 1, 0, 0] if rank % 2 == 0 else [0, 0, 1, 1])


@pytest.mark.parametrize(
    ("side", "text", "message"),
    [
        ("train", "tp=2,xp=3", "unknown or repeated key 'xp'"),
        ("train", "tp=2,tp=3", "repeated key 'tp'"),
        ("rollout", "tp=2,vpp=2", "unknown"),
        ("train", "tp=0", "positive integer"),
        ("train", "tp=two", "positive integer"),
        ("train", "", "unknown"),
        ("train", "tp=2,dp=2,ep=3", "do not fit"),
    ],
)
def test_bad_sizes_are_refused(side: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_mesh(side, text)


@pytest.mark.parametrize(
    ("change", "train", "rollout", "message"),
    [
        ({}, "tp=5", "tp=1", "does not divide"),
        ({}, "tp=1", "tp=5,dp=1", "does not divide"),
        ({}, "pp=6", "tp=1", "needs 6 layers"),
        ({}, "pp=1", "pp=6", "exceeds"),
        ({"num_key_value_heads": 4, "num_attention_heads": 24}, "tp=1", "tp=6", "not a multiple"),
        ({"num_key_value_heads": 5}, "tp=1", "tp=1", "does not divide num_attention_heads"),
        ({"vocab_size": "many"}, "tp=1", "tp=1", "vocab_size"),
        ({"architectures": ["GPT2LMHeadModel"]}, "tp=1", "tp=1", "not supported"),
        ({"quantization_config": {"bits": 4}}, "tp=1", "tp=1", "not described"),
    ],
)
def test_models_that_do_not_fit_are_refused(
    change: dict[str, Any], train: str, rollout: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_groups(
            model_shape(tiny("LlamaForCausalLM", **change)),
            parse_mesh("train", train), parse_mesh("rollout", rollout),
            max_item_bytes=10**9, element_size=1,
        )  # fmt: skip
