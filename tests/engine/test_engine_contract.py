"""What every rollout engine must do, checked on each against Hugging Face's forward pass."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import tiny_models
import torch

from megarl.rollout import (
    Completion,
    GenerationRequest,
    RolloutEngine,
    RolloutError,
    SamplingParams,
    WeightSyncError,
    digest,
)

PROMPTS = tiny_models.prompts(6)
TOLERANCE = 1e-4  # float32: two orders of the same sums over 200 logits differ by a few 1e-6


def generate(
    engine: RolloutEngine,
    prompts: list[list[int]] | None = None,
    *,
    seed: int = 0,
    **sampling: object,
) -> list[list[Completion]]:
    """Completions in the order of the prompts."""
    prompts = PROMPTS if prompts is None else prompts
    requests = (
        GenerationRequest(key=i, prompt_ids=p, seed=seed + i) for i, p in enumerate(prompts)
    )
    results = dict(engine.generate(requests, SamplingParams(**{"max_new_tokens": 16, **sampling})))
    assert sorted(results) == list(range(len(prompts)))
    return [results[i] for i in range(len(prompts))]


def require_log_probs_of(path: str, results: list[list[Completion]], temperature: float) -> None:
    model = tiny_models.load(path)
    for prompt, completions in zip(PROMPTS, results, strict=True):
        for c in completions:
            truth = tiny_models.true_log_probs(model, prompt, c.response_ids, temperature)
            assert c.log_probs == pytest.approx(truth, abs=TOLERANCE)


@pytest.fixture
def restored(engine: RolloutEngine, model_a: str) -> Iterator[RolloutEngine]:
    """The engine; afterwards it gets model A back."""
    yield engine
    tiny_models.push(engine, model_a, version=0)


# ---- generation


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_the_model_at_the_sampling_temperature(
    engine: RolloutEngine, model_a: str, temperature: float
) -> None:
    results = generate(engine, temperature=temperature, num_samples=2)
    require_log_probs_of(model_a, results, temperature)


def test_greedy_is_the_likeliest_continuation_with_log_probs_at_temperature_one(
    engine: RolloutEngine, model_a: str
) -> None:
    results = generate(engine, temperature=0.0)
    model = tiny_models.load(model_a)
    for prompt, (completion,) in zip(PROMPTS, results, strict=True):
        assert completion.response_ids == tiny_models.greedy(model, prompt, 16)
    require_log_probs_of(model_a, results, 1.0)


def test_log_probs_are_taken_before_top_p_and_top_k(engine: RolloutEngine, model_a: str) -> None:
    results = generate(engine, temperature=0.7, top_p=0.5, top_k=5, num_samples=2)
    require_log_probs_of(model_a, results, 0.7)


def test_samples_of_one_prompt_are_independent_draws(engine: RolloutEngine) -> None:
    for completions in generate(engine, num_samples=4):
        assert len(completions) == 4
        assert len({tuple(c.response_ids) for c in completions}) == 4


def test_sampled_tokens_follow_the_model_distribution(engine: RolloutEngine, model_a: str) -> None:
    prompt = PROMPTS[0]
    with torch.no_grad():
        logits = tiny_models.load(model_a)(torch.tensor([prompt])).logits[0, -1]
    probs = logits.double().softmax(-1)
    results = generate(engine, [prompt] * 50, num_samples=8, max_new_tokens=1)
    counts = torch.zeros(len(probs), dtype=torch.double)
    for completions in results:
        for c in completions:
            counts[c.response_ids[0]] += 1
    top = probs.argsort(descending=True)[:5]
    sigma = (probs[top] * (1 - probs[top]) * 400).sqrt()
    assert ((counts[top] - 400 * probs[top]).abs() < 5 * sigma).all()


def test_same_seed_same_samples_whatever_else_is_in_the_batch(engine: RolloutEngine) -> None:
    together = generate(engine, num_samples=2, seed=3)
    again = generate(engine, num_samples=2, seed=3)
    alone = generate(engine, PROMPTS[:1], num_samples=2, seed=3)
    ids = [[c.response_ids for c in cs] for cs in together]
    assert [[c.response_ids for c in cs] for cs in again] == ids
    assert [c.response_ids for c in alone[0]] == ids[0]


def test_other_seeds_give_other_samples(engine: RolloutEngine) -> None:
    first, second = generate(engine, seed=3), generate(engine, seed=1003)
    assert [c[0].response_ids for c in first] != [c[0].response_ids for c in second]


def test_length_ends_a_response_at_max_new_tokens(engine: RolloutEngine) -> None:
    for (completion,) in generate(engine, max_new_tokens=3):
        if completion.finish_reason == "length":
            assert len(completion.response_ids) == 3
        else:
            assert completion.response_ids[-1] == tiny_models.EOS
    assert any(c.finish_reason == "length" for (c,) in generate(engine, max_new_tokens=3))


def test_a_stop_token_is_the_last_id_of_the_response_it_ends(engine: RolloutEngine) -> None:
    (free,) = generate(engine, PROMPTS[:1], temperature=0.0)[0]
    stop = free.response_ids[4]
    (stopped,) = generate(engine, PROMPTS[:1], temperature=0.0, stop_token_ids=(stop,))[0]
    first = free.response_ids.index(stop)
    assert stopped.response_ids == free.response_ids[: first + 1]
    assert stopped.finish_reason == "stop"
    assert len(stopped.log_probs) == first + 1


def test_the_models_end_of_sequence_id_ends_a_response(engine: RolloutEngine) -> None:
    results = generate(engine, PROMPTS * 4, num_samples=4, max_new_tokens=64, temperature=1.5)
    ended = [c for cs in results for c in cs if c.finish_reason == "stop"]
    assert ended
    assert all(c.response_ids.index(tiny_models.EOS) == len(c.response_ids) - 1 for c in ended)


def test_top_k_keeps_only_the_likeliest_tokens(engine: RolloutEngine, model_a: str) -> None:
    results = generate(engine, num_samples=4, top_k=2, temperature=2.0)
    model = tiny_models.load(model_a)
    for prompt, completions in zip(PROMPTS, results, strict=True):
        for c in completions:
            with torch.no_grad():
                logits = model(torch.tensor([prompt + c.response_ids])).logits[0]
            for i, token in enumerate(c.response_ids):
                row = logits[len(prompt) - 1 + i]
                assert (row > row[token]).sum() < 2


def test_top_p_keeps_only_the_nucleus(engine: RolloutEngine, model_a: str) -> None:
    results = generate(engine, num_samples=4, top_p=0.3)
    model = tiny_models.load(model_a)
    for prompt, completions in zip(PROMPTS, results, strict=True):
        for c in completions:
            with torch.no_grad():
                probs = model(torch.tensor([prompt + c.response_ids])).logits[0].softmax(-1)
            for i, token in enumerate(c.response_ids):
                row = probs[len(prompt) - 1 + i]
                assert float(row[row > row[token]].sum()) <= 0.3 + 1e-4


def test_prompts_are_taken_only_when_there_is_room(engine: RolloutEngine) -> None:
    taken = []

    def source() -> Iterator[GenerationRequest]:
        for i in range(12):
            taken.append(i)
            yield GenerationRequest(key=i, prompt_ids=PROMPTS[0], seed=i)

    stream = engine.generate(source(), SamplingParams(max_new_tokens=8, num_samples=8))
    assert taken == []
    next(stream)
    assert len(taken) <= 4  # 16 running requests, 8 samples: two prompts at once
    rest = list(stream)
    assert len(rest) == 11
    assert taken == list(range(12))


def test_abort_returns_what_is_running_and_takes_no_more_prompts(engine: RolloutEngine) -> None:
    requests = (GenerationRequest(key=i, prompt_ids=PROMPTS[i % 6], seed=i) for i in range(1000))
    finished = 0
    for _, completions in engine.generate(
        requests, SamplingParams(max_new_tokens=100, num_samples=8)
    ):
        engine.abort()
        finished += 1
        for c in completions:
            assert len(c.log_probs) == len(c.response_ids)
            assert c.finish_reason in ("stop", "length", "abort")
    assert finished <= 4
    generate(engine)


def test_abort_from_another_thread_ends_a_running_response(engine: RolloutEngine) -> None:
    import threading

    requests = [GenerationRequest(key=0, prompt_ids=PROMPTS[0])]
    sampling = SamplingParams(max_new_tokens=450, num_samples=16, temperature=1.0)
    timer = threading.Timer(0.05, engine.abort)
    stream = engine.generate(requests, sampling)
    timer.start()
    ((_, completions),) = list(stream)
    assert "abort" in {c.finish_reason for c in completions}


def test_a_generation_left_early_does_not_disturb_the_next(
    engine: RolloutEngine, model_a: str
) -> None:
    requests = (GenerationRequest(key=i, prompt_ids=PROMPTS[i], seed=i) for i in range(6))
    stream = engine.generate(requests, SamplingParams(max_new_tokens=64))
    next(stream)
    stream.close()
    require_log_probs_of(model_a, generate(engine, temperature=1.0), 1.0)


def test_a_prompt_longer_than_the_context_is_refused_by_name(engine: RolloutEngine) -> None:
    with pytest.raises(RolloutError, match="prompt 0"):
        generate(engine, [[1] * 600])
    generate(engine)


# ---- weights


def test_pushed_weights_are_what_generates_and_their_digests_prove_it(
    restored: RolloutEngine, model_a: str, model_b: str
) -> None:
    before = generate(restored, temperature=0.0)
    (sent,) = tiny_models.push(restored, model_b, version=5)
    assert restored.checksums() == [{name: digest(t) for name, t in sent.items()}]
    assert restored.weight_version == 5
    after = generate(restored, temperature=0.0)
    assert [c[0].response_ids for c in after] != [c[0].response_ids for c in before]
    assert {c.weight_version for cs in after for c in cs} == {5}
    require_log_probs_of(model_b, after, 1.0)
    require_log_probs_of(model_b, generate(restored, temperature=0.7), 0.7)
    tiny_models.push(restored, model_a, version=6)
    back = generate(restored, temperature=0.0)
    assert [c[0].response_ids for c in back] == [c[0].response_ids for c in before]


def test_a_push_of_the_same_weights_leaves_the_digests(engine: RolloutEngine, model_a: str) -> None:
    before = engine.checksums()
    tiny_models.push(engine, model_a, version=0)
    assert engine.checksums() == before


def test_a_partial_push_is_refused_and_nothing_is_generated_until_a_whole_one(
    restored: RolloutEngine, model_a: str, model_b: str
) -> None:
    version = restored.weight_version
    shard = tiny_models.shard(restored.weight_layout(0), model_b)
    missing = shard.popitem()[0]
    restored.begin_update()
    restored.update_weights([shard])
    with pytest.raises(WeightSyncError, match=f"partial push: 1 of .*{missing}"):
        restored.end_update(99)
    assert restored.weight_version == version
    with pytest.raises(RolloutError, match="the last weight push failed"):
        generate(restored)
    tiny_models.push(restored, model_a, version=7)
    require_log_probs_of(model_a, generate(restored), 1.0)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model.norm.weight", torch.zeros(63), r"model.norm.weight .* \(63,\).*\(64,\)"),
        ("model.norm.weight", torch.zeros(64, dtype=torch.bfloat16), "bfloat16.*float32"),
        ("model.norm.wait", torch.zeros(64), "no parameter 'model.norm.wait'"),
    ],
)
def test_a_wrong_parameter_is_refused_with_its_name(
    restored: RolloutEngine, name: str, value: torch.Tensor, message: str
) -> None:
    restored.begin_update()
    with pytest.raises(WeightSyncError, match=message):
        restored.update_weights([{name: value}])
    with pytest.raises(WeightSyncError, match="partial"):
        restored.end_update(1)


def test_no_push_no_update(engine: RolloutEngine) -> None:
    with pytest.raises(WeightSyncError, match="no weight push is open"):
        engine.update_weights([{}])
    with pytest.raises(WeightSyncError, match="no weight push is open"):
        engine.end_update(1)


def test_nothing_is_generated_while_a_push_is_open(restored: RolloutEngine) -> None:
    restored.begin_update()
    with pytest.raises(RolloutError, match="a weight push is open"):
        generate(restored)
    with pytest.raises(WeightSyncError, match="already open"):
        restored.begin_update()
    with pytest.raises(WeightSyncError, match="partial"):
        restored.end_update(1)


def test_sleep_and_wake_keep_the_weights(engine: RolloutEngine) -> None:
    before, sums = generate(engine, temperature=0.0), engine.checksums()
    engine.sleep()
    engine.wake(["weights"])
    assert engine.checksums() == sums
    engine.wake(["kv_cache"])
    after = generate(engine, temperature=0.0)
    assert [c[0].response_ids for c in after] == [c[0].response_ids for c in before]


def test_every_log_prob_is_finite_and_not_positive(engine: RolloutEngine) -> None:
    for completions in generate(engine, num_samples=4, temperature=1.5):
        for c in completions:
            assert all(math.isfinite(x) and x <= 1e-6 for x in c.log_probs)
