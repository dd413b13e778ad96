from __future__ import annotations

import math

import pytest
import torch

from megarl.algorithms.distribution import entropy, log_probs_of, sum_pi_squared
from megarl.algorithms.rewards import overlong_penalty, resample, resampling_weights
from megarl.algorithms.spans import mask_after_stop, truncate


def test_overlong_shaping_falls_over_the_cache_and_stays_at_minus_one() -> None:
    out = overlong_penalty(torch.tensor([0, 16, 17, 18, 20, 21]), max_length=20, cache=4)
    assert out.tolist() == [0, 0, -0.25, -0.5, -1, -1]
    with pytest.raises(ValueError, match="cache=21"):
        overlong_penalty(torch.tensor([1]), max_length=20, cache=21)


def test_resampling_weights_by_method() -> None:
    rewards = torch.tensor([-2.0, 0.0, 1.0])
    assert resampling_weights(rewards, "pow", power=2.0).tolist() == [4, 0, 1]
    assert resampling_weights(rewards, "max_min").tolist() == [1, 0, 1]
    assert resampling_weights(rewards, "max_random").tolist() == pytest.approx([0.1, 0.1, 0.4])
    with pytest.raises(ValueError, match="best_of"):
        resampling_weights(rewards, "best_of")


def test_resampling_draws_what_has_weight_and_repeats_by_seed() -> None:
    weights = torch.tensor([0.0, 1.0, 0.0])
    assert resample(weights, seed=3).tolist() == [1, 1, 1]
    mixed = torch.tensor([1.0, 1.0, 1.0])
    assert torch.equal(resample(mixed, seed=5), resample(mixed, seed=5))


def test_tokens_after_the_first_stop_token_of_their_sequence_are_masked() -> None:
    ids = torch.tensor([5, 9, 9, 6, 7, 8, 9])
    mask = mask_after_stop(ids, torch.tensor([0, 4, 4, 7]), [9, 8])
    assert mask.tolist() == [1, 1, 0, 0, 1, 1, 0]


def test_truncation_loses_tokens_on_the_named_side() -> None:
    ids, cu_seqlens = torch.arange(7), torch.tensor([0, 2, 2, 7])
    left, lengths = truncate(ids, cu_seqlens, max_length=3, side="left")
    assert left.tolist() == [0, 1, 4, 5, 6]
    assert lengths.tolist() == [0, 2, 2, 5]
    assert truncate(ids, cu_seqlens, max_length=3, side="right")[0].tolist() == [0, 1, 2, 3, 4]


def test_quantities_of_a_known_distribution() -> None:
    """Probabilities 1/2, 1/2, 0 whatever is added to the logits."""
    logits = torch.tensor([[1000.0, 1000.0, -math.inf]])
    assert float(log_probs_of(logits, torch.tensor([1]))) == pytest.approx(math.log(0.5))
    assert float(entropy(logits)) == pytest.approx(math.log(2))
    assert float(sum_pi_squared(logits)) == pytest.approx(0.5)
