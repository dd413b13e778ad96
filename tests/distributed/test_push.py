"""The weight push between real models: Megatron shards in, an in-process engine out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.pool import groups_of
from distributed.tiny import make_model

from megarl.config.schema import ModelConfig, OptimConfig, RolloutConfig
from megarl.models import MegatronModel
from megarl.parallel import PeerFailure
from megarl.reshard import WeightPush
from megarl.rollout import (
    GenerationRequest,
    SamplingParams,
    WeightSyncError,
    digest,
    engine_weight_layout,
)
from megarl.rollout.hf_engine import HFEngine
from megarl.types import TrainBatch

pytestmark = pytest.mark.distributed
PROMPT = [5, 17, 80, 3]


class CorruptingEngine(HFEngine):
    """Damages one element on arrival, as a broken transport would."""

    def update_weights(self, shards: Any) -> None:
        name = next(iter(shards[0]))
        damaged = shards[0][name].clone()
        damaged.view(-1)[0] += 1e-3
        super().update_weights([{**shards[0], name: damaged}])


class ForgetfulEngine(HFEngine):
    """Loses a parameter, as a partial push would."""

    def update_weights(self, shards: Any) -> None:
        super().update_weights([{k: v for k, v in shards[0].items() if "norm" not in k}])


def build(
    folder: str, engine_class: type[HFEngine], **layout: Any
) -> tuple[MegatronModel, HFEngine, WeightPush]:
    actor = MegatronModel.build(
        ModelConfig(path=folder), groups_of(**layout), device=torch.device("cpu"),
        trainable=OptimConfig(lr=1e-2), num_steps=3,
    )  # fmt: skip
    config = RolloutConfig(engine="hf")
    engine = engine_class(config, model_path=folder, dtype="float32")
    alone = [dist.new_group([r]) for r in range(dist.get_world_size())][dist.get_rank()]
    push = WeightPush(
        actor.weight_layout(), engine_weight_layout(config, model_path=folder, tp_rank=0),
        replica_group=alone, engine=engine, export_shard=HFEngine.export_shard, digest=digest,
        dtype=torch.float32, device=torch.device("cpu"), max_window_bytes=20_000,
    )  # fmt: skip
    return actor, engine, push


def train_once(actor: MegatronModel, batch: TrainBatch) -> None:
    def loss_fn(scores: Any, batch: TrainBatch) -> Any:
        return -(scores.log_probs * batch.response_mask).sum(), {}

    actor.forward_backward([batch], loss_fn, temperature=1.0)
    actor.step()


def batch_of(ids: list[int], prompt: int) -> TrainBatch:
    n = len(ids)
    return TrainBatch(
        input_ids=torch.tensor(ids),
        position_ids=torch.arange(n),
        cu_seqlens=torch.tensor([0, n], dtype=torch.int32),
        response_mask=torch.tensor([0.0] * prompt + [1.0] * (n - prompt)),
        sample_index=torch.tensor([0]),
    )


def greedy(engine: HFEngine) -> tuple[list[int], list[float]]:
    sampling = SamplingParams(max_new_tokens=8, temperature=0.0)
    [(_, [done])] = list(engine.generate([GenerationRequest(key=0, prompt_ids=PROMPT)], sampling))
    return done.response_ids, done.log_probs


def push_and_compare(folder: str, layout: dict[str, int]) -> dict[str, Any]:
    actor, engine, push = build(folder, HFEngine, **layout)
    before = greedy(engine)[1]
    train_once(actor, batch_of([*PROMPT, 9, 9, 9, 9], len(PROMPT)))
    stats = push.push(actor.named_parameters(), version=1, must_change=True)
    ids, log_probs = greedy(engine)
    whole = batch_of([*PROMPT, *ids], len(PROMPT))
    scores = actor.score([whole], temperature=1.0)[0].log_probs[len(PROMPT) :]
    return {
        "diff": float((scores - torch.tensor(log_probs)).abs().max()),
        "moved": abs(before[0] - log_probs[0]),
        "version": engine.weight_version,
        "windows": stats.num_windows,
        "changed": stats.num_changed,
        "bytes": stats.sent_bytes,
    }


@pytest.mark.parametrize("tied", [True, False])
def test_after_a_push_the_engine_says_what_the_trainer_says(
    pool4: Any, tmp_path: Path, tied: bool
) -> None:
    folder = make_model(tmp_path / "model", "qwen3", tied=tied, num_layers=4)
    for out in pool4.run(push_and_compare, folder=folder, layout={"tp": 2, "pp": 2}):
        assert out["diff"] < 1e-5
        assert out["moved"] > 1e-3
        assert out["version"] == 1
        assert out["windows"] > 2
        assert out["changed"] > 0


def expect_refusal(folder: str, kind: str) -> str:
    classes = {"corrupted": CorruptingEngine, "partial": ForgetfulEngine, "stale": HFEngine}
    # only rank 1's engine is bad: rank 0 must stop as well
    engine_class = classes[kind] if dist.get_rank() == 1 or kind == "stale" else HFEngine
    actor, _, push = build(folder, engine_class, tp=2)
    if kind == "stale":
        push.push(actor.named_parameters(), version=1, must_change=False)
    try:
        push.push(actor.named_parameters(), version=2, must_change=kind == "stale")
    except (WeightSyncError, PeerFailure) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("corrupted", "differ from what was sent"),
        ("partial", "partial push"),
        ("stale", "changed no weight"),
    ],
)
def test_a_bad_push_stops_every_rank(pool2: Any, tmp_path: Path, kind: str, message: str) -> None:
    folder = make_model(tmp_path / "model", "llama", tied=False)
    first, second = pool2.run(expect_refusal, folder=folder, kind=kind)
    assert second.startswith("WeightSyncError")
    assert message in first
    assert message in second
