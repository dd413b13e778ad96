from __future__ import annotations

import math

import torch

from megarl.trainer.evaluate import wilson_interval
from megarl.trainer.metrics import Reducer, combine, masked_max, masked_mean, to_floats

REDUCERS: dict[str, Reducer] = {
    "minerva": "mean",
    "max_entropy": "mean",
    "peak": "max",
    "total": "sum",
}


def part(values: list[float], mask: list[float]) -> dict[str, torch.Tensor]:
    v, m = torch.tensor(values), torch.tensor(mask)
    return {
        "minerva": masked_mean(v, m),
        "max_entropy": masked_mean(v, m),
        "peak": masked_max(v, m),
        "total": torch.tensor([1.0]),
    }


def test_means_weigh_every_token_alike_whatever_the_split() -> None:
    whole = to_floats(combine([part([1.0, 2.0, 6.0], [1, 1, 1])], REDUCERS), REDUCERS)
    split = to_floats(combine([part([1.0], [1]), part([2.0, 6.0], [1, 1])], REDUCERS), REDUCERS)
    assert whole["minerva"] == split["minerva"] == 3.0
    assert whole["peak"] == split["peak"] == 6.0
    assert split["total"] == 2.0


def test_a_reducer_is_never_chosen_by_a_word_in_the_name() -> None:
    out = to_floats(combine([part([0.0, 1.0], [1, 1])], REDUCERS), REDUCERS)
    assert out["minerva"] == out["max_entropy"] == 0.5


def test_masked_values_and_nan_under_the_mask_have_no_effect() -> None:
    out = to_floats(
        combine([part([1.0, math.nan, 9.0], [1, 0, 0]), part([math.nan], [0])], REDUCERS), REDUCERS
    )
    assert out["minerva"] == 1.0
    assert out["peak"] == 1.0


def test_a_mean_of_nothing_is_left_out() -> None:
    out = to_floats(combine([part([5.0], [0])], REDUCERS), REDUCERS)
    assert set(out) == {"total"}


def test_nan_at_a_counted_token_shows() -> None:
    out = to_floats(combine([part([math.nan, 1.0], [1, 1])], REDUCERS), REDUCERS)
    assert math.isnan(out["minerva"])


def test_wilson_interval_of_known_counts() -> None:
    """8 of 10: textbook interval 0.4902 to 0.9433."""
    interval = wilson_interval(8, 10)
    assert math.isclose(interval.low, 0.4902, abs_tol=1e-4)
    assert math.isclose(interval.high, 0.9433, abs_tol=1e-4)
    assert math.isclose(wilson_interval(0, 5).low, 0.0, abs_tol=1e-12)
    assert math.isclose(wilson_interval(5, 5).high, 1.0, abs_tol=1e-12)
