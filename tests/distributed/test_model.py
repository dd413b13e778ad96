"""MegatronModel beyond parity of layouts: packing, what is scored, guards, dtypes, stages."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.pool import WorkerPool, groups_of
from distributed.tiny import (
    frozen,
    hf_scores,
    loss_fn,
    make_batch,
    make_batches,
    make_model,
    trainable,
)

from megarl.config.schema import ModelConfig, OptimConfig
from megarl.models import MegatronModel
from megarl.types import TokenScores, TrainBatch

pytestmark = pytest.mark.distributed
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("models") / "m", "qwen3", tied=True)


def packed_and_alone(path: str) -> list[tuple[TokenScores, list[TokenScores]]]:
    model = frozen(path)
    out = []
    for batch in make_batches():
        bounds = batch.cu_seqlens.tolist()
        alone = [
            TrainBatch(
                input_ids=batch.input_ids[a:b], position_ids=torch.arange(b - a),
                cu_seqlens=torch.tensor([0, b - a], dtype=torch.int32),
                response_mask=torch.ones(b - a), sample_index=torch.zeros(1, dtype=torch.int64),
            )
            for a, b in pairwise(bounds)
        ]  # fmt: skip
        packed = model.score([batch], temperature=1.0, with_entropy=True)[0]
        out.append((packed, model.score(alone, temperature=1.0, with_entropy=True)))
    return out


def test_packed_sequences_score_like_the_same_sequences_alone(
    folder: str, pool1: WorkerPool
) -> None:
    for packed, alone in pool1.run(packed_and_alone, path=folder)[0]:
        for name in ("log_probs", "entropy"):
            want = torch.cat([getattr(s, name) for s in alone])
            torch.testing.assert_close(getattr(packed, name), want, rtol=0, atol=2e-6)


def score_two(path: str) -> list[TokenScores]:
    model, batch = frozen(path), make_batch([4, 1, 6], seed=0, multiple=8)
    return [model.score([batch], temperature=1.0, with_entropy=flag)[0] for flag in (True, False)]


def test_first_tokens_and_padding_starts_have_zero_scores_and_entropy_can_be_left_out(
    folder: str, pool1: WorkerPool
) -> None:
    full, fast = pool1.run(score_two, path=folder)[0]
    assert full.log_probs.shape == (16,)
    for at in (0, 4, 5, 11):
        assert full.log_probs[at] == 0
        assert full.entropy[at] == 0
    for at in (1, 3, 6, 10):
        assert full.log_probs[at] < 0
        assert full.entropy[at] > 0
    assert torch.equal(full.log_probs, fast.log_probs)
    assert torch.equal(fast.entropy, torch.zeros(16))


def score_trained(path: str, layout: dict[str, Any]) -> list[tuple[TokenScores, TokenScores]]:
    model, batches = frozen(path, layout), make_batches(multiple=2)
    batches[1].response_mask.zero_()  # a micro-batch without a trained token
    full, part = (
        model.score(batches, temperature=1.0, with_entropy=True, only_trained=flag)
        for flag in (False, True)
    )
    return list(zip(full, part, strict=True))


@pytest.mark.parametrize(("size", "layout"), [(1, {}), (2, {"tp": 2, "sequence_parallel": True})])
def test_scoring_only_trained_tokens_leaves_zeros_elsewhere(
    size: int, layout: dict[str, Any], folder: str, request: pytest.FixtureRequest
) -> None:
    pool = request.getfixturevalue(f"pool{size}")
    for result in pool.run(score_trained, path=folder, layout=layout):
        for i, ((full, part), batch) in enumerate(
            zip(result, make_batches(multiple=2), strict=True)
        ):
            mask = batch.response_mask if i != 1 else torch.zeros(batch.num_tokens)
            for name in ("log_probs", "entropy"):
                want = getattr(full, name) * mask
                # matrix products of another height may sum in another order
                torch.testing.assert_close(getattr(part, name), want, rtol=0, atol=2e-6)
                assert torch.equal(
                    getattr(part, name)[mask == 0], torch.zeros(int((mask == 0).sum()))
                )


def all_masked_gradient(path: str) -> float:
    """Gradient norm when one of the micro-batches, and then all of them, have no trained token."""
    model, batches = trainable(path, lr=1e-30), make_batches()
    for batch in batches[1:]:
        batch.response_mask.zero_()
    model.forward_backward(batches, loss_fn, temperature=1.0)
    norm = model.step().grad_norm
    model.forward_backward(batches[:1], loss_fn, temperature=1.0)
    assert model.step().grad_norm == pytest.approx(norm, rel=1e-6)
    model.forward_backward(batches[1:], loss_fn, temperature=1.0)
    assert model.step().grad_norm == 0.0
    return norm


def test_micro_batches_without_trained_tokens_add_nothing(folder: str, pool1: WorkerPool) -> None:
    assert pool1.run(all_masked_gradient, path=folder)[0] > 0.01


def rope_scores(path: str) -> TokenScores:
    return frozen(path).score([make_batch([100], seed=3)], temperature=1.0)[0]


def test_llama3_rope_scaling_equals_hugging_face_and_matters(
    tmp_path: Path, pool1: WorkerPool
) -> None:
    from transformers import AutoModelForCausalLM

    rope = {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 32.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    # head_dim 16: half of the eight wavelengths are long enough to be scaled
    folder = make_model(tmp_path / "m", "llama", tied=False, head_dim=16, rope_parameters=rope)
    got = pool1.run(rope_scores, path=folder)[0].log_probs
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        want = hf_scores(model, make_batch([100], seed=3), 1.0).log_probs
        model.model.rotary_emb.inv_freq = 10000.0 ** -(torch.arange(0, 16, 2) / 16)
        unscaled = hf_scores(model, make_batch([100], seed=3), 1.0).log_probs
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    assert (unscaled - want).abs().max() > 1e-3


def weights_of(model: MegatronModel) -> dict[str, torch.Tensor]:
    return {n: p.clone() for n, p in model.named_parameters().items()}


def step_on_nan(path: str, layout: dict[str, Any]) -> list[tuple[float, bool, bool]]:
    """(norm, is_finite, did weights change) after a NaN on one dp rank, then after a good step."""
    model = trainable(path, layout)
    out = []
    for poison in (True, False):
        before = weights_of(model)

        def loss(scores: TokenScores, batch: TrainBatch, poison: bool = poison) -> Any:
            value, extra = loss_fn(scores, batch)
            is_poisoned = poison and model.groups.coordinate.dp == 0
            return value * (torch.nan if is_poisoned else 1.0), extra

        model.forward_backward(make_batches(multiple=2), loss, temperature=1.0)
        stats = model.step()
        changed = any(not torch.equal(p, before[n]) for n, p in model.named_parameters().items())
        out.append((stats.grad_norm, stats.is_finite, changed))
    return out


@pytest.mark.parametrize(("size", "layout"), [(1, {}), (2, {"dp": 2}), (4, {"tp": 2, "pp": 2})])
def test_a_nan_gradient_changes_no_weight_on_any_rank_and_the_next_step_works(
    size: int, layout: dict[str, Any], folder: str, request: pytest.FixtureRequest
) -> None:
    for bad, good in request.getfixturevalue(f"pool{size}").run(
        step_on_nan, path=folder, layout=layout
    ):
        assert bad[0] != bad[0]
        assert bad[1:] == (False, False)
        assert good[0] > 0
        assert good[1:] == (True, True)


def zero_loss(path: str) -> tuple[float, bool]:
    model = trainable(path)
    before = weights_of(model)

    def loss(scores: TokenScores, batch: TrainBatch) -> Any:
        return torch.zeros(()), {"n": torch.ones(1)}

    values = model.forward_backward(make_batches(), loss, temperature=1.0)
    assert sum(float(v["n"]) for v in values) == 4
    stats = model.step()
    return stats.grad_norm, all(
        torch.equal(p, before[n]) for n, p in model.named_parameters().items()
    )


def test_a_loss_without_graph_gives_a_zero_gradient(folder: str, pool1: WorkerPool) -> None:
    assert pool1.run(zero_loss, path=folder)[0] == (0.0, True)


def decay_only(path: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights before and after a step whose gradient is zero: only weight decay is left."""
    optim = OptimConfig(lr=0.1, weight_decay=0.5, num_warmup_steps=2)
    model = MegatronModel.build(ModelConfig(path=path), groups_of(), device=CPU, trainable=optim)
    before = weights_of(model)
    model.forward_backward(
        make_batches(), lambda s, b: (0.0 * s.log_probs.sum(), {}), temperature=1.0
    )
    assert model.step().lr == 0.05  # half way through the warm-up
    return before, weights_of(model)


def test_weight_decay_follows_the_learning_rate_and_spares_norms_and_biases(
    tmp_path: Path, pool1: WorkerPool
) -> None:
    folder = make_model(tmp_path / "m", "qwen2", tied=True)
    before, after = pool1.run(decay_only, path=folder)[0]
    assert any(n.endswith(".bias") for n in before)
    for name, tensor in before.items():
        scale = 1.0 if tensor.dim() == 1 else 1 - 0.05 * 0.5
        torch.testing.assert_close(after[name], tensor * scale, rtol=1e-6, atol=0, msg=name)


def repeat(path: str) -> list[float]:
    """Gradient norms of the same batches twice, then doubled, at weights that do not move."""
    model = trainable(path, lr=1e-30)
    norms = []
    for copies in (1, 1, 2):
        model.forward_backward(make_batches() * copies, loss_fn, temperature=1.0)
        norms.append(model.step().grad_norm)
    return norms


def test_gradients_are_zeroed_first_and_micro_batches_are_summed(
    folder: str, pool1: WorkerPool
) -> None:
    first, again, doubled = pool1.run(repeat, path=folder)[0]
    assert again == first
    assert doubled == pytest.approx(2 * first, rel=1e-6)


def bfloat16_run(
    path: str, layout: dict[str, Any]
) -> tuple[list[TokenScores], list[float], list[str]]:
    model = trainable(path, layout, dtype="bfloat16", lr=1e-2)
    batches = make_batches(multiple=2)
    scores = model.score(batches, temperature=1.0, with_entropy=True)
    losses = []
    for _ in range(6):
        values = model.forward_backward(batches, loss_fn, temperature=1.0)
        losses.append(sum(float(v["loss"]) for v in values))
        assert model.step().is_finite
    return scores, losses, sorted({str(p.dtype) for p in model.named_parameters().values()})


@pytest.mark.parametrize(
    ("size", "layout"), [(1, {}), (4, {"tp": 2, "pp": 2, "sequence_parallel": True})]
)
def test_bfloat16_scores_are_near_float32_and_training_lowers_the_loss(
    size: int,
    layout: dict[str, Any],
    folder: str,
    pool1: WorkerPool,
    request: pytest.FixtureRequest,
) -> None:
    exact = pool1.run(exact_scores, path=folder)[0]
    results = request.getfixturevalue(f"pool{size}").run(bfloat16_run, path=folder, layout=layout)
    for scores, losses, dtypes in results:
        assert dtypes == ["torch.bfloat16"]
        assert losses[-1] < losses[0] - 0.1
        assert losses == results[0][1]
        for got, want in zip(scores, exact, strict=True):
            assert got.log_probs.dtype == torch.float32
            # 8 bits of mantissa through three layers, on logits of size ~5
            assert (got.log_probs - want.log_probs).abs().max() < 0.25
            assert (got.log_probs - want.log_probs).abs().mean() < 0.04


def exact_scores(path: str) -> list[TokenScores]:
    return frozen(path).score(make_batches(multiple=2), temperature=1.0, with_entropy=True)


def five_layers(path: str) -> list[torch.Tensor]:
    return [s.log_probs for s in frozen(path, {"pp": 4}).score(make_batches(), temperature=1.0)]


def test_four_stages_of_unequal_size_score_like_hugging_face(
    tmp_path: Path, pool4: WorkerPool
) -> None:
    from transformers import AutoModelForCausalLM

    folder = make_model(tmp_path / "m", "llama", tied=True, num_layers=5)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        want = [hf_scores(model, b, 1.0).log_probs for b in make_batches()]
    for result in pool4.run(five_layers, path=folder):
        for got, truth in zip(result, want, strict=True):
            torch.testing.assert_close(got, truth, rtol=0, atol=1e-5)
