from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data import DataError, assign, pack
from megarl.types import Sample


def make_sample(num_prompt: int, num_response: int, seed: int = 0) -> Sample:
    rng = random.Random(seed)
    return Sample(
        group=0,
        index=0,
        prompt_ids=[rng.randrange(1, 100) for _ in range(num_prompt)],
        response_ids=[rng.randrange(1, 100) for _ in range(num_response)],
        rollout_log_probs=[-rng.random() for _ in range(num_response)],
        finish_reason="stop",
        weight_version=0,
    )


def test_pack_lays_out_two_samples_and_the_padding_tail() -> None:
    a = Sample(group=0, index=0, prompt_ids=[5, 6], response_ids=[7], rollout_log_probs=[-0.5],
               finish_reason="stop", weight_version=0)  # fmt: skip
    b = Sample(
        group=1,
        index=0,
        prompt_ids=[8],
        response_ids=[9, 10],
        rollout_log_probs=[-1.0, -2.0],
        finish_reason="length",
        weight_version=0,
    )
    batch = pack([a, b], [1, 0], multiple=4)
    assert batch.input_ids.tolist() == [8, 9, 10, 5, 6, 7, 0, 0]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 3, 6, 8]
    assert batch.response_mask.tolist() == [0, 1, 1, 0, 0, 1, 0, 0]
    assert batch.sample_index.tolist() == [1, 0, -1]
    assert batch.rollout_log_probs is not None
    assert batch.rollout_log_probs.tolist() == [0, -1, -2, 0, 0, -0.5, 0, 0]
    assert (
        batch.input_ids.dtype == batch.position_ids.dtype == batch.sample_index.dtype == torch.int64
    )
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.response_mask.dtype == batch.rollout_log_probs.dtype == torch.float32


def test_no_tail_where_the_tokens_already_divide() -> None:
    batch = pack({7: make_sample(2, 2)}, [7], multiple=4)
    assert batch.sample_index.tolist() == [7]
    assert batch.cu_seqlens.tolist() == [0, 4]


@pytest.mark.parametrize(("multiple", "num_tokens"), [(1, 2), (2, 2), (8, 8)])
def test_empty_micro_batch_is_one_padding_sequence(multiple: int, num_tokens: int) -> None:
    batch = pack([], [], multiple=multiple)
    assert batch.input_ids.tolist() == [0] * num_tokens
    assert batch.cu_seqlens.tolist() == [0, num_tokens]
    assert batch.sample_index.tolist() == [-1]
    assert batch.response_mask.sum() == 0


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=8),
    st.integers(1, 8),
    st.randoms(),
)
def test_pack_round_trips(shapes: list[tuple[int, int]], multiple: int, rng: random.Random) -> None:
    samples = [make_sample(p, r, seed) for seed, (p, r) in enumerate(shapes)]
    positions = list(range(len(samples)))
    rng.shuffle(positions)
    batch = pack(samples, positions, multiple=multiple)
    num_real = sum(s.num_tokens for s in samples)
    assert batch.num_tokens == (
        -(-num_real // multiple) * multiple if samples else max(2, multiple)
    )
    assert batch.cu_seqlens[-1] == batch.num_tokens
    assert batch.rollout_log_probs is not None
    kept = []
    for s in range(batch.num_sequences):
        span = slice(int(batch.cu_seqlens[s]), int(batch.cu_seqlens[s + 1]))
        position = int(batch.sample_index[s])
        trained = batch.response_mask[span].bool()
        assert batch.position_ids[span].tolist() == list(range(span.stop - span.start))
        if position < 0:
            assert not trained.any()
            continue
        kept.append(position)
        assert batch.input_ids[span][trained].tolist() == samples[position].response_ids
        assert batch.input_ids[span][~trained].tolist() == samples[position].prompt_ids
        expected = torch.tensor(samples[position].rollout_log_probs, dtype=torch.float32)
        torch.testing.assert_close(batch.rollout_log_probs[span][trained], expected, rtol=0, atol=0)
    assert kept == positions


@settings(max_examples=200)
@given(
    st.lists(st.integers(1, 64), max_size=40),
    st.integers(1, 5),
    st.integers(64, 200),
    st.sampled_from([1, 2, 4, 8]),
)
def test_assignment_covers_every_sample_once_within_the_limit(
    lengths: list[int], num_parts: int, max_tokens: int, multiple: int
) -> None:
    plan = assign(
        lengths, num_parts=num_parts, max_tokens=max_tokens, multiple=multiple, hidden_size=16
    )
    assert len(plan.parts) == num_parts
    assert {len(part) for part in plan.parts} == {plan.num_microbatches}
    assert plan.num_microbatches >= 1
    assert sorted(i for part in plan.parts for batch in part for i in batch) == list(
        range(len(lengths))
    )
    packed = 0
    for part in plan.parts:
        for batch in part:
            assert batch == sorted(batch)
            tokens = sum(lengths[i] for i in batch)
            padded = -(-tokens // multiple) * multiple if tokens else max(2, multiple)
            assert padded <= max_tokens
            packed += padded
        # Empty micro-batches only where a rank has fewer samples than micro-batches.
        if sum(map(len, part)) >= plan.num_microbatches:
            assert all(part)
    assert plan.padding_frac == pytest.approx(1 - sum(lengths) / packed)
    assert plan.imbalance >= 1 - 1e-9
    # First-fit decreasing needs at most 11/9 of the optimum + 1, and the optimum is not below total
    # / limit.
    if num_parts == 1 and lengths:
        assert plan.num_microbatches <= sum(lengths) / (max_tokens // multiple * multiple) * 2 + 1


@given(st.lists(st.integers(1, 64), max_size=30), st.integers(1, 4), st.randoms())
def test_lengths_of_the_micro_batches_do_not_depend_on_the_order_of_the_samples(
    lengths: list[int], num_parts: int, rng: random.Random
) -> None:
    def contents(values: list[int]) -> list[list[list[int]]]:
        plan = assign(values, num_parts=num_parts, max_tokens=100, hidden_size=16)
        return [sorted(sorted(values[i] for i in batch) for batch in part) for part in plan.parts]

    shuffled = list(lengths)
    rng.shuffle(shuffled)
    assert contents(shuffled) == contents(lengths)


def test_assignment_balances_ranks_and_micro_batches() -> None:
    # Two ranks of 200 tokens; a rank needs two micro-batches of at most 100.
    plan = assign([50] * 8, num_parts=2, max_tokens=100, hidden_size=16)
    assert [[sum(50 for _ in batch) for batch in part] for part in plan.parts] == [
        [100, 100],
        [100, 100],
    ]
    assert plan.imbalance == 1.0
    assert plan.padding_frac == 0.0


def test_rank_with_one_long_sample_gets_an_empty_micro_batch_when_others_need_two() -> None:
    plan = assign([90, 45, 46], num_parts=2, max_tokens=90, hidden_size=10**9)
    assert plan.parts == [[[2], [1]], [[0], []]]
    assert plan.padding_frac == pytest.approx(2 / 183)


def test_one_rank_without_samples_still_takes_part() -> None:
    plan = assign([5], num_parts=2, max_tokens=10, multiple=4, hidden_size=8)
    assert sorted(plan.parts) == [[[]], [[0]]]
    assert assign([], num_parts=2, max_tokens=10, hidden_size=8).parts == [[[]], [[]]]


def test_sample_longer_than_a_micro_batch_is_refused_with_a_remedy() -> None:
    with pytest.raises(DataError) as error:
        assign([3, 99], num_parts=1, max_tokens=99, multiple=2, hidden_size=8)
    assert str(error.value) == (
        "sample 1 has 99 tokens, a micro-batch holds 98; raise trainer.max_tokens_per_microbatch "
        "or lower "
        "data.max_prompt_tokens or rollout.max_new_tokens"
    )
