"""Numbers of the certificate: known layouts, bounds, windows, and the cost of planning itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from plan_model_configs import DEEPSEEK_V3, LLAMA_7B, LLAMA_70B, QWEN3_235B

from megarl.reshard.plan import Certificate, Hardware, PlannedReshard, model_shape, plan_reshard
from megarl.reshard.plan.certificate import predict_seconds
from megarl.reshard.plan.layouts import build_groups
from megarl.reshard.plan.mesh import Mesh, parse_mesh
from megarl.reshard.plan.planner import rank_operations
from megarl.reshard.plan.traffic import Traffic, count_traffic


def planned(
    config: dict[str, Any], train: str, rollout: str, placement: str = "optimal", **hardware: Any
) -> PlannedReshard:
    return plan_reshard(
        model_shape(config), parse_mesh("train", train), parse_mesh("rollout", rollout),
        hardware=Hardware(**hardware), element_size=2, placement=placement,
    )  # fmt: skip


def certificate(*args: Any, **kwargs: Any) -> Certificate:
    c = planned(*args, **kwargs).certificate
    # holds for every plan
    assert c.exactly_once
    assert c.errors == []
    assert c.recv_bytes_per_rank == c.lower_bound_bytes_per_rank
    assert c.node_ingress_bytes.max == c.node_ingress_bytes.lower_bound
    assert sorted(c.role_map) == list(range(c.world_size))
    assert c.peak_buffer_bytes <= 3 * kwargs.get("max_window_bytes", Hardware().max_window_bytes)
    return c


@pytest.mark.parametrize(
    ("train", "rollout", "placement", "frac"),
    [
        ("tp=4,dp=2", "tp=2,dp=4", "optimal", 0.25),
        ("tp=4,dp=2", "tp=2,dp=4", "contiguous", 0.5),
        ("tp=8", "tp=2,dp=4", "optimal", 0.375),
        ("tp=8,dp=4", "tp=4,dp=8", "optimal", 0.125),
        ("tp=4,dp=2", "tp=8", "optimal", 0.0),
    ],
)
def test_received_bytes_in_units_of_the_model(
    train: str, rollout: str, placement: str, frac: float
) -> None:
    c = certificate(LLAMA_7B, train, rollout, placement)
    # norms are on all ranks of one stage and never move: exact without them
    assert c.recv_bytes_per_rank.max == frac * (c.model_bytes - c.replicated_bytes)
    assert c.replicated_recv_bytes_per_rank.max == 0


def test_full_gather_receives_all_but_the_own_shard() -> None:
    c = certificate(LLAMA_7B, "tp=4,dp=2", "tp=2,dp=4")
    assert c.full_gather_bytes_per_rank == 0.75 * (c.model_bytes - c.replicated_bytes)


@pytest.mark.parametrize(
    ("tp", "pp", "dp", "rollout_tp", "rollout_pp"),
    [
        (4, 2, 2, 2, 1),
        (4, 2, 2, 4, 1),
        (4, 2, 1, 2, 2),
        (8, 2, 2, 4, 2),
        (8, 2, 2, 2, 2),
        (2, 2, 4, 1, 2),
    ],
)
def test_nested_layouts_receive_the_difference_of_the_shards(
    tp: int, pp: int, dp: int, rollout_tp: int, rollout_pp: int
) -> None:
    """M/(tp' pp') - M/(tp pp), M without the norms; equal stages, so equal ranks."""
    rollout = f"tp={rollout_tp},pp={rollout_pp},dp={tp * pp * dp // rollout_tp // rollout_pp}"
    c = certificate(LLAMA_7B, f"tp={tp},pp={pp},dp={dp}", rollout)
    cut = c.model_bytes - c.replicated_bytes
    expected = cut / (rollout_tp * rollout_pp) - cut / (tp * pp)
    assert c.recv_bytes_per_rank.max - c.replicated_recv_bytes_per_rank.max == expected


def test_optimal_placement_never_receives_more_than_contiguous() -> None:
    for train, rollout in (("tp=8,pp=2,dp=2", "tp=4,dp=8"), ("tp=2,pp=4,dp=2", "tp=4,pp=2,dp=2")):
        optimal = certificate(LLAMA_7B, train, rollout)
        contiguous = certificate(LLAMA_7B, train, rollout, "contiguous")
        assert contiguous.role_map == list(range(contiguous.world_size))
        assert optimal.recv_bytes_per_rank.mean <= contiguous.recv_bytes_per_rank.mean


def test_a_replica_stays_inside_a_node() -> None:
    c = certificate(LLAMA_7B, "tp=4,pp=2,dp=4", "tp=4,dp=8", gpus_per_node=8)
    for replica in np.array(c.role_map).reshape(8, 4):
        assert len(set((replica // 8).tolist())) == 1


@pytest.mark.parametrize(
    ("config", "train", "rollout"),
    [
        ({"num_key_value_heads": 2}, "tp=4,dp=2", "tp=8"),  # KV heads repeated on both sides
        ({"vocab_size": 32003}, "tp=8", "tp=4,dp=2"),  # padded to 32008 and to 32064
        ({"tie_word_embeddings": True}, "pp=4,dp=2", "tp=2,pp=2,dp=2"),
        ({"num_hidden_layers": 7}, "tp=2,pp=4", "tp=2,pp=2,dp=2"),  # uneven on both sides
        ({"num_hidden_layers": 8}, "pp=2,vpp=2,dp=2", "tp=2,dp=2"),
        (
            {
                "num_attention_heads": 24,
                "num_key_value_heads": 6,
                "head_dim": 64,
                "intermediate_size": 12288,
            },
            "tp=3,dp=2",
            "tp=2,dp=3",
        ),
    ],
)
def test_odd_layouts_meet_the_bound(config: dict[str, Any], train: str, rollout: str) -> None:
    certificate({**LLAMA_7B, "num_hidden_layers": 4, **config}, train, rollout, gpus_per_node=4)


def test_tied_embedding_moves_to_the_stage_without_it_only() -> None:
    """pp=2: both stages hold the embedding, so only the other stage's layers move."""
    tied = {**LLAMA_7B, "tie_word_embeddings": True}
    c = certificate(tied, "pp=2", "tp=1,dp=2")
    layer = 4 * 4096**2 + 3 * 4096 * 11008
    assert c.recv_bytes_per_rank.max - c.replicated_recv_bytes_per_rank.max == 16 * layer * 2


def test_experts_that_lie_alike_do_not_move() -> None:
    moe = {**QWEN3_235B, "num_hidden_layers": 4}
    c = certificate(moe, "tp=4,dp=2,ep=8", "tp=4,dp=2,ep=8")
    assert c.recv_bytes_per_rank.max == 0
    c = certificate(moe, "tp=4,dp=2,ep=4", "tp=8,ep=8")
    assert c.recv_bytes_per_rank.max == 0


def test_windows_respect_their_bounds() -> None:
    p = planned(LLAMA_7B, "tp=4,pp=2,dp=2", "tp=2,dp=8", max_window_bytes=2**26, max_window_ops=50)
    moved = count_traffic(p.plan).per_window(p.windows)
    received = moved.received
    assert (moved.packed + received).max() * 2 <= 2**26
    assert (moved.local + received).max() * 2 <= 2**26
    assert moved.num_ops.max() <= 50
    assert p.certificate.num_ops_window_max == moved.num_ops.max()
    assert p.certificate.peak_buffer_bytes <= 3 * 2**26


def test_planning_is_deterministic() -> None:
    a, b = (planned(LLAMA_7B, "tp=4,pp=2,dp=2", "tp=2,dp=8") for _ in range(2))
    assert a.windows == b.windows
    for x, y in zip(a.plan.blocks, b.plan.blocks, strict=True):
        assert x.cell == y.cell
        np.testing.assert_array_equal(x.source, y.source)


def test_senders_are_balanced() -> None:
    c = certificate(LLAMA_70B, "tp=8,pp=2,dp=4", "tp=4,dp=16")
    assert c.sent_bytes_per_rank.max <= 1.01 * c.sent_bytes_per_rank.mean


def test_predicted_seconds_follow_the_formula() -> None:
    """Two windows. 1: rank 0 sends 100 elements far, rank 1 200 near. 2: nothing."""

    def table(*values: int) -> Any:
        return np.array([values, (0, 0)])

    zero = table(0, 0)
    moved = Traffic(zero, zero, table(0, 0), table(0, 200), table(0, 0), table(100, 0), zero)
    hardware = Hardware(nic_gbps=1e-6, nvlink_gbps=4e-6)  # 1000 and 4000 bits per second
    # rank 0: 100 * 16 / 1000 = 1.6 s; rank 1: 200 * 16 / 4000 = 0.8 s; and 0.1 ms per window
    assert predict_seconds(moved, hardware, 2) == pytest.approx(1.6 + 2e-4)


def test_disjoint_pools_use_the_same_plan() -> None:
    p = plan_reshard(
        model_shape({**LLAMA_7B, "num_hidden_layers": 2}),
        Mesh(side="train", tp=4, etp=4), Mesh(side="rollout", tp=2, dp=2, etp=2, rank_offset=4),
        hardware=Hardware(gpus_per_node=4), element_size=2,
    )  # fmt: skip
    c = p.certificate
    assert c.exactly_once
    assert c.role_map == [4, 5, 6, 7]
    cut = c.model_bytes - c.replicated_bytes
    assert c.recv_bytes_per_rank.max == cut / 2 + c.replicated_bytes
    # once into the node although two replicas want it
    assert c.node_ingress_bytes.max == c.model_bytes


def cpu_seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def test_llama_70b_on_64_gpus_is_planned_in_2_cpu_seconds() -> None:
    assert cpu_seconds(lambda: certificate(LLAMA_70B, "tp=8,pp=2,dp=4", "tp=4,dp=16")) < 2


def test_qwen3_235b_on_256_gpus_is_planned_in_20_cpu_seconds() -> None:
    c: list[Certificate] = []
    seconds = cpu_seconds(
        lambda: c.append(certificate(QWEN3_235B, "tp=4,pp=8,dp=8,ep=8", "tp=8,dp=32,ep=8"))
    )
    assert seconds < 20
    hidden, head = 4096, 128
    attention = hidden * head * (64 + 2 * 4 + 64) + 2 * head
    layer = attention + 128 * (3 * hidden * 1536 + hidden) + 2 * hidden
    assert c[0].model_bytes == 2 * (94 * layer + 2 * 151936 * hidden + hidden)


def test_deepseek_v3_on_1024_gpus_is_planned_in_20_cpu_seconds() -> None:
    c: list[Certificate] = []
    seconds = cpu_seconds(
        lambda: c.append(certificate(DEEPSEEK_V3, "tp=1,pp=16,dp=64,ep=64", "tp=8,dp=128,ep=64"))
    )
    assert seconds < 20
    hidden, heads = 7168, 128
    attention = (
        hidden * (1536 + 512 + 64) + 1536 + 512
        + heads * (1536 * (128 + 64) + 512 * (128 + 128) + 128 * hidden)
    )  # fmt: skip
    sparse = 257 * 3 * hidden * 2048 + 256 * hidden + 256
    model = 61 * (attention + 2 * hidden) + 3 * 3 * hidden * 18432 + 58 * sparse
    assert c[0].model_bytes == 2 * (model + 2 * 129280 * hidden + hidden)


def test_one_rank_of_1024_plans_its_part_in_seconds() -> None:
    groups = build_groups(
        model_shape(DEEPSEEK_V3), parse_mesh("train", "tp=1,pp=16,dp=64,ep=64"),
        parse_mesh("rollout", "tp=8,dp=128,ep=64"), max_item_bytes=2**25, element_size=2,
    )  # fmt: skip
    out: list[int] = []
    seconds = cpu_seconds(
        lambda: out.append(len(rank_operations(groups, 777, world_size=1024, gpus_per_node=8)))
    )
    assert seconds < 3
    assert out[0] > 1000
