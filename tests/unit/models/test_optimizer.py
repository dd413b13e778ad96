"""The learning-rate schedule, as numbers."""

from __future__ import annotations

import pytest

from megarl.config.schema import OptimConfig
from megarl.models.optimizer import lr_at


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({"schedule": "constant"}, [8.0, 8.0, 8.0, 8.0, 8.0, 8.0]),
        ({"schedule": "constant", "num_warmup_steps": 4}, [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]),
        ({"schedule": "linear", "num_warmup_steps": 2}, [4.0, 8.0, 8.0, 6.0, 4.0, 2.0]),
        ({"schedule": "linear", "min_lr": 2.0}, [8.0, 7.0, 6.0, 5.0, 4.0, 3.0]),
        ({"schedule": "cosine"}, [8.0, 7.464101615, 6.0, 4.0, 2.0, 0.535898385]),
    ],
)
def test_schedule_values(options: dict[str, object], want: list[float]) -> None:
    optim = OptimConfig(lr=8.0, **options)  # type: ignore[arg-type]
    assert [lr_at(i, optim, 6) for i in range(6)] == pytest.approx(want)


def test_after_the_last_step_the_rate_stays_at_its_minimum() -> None:
    optim = OptimConfig(lr=8.0, min_lr=1.0, schedule="cosine")
    assert lr_at(6, optim, 6) == lr_at(100, optim, 6) == 1.0
