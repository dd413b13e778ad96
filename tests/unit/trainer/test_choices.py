from __future__ import annotations

from megarl.algorithms import ADVANTAGES, KL_ESTIMATORS, POLICY_LOSSES
from megarl.config import choices
from megarl.config.schema import AlgorithmConfig


def test_the_names_settings_are_checked_against_are_the_registered_ones() -> None:
    """choices.py repeats the names so that a typo is found without importing torch."""
    assert set(choices.ADVANTAGES) == set(ADVANTAGES)
    assert set(choices.POLICY_LOSSES) == set(POLICY_LOSSES)


def test_every_kl_estimator_is_a_choice_of_the_setting() -> None:
    hint = AlgorithmConfig.__annotations__["kl_estimator"]
    assert all(f'"{name}"' in hint for name in KL_ESTIMATORS)
