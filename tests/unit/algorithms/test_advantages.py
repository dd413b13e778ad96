from __future__ import annotations

import pytest
import torch

from megarl.algorithms import ADVANTAGES, grpo


def test_grpo_centres_and_scales_each_group_by_its_own_unbiased_deviation() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 3.0, 5.0])
    groups = torch.tensor([7, 7, 7, 7, -1, -1])
    std_a, std_b = (1.0 / 3) ** 0.5, 2.0**0.5
    expected = [0.5 / std_a, -0.5 / std_a, -0.5 / std_a, 0.5 / std_a, -1 / std_b, 1 / std_b]
    assert grpo(rewards, groups).tolist() == pytest.approx(expected, abs=1e-5)


def test_grpo_without_std_only_centres() -> None:
    out = grpo(
        torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.long), normalize_by_std=False
    )
    assert out.tolist() == pytest.approx([0.75, -0.25, -0.25, -0.25])


def test_a_group_of_one_and_a_group_without_spread_get_zero() -> None:
    out = grpo(torch.tensor([2.0, 0.3, 0.3, 0.3]), torch.tensor([0, 1, 1, 1]))
    assert out.tolist() == pytest.approx([0.0] * 4, abs=1e-6)


def test_groups_are_labels_so_their_order_and_sign_do_not_matter() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.25])
    a = grpo(rewards, torch.tensor([0, 1, 0, 1]))
    b = grpo(rewards, torch.tensor([9, -4, 9, -4]))
    assert torch.equal(a, b)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_every_estimator_returns_one_finite_float32_per_response(name: str) -> None:
    out = ADVANTAGES[name](torch.rand(12), torch.arange(12) // 4)
    assert out.shape == (12,)
    assert out.dtype == torch.float32
    assert bool(out.isfinite().all())
