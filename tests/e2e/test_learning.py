"""The whole loop on real parts: Megatron under tp and pp, SGLang, real weight pushes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from e2e.conftest import ROOT
from e2e.launch import start
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.timeout(600)]


def metrics_of(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [r for r in rows if "update/loss" in r]


def grpo_args(model: Path, assets: Path, output: Path, *overrides: str) -> list[str]:
    return [
        "train", str(ROOT / "configs/grpo_demo_cpu.yaml"),
        f"trainer.output_dir={output}", f"model.path={model}",
        f"data.train_files=[{assets / 'train.parquet'}]",
        f"data.val_files=[{assets / 'test.parquet'}]",
        *overrides,
    ]  # fmt: skip


def test_accuracy_rises_with_tp2_training_and_two_sglang_replicas(
    warm_model: Path, assets: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    args = grpo_args(warm_model, assets, run, "trainer.num_steps=16", "trainer.eval_every=0")
    done = start(args, num_ranks=2, log=tmp_path / "log").finish(400)
    assert done.code == 0, done.output[-3000:]
    assert done.leftovers == []
    summary = json.loads((run / "summary.json").read_text())
    before, after = (e["value"] for e in (summary["evaluations"][0], summary["evaluations"][-1]))
    assert after >= before + 0.25
    for step, row in enumerate(metrics_of(run), start=1):
        assert row["rollout/log_prob_diff/max"] < 1e-4  # float32 rounding is about 1e-6
        assert row["update/ratio"] == pytest.approx(1.0, abs=1e-6)
        assert row["update/ppo_kl"] == pytest.approx(0.0, abs=1e-6)
        assert row["rollout/weight_version"] == step
        assert row["batch/padding_frac"] < 0.01
    sample = json.loads((run / "samples.jsonl").read_text().splitlines()[0])
    assert "has" in sample["prompt"]
    assert "####" in sample["response"]
    for name in ("config.yaml", "versions.json", "tensorboard"):
        assert (run / name).exists()
    model = AutoModelForCausalLM.from_pretrained(run / "final")
    assert model.config.num_hidden_layers == 4


def test_tp2_pp2_training_pushes_into_two_tp2_replicas(
    warm_model: Path, assets: Path, tmp_path: Path
) -> None:
    """Two minibatches, two epochs and a reference, so every kind of log-prob is used."""
    run = tmp_path / "run"
    args = grpo_args(
        warm_model, assets, run, "trainer.num_steps=2",
        "parallel={tp: 2, pp: 2, sequence_parallel: true}", "rollout.tp=2", "data.val_files=[]",
        "algorithm={kl_coef: 0.1, num_minibatches: 2, num_epochs: 2}",
        "optim.lr=1e-3", "trainer.max_tokens_per_microbatch=1024",
    )  # fmt: skip
    done = start(args, num_ranks=4, log=tmp_path / "log").finish(500)
    assert done.code == 0, done.output[-3000:]
    assert done.leftovers == []
    first, second = metrics_of(run)
    for row in (first, second):
        assert row["rollout/log_prob_diff/max"] < 1e-4  # the engine has the weights the trainer has
        assert row["batch/num_microbatches"] >= 2
    assert second["update/ref_kl"] != 0.0  # the actor moved away from its reference
    assert second["update/ratio"] != 1.0  # later minibatches are off-policy
