"""Every layout computes what Hugging Face does on one process: scores, gradients, updates, export.

Limits. Layouts differ in the order of float32 sums only, so gradients are compared at 1e-6 of the
largest gradient between layouts, and at 1e-5 to Hugging Face, whose attention and norms sum in yet
another order. Parameters after three updates are compared with eps=1e-4: with a small eps Adam
turns rounding of near-zero gradients into full steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.pool import WorkerPool, groups_of
from distributed.tiny import hf_scores, loss_fn, make_batches, make_model
from safetensors.torch import load_file

from megarl.config.schema import ModelConfig, OptimConfig
from megarl.models import MegatronModel
from megarl.types import Box

pytestmark = pytest.mark.distributed

Piece = tuple[str, Box, torch.Tensor]
TEMPERATURE = 0.8
LAYOUTS = {
    "one": {},
    "tp2": {"tp": 2},
    "tp2_sp": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2},
    "dp2": {"dp": 2},
    "tp2_pp2": {"tp": 2, "pp": 2},
    "tp2_pp2_sp": {"tp": 2, "pp": 2, "sequence_parallel": True},
    "pp2_dp2": {"pp": 2, "dp": 2},
    "tp2_dp2_sp": {"tp": 2, "dp": 2, "sequence_parallel": True},
}
SPLIT = [name for name in LAYOUTS if name != "one"]
MODELS = [("llama", False), ("qwen2", True), ("qwen3", False), ("qwen3", True)]


@pytest.fixture(
    scope="session", params=MODELS, ids=lambda m: f"{m[0]}-{'tied' if m[1] else 'untied'}"
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three layers: two pipeline stages get unequal shares."""
    family, tied = request.param
    return make_model(tmp_path_factory.mktemp("models") / "m", family, tied=tied)


def build(path: str, layout: dict[str, Any], **model: Any) -> MegatronModel:
    optim = OptimConfig(lr=1e-3, eps=1e-4, clip_grad=1.0, weight_decay=0.1)
    return MegatronModel.build(
        ModelConfig(path=path, **model),
        groups_of(**layout),
        device=torch.device("cpu"),
        trainable=optim,
        num_steps=3,
    )


def own_batches(layout: dict[str, Any]) -> list[Any]:
    """This dp rank's share of the four micro-batches."""
    dp = layout.get("dp", 1)
    at = groups_of(**layout).coordinate.dp
    return make_batches(multiple=2)[at::dp]


def gradients(path: str, layout: dict[str, Any], recompute: str = "none") -> dict[str, Any]:
    """Loss over all dp ranks, the summed gradient as pieces of canonical tensors, and its norm."""
    model = build(path, layout, recompute=recompute)
    model.force_all_reduce = (
        True  # every dp rank keeps the whole sum, so that all of it is compared
    )
    values = model.forward_backward(own_batches(layout), loss_fn, temperature=TEMPERATURE)
    totals = torch.stack([torch.cat([v["loss"], v["num"]]) for v in values]).sum(0)
    dist.all_reduce(totals, group=model.groups.dp)
    grads = {n: p.main_grad.clone() for n, p in model._gpt.named_parameters()}
    pieces = [
        (p.canonical, p.source, grads[p.parameter][p.target.slices].clone())
        for p in model.weight_layout().placements
    ]
    return {"loss": totals[0], "num": totals[1], "pieces": pieces, "norm": model.step().grad_norm}


def whole(results: list[dict[str, Any]], shapes: dict[str, torch.Size]) -> dict[str, torch.Tensor]:
    """Canonical gradients from all ranks' pieces; replicas must agree with each other exactly."""
    tensors = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
    for name, box, piece in (p for r in results for p in r["pieces"]):
        view = tensors[name][box.slices]
        if not view.isnan().all():
            assert torch.equal(view, piece), f"two ranks hold different gradients of {name} {box}"
        view.copy_(piece)
    assert not any(t.isnan().any() for t in tensors.values()), (
        "an element has no gradient on any rank"
    )
    return tensors


def difference(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """Largest absolute difference over all tensors, relative to the largest absolute value."""
    assert set(got) == set(want)
    largest = max(float(w.abs().max()) for w in want.values())
    return max(float((got[n] - w).abs().max()) for n, w in want.items()) / largest


def hf_gradients(path: str) -> tuple[float, dict[str, torch.Tensor]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    total = torch.zeros(())
    for batch in make_batches(multiple=2):
        total = total + loss_fn(hf_scores(model, batch, TEMPERATURE), batch)[0]
    total.backward()
    return float(total.detach()), {n: p.grad for n, p in model.named_parameters()}


def pool_of(request: pytest.FixtureRequest, layout: dict[str, Any]) -> WorkerPool:
    size = layout.get("tp", 1) * layout.get("pp", 1) * layout.get("dp", 1)
    return request.getfixturevalue(f"pool{size}")


@pytest.fixture(scope="session")
def reference(folder: str, pool1: WorkerPool) -> dict[str, Any]:
    """Loss, gradients and norm on one process, checked against Hugging Face's autograd."""
    loss, grads = hf_gradients(folder)
    result = pool1.run(gradients, path=folder, layout={})
    ours = whole(result, {n: g.shape for n, g in grads.items()})
    assert difference(ours, grads) < 1e-5
    assert float(result[0]["loss"]) == pytest.approx(loss, rel=2e-6)
    assert float(result[0]["num"]) == sum(float(b.response_mask.sum()) for b in make_batches())
    norm = torch.cat([g.flatten() for g in grads.values()]).double().norm()
    assert result[0]["norm"] == pytest.approx(float(norm), rel=1e-5)
    return {"loss": float(result[0]["loss"]), "grads": ours, "norm": result[0]["norm"]}


@pytest.mark.parametrize("name", SPLIT)
def test_loss_gradients_and_norm_equal_one_process(
    name: str, folder: str, reference: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    results = pool_of(request, LAYOUTS[name]).run(gradients, path=folder, layout=LAYOUTS[name])
    got = whole(results, {n: g.shape for n, g in reference["grads"].items()})
    measured = difference(got, reference["grads"])
    print(f"{name}: gradient difference {measured:.1e}")
    assert measured < 1e-6
    for result in results:
        assert float(result["loss"]) == pytest.approx(reference["loss"], rel=1e-6)
        assert result["norm"] == pytest.approx(reference["norm"], rel=1e-6)
        assert result["norm"] == results[0]["norm"]


@pytest.mark.parametrize("name", ["one", "tp2_pp2_sp"])
def test_full_recomputation_gives_the_same_gradients(
    name: str, folder: str, reference: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    results = pool_of(request, LAYOUTS[name]).run(
        gradients, path=folder, layout=LAYOUTS[name], recompute="full"
    )
    got = whole(results, {n: g.shape for n, g in reference["grads"].items()})
    assert difference(got, reference["grads"]) < 1e-6


def scores(path: str, layout: dict[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    model = MegatronModel.build(
        ModelConfig(path=path), groups_of(**layout), device=torch.device("cpu"), trainable=None
    )
    assert not any(p.requires_grad for p in model._gpt.parameters())
    result = model.score(make_batches(multiple=2), temperature=TEMPERATURE, with_entropy=True)
    return [(s.log_probs, s.entropy) for s in result]


@pytest.mark.parametrize("name", ["tp2", "pp2", "tp2_pp2_sp"])
def test_scores_are_the_same_on_every_rank_and_equal_hugging_face(
    name: str, folder: str, request: pytest.FixtureRequest
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        want = [hf_scores(model, b, TEMPERATURE) for b in make_batches(multiple=2)]
    for result in pool_of(request, LAYOUTS[name]).run(scores, path=folder, layout=LAYOUTS[name]):
        for (log_probs, entropy), truth in zip(result, want, strict=True):
            torch.testing.assert_close(log_probs, truth.log_probs, rtol=0, atol=1e-5)
            torch.testing.assert_close(entropy, truth.entropy, rtol=0, atol=1e-5)


def train_and_export(path: str, layout: dict[str, Any], out: str) -> list[tuple[float, float]]:
    model = build(path, layout)
    stats = []
    for _ in range(3):
        model.forward_backward(own_batches(layout), loss_fn, temperature=TEMPERATURE)
        stats.append(model.step())
    model.save_hf(out)
    return [(s.grad_norm, s.lr) for s in stats]


@pytest.mark.parametrize("name", ["tp2_pp2", "dp2", "pp2_dp2", "tp2_dp2_sp"])
def test_parameters_after_three_updates_equal_one_process(
    name: str, folder: str, tmp_path: Path, pool1: WorkerPool, request: pytest.FixtureRequest
) -> None:
    want = pool1.run(train_and_export, path=folder, layout={}, out=str(tmp_path / "one"))
    got = pool_of(request, LAYOUTS[name]).run(
        train_and_export, path=folder, layout=LAYOUTS[name], out=str(tmp_path / "split")
    )
    for result in got:
        assert result == got[0]
        for (norm, lr), (norm_one, lr_one) in zip(result, want[0], strict=True):
            assert norm == pytest.approx(norm_one, rel=2e-6)
            assert lr == lr_one == 1e-3
    before, one, split = (
        load_file(p / "model.safetensors")
        for p in (Path(folder), tmp_path / "one", tmp_path / "split")
    )
    moved = max(float((one[n] - before[n]).abs().max()) for n in one)
    measured = max(float((one[n] - split[n]).abs().max()) for n in one)
    print(f"{name}: parameter difference {measured:.1e}, moved {moved:.1e}")
    assert moved > 1e-3
    assert measured < 2e-6


def export(path: str, layout: dict[str, Any], out: str) -> None:
    model = MegatronModel.build(
        ModelConfig(path=path), groups_of(**layout), device=torch.device("cpu"), trainable=None
    )
    model.save_hf(out)


@pytest.mark.parametrize("name", ["one", "tp2", "tp2_pp2", "pp2_dp2"])
def test_export_equals_the_imported_folder_bit_by_bit(
    name: str, folder: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    out = tmp_path / "out"
    pool_of(request, LAYOUTS[name]).run(export, path=folder, layout=LAYOUTS[name], out=str(out))
    before, after = (
        load_file(Path(folder) / "model.safetensors"),
        load_file(out / "model.safetensors"),
    )
    assert set(before) == set(after)
    for key, tensor in before.items():
        assert tensor.dtype == after[key].dtype
        assert torch.equal(tensor, after[key])
    assert (out / "config.json").read_bytes() == (Path(folder) / "config.json").read_bytes()
    assert not list(tmp_path.glob(".*")), "the temporary folder is gone"
