from __future__ import annotations

from typing import get_args, get_type_hints

from megarl.algorithms import ADVANTAGES, KL_ESTIMATORS, POLICY_LOSSES
from megarl.config import choices
from megarl.config.schema import AlgorithmConfig


def test_the_names_settings_are_checked_against_are_the_registered_ones() -> None:
    """choices.py repeats the names so that a typo is found without importing torch."""
    assert set(choices.ADVANTAGES) == set(ADVANTAGES)
    assert set(choices.POLICY_LOSSES) == set(POLICY_LOSSES)


def test_every_kl_estimator_is_a_choice_of_the_setting() -> None:
    hint = get_type_hints(AlgorithmConfig)["kl_estimator"]
    assert set(get_args(hint)) == set(KL_ESTIMATORS)
