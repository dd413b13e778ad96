from __future__ import annotations

import pytest
import torch

from megarl.algorithms import ADVANTAGES, Outcomes, grpo
from megarl.algorithms.outcome_advantages import gdpo, gpg, grpo_passk, opo, rloo

COMPARES_WITHIN_GROUP = sorted(set(ADVANTAGES) - {"reinforce_plus_plus"})


def estimate(
    name: str,
    rewards: list[float],
    groups: list[int],
    lengths: list[int] | None = None,
    *,
    normalize_by_std: bool = True,
) -> list[float]:
    outcomes = Outcomes(
        rewards=torch.tensor(rewards),
        groups=torch.tensor(groups),
        lengths=torch.tensor(lengths or [2] * len(rewards)),
        normalize_by_std=normalize_by_std,
    )
    return ADVANTAGES[name](outcomes).tolist()


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


def test_passk_rewards_only_the_best_by_its_lead_over_the_second() -> None:
    rewards = torch.tensor([1.0, 4.0, 2.0, 3.0, 3.0])
    out = grpo_passk(rewards, [0, 0, 0, 1, 1], normalize_by_std=False)
    assert out.tolist() == pytest.approx([0.0, 2.0, 0.0, 0.0, 0.0])
    out = grpo_passk(rewards, [0, 0, 0, 1, 1])
    assert out[1] == pytest.approx(2.0 / (7 / 3) ** 0.5, abs=1e-5)


def test_rloo_subtracts_the_mean_of_the_others() -> None:
    out = rloo(torch.tensor([1.0, 0.0, 2.0]), [0, 0, 0])
    assert out.tolist() == pytest.approx([0.0, -1.5, 1.5])


@pytest.mark.parametrize("normalize_by_std", [True, False])
def test_leave_one_out_does_not_explode_when_the_others_are_equal(normalize_by_std: bool) -> None:
    out = estimate("rloo", [0.0] + [0.95] * 7, [0] * 8, normalize_by_std=normalize_by_std)
    assert out[0] == pytest.approx(-0.95)
    assert out[1:] == pytest.approx([0.95 / 7] * 7)


def test_opo_weighs_the_baseline_by_length() -> None:
    """Rewards 1 and 0 with lengths 1 and 3: baseline 1/4."""
    out = opo(torch.tensor([1.0, 0.0]), ["a", "a"], torch.tensor([1, 3]))
    assert out.tolist() == pytest.approx([0.75, -0.25])


def test_gpg_scales_by_the_share_of_rewards_that_are_not_zero() -> None:
    """Two of four rewards are not 0: alpha 2."""
    out = gpg(torch.tensor([1.0, 0.0, 1.0, 0.0]), [0, 0, 1, 1])
    assert out.tolist() == pytest.approx([1.0, -1.0, 1.0, -1.0])


def test_reinforce_plus_plus_whitens_over_tokens_not_over_responses() -> None:
    """Rewards 1 and 0 on 1 and 3 tokens: mean 1/4, unbiased variance 1/4."""
    out = estimate("reinforce_plus_plus", [1.0, 0.0], [0, 1], [1, 3])
    assert out == pytest.approx([1.5, -0.5])


def test_reinforce_plus_plus_baseline_centres_in_the_group_then_whitens() -> None:
    """Centred .5, -.5 on 1 and 3 tokens: mean -.25, unbiased variance .25."""
    out = estimate("reinforce_plus_plus_baseline", [1.0, 0.0], [0, 0], [1, 3])
    assert out == pytest.approx([1.5, -0.5])


def test_gdpo_weighs_kinds_of_reward_whatever_their_scale() -> None:
    """Per kind +-.7071; the weights 1 and 2 leave -+.7071; over 4 tokens the variance is 2/3."""
    large, small = torch.tensor([100.0, 0.0]), torch.tensor([0.0, 0.01])
    out = gdpo([large, small], [0, 0], torch.tensor([2, 2]), weights=[1.0, 2.0])
    assert out.tolist() == pytest.approx([-(0.75**0.5), 0.75**0.5], abs=1e-3)


@pytest.mark.parametrize("name", COMPARES_WITHIN_GROUP)
def test_a_group_of_one_and_a_group_without_spread_get_zero(name: str) -> None:
    assert estimate(name, [2.0, 0.3, 0.3, 0.3], [0, 1, 1, 1], [1, 2, 3, 4]) == [0.0] * 4


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_a_whole_batch_without_spread_has_no_signal(name: str) -> None:
    assert estimate(name, [0.1] * 4, [0, 0, 1, 1], [1, 2, 3, 4]) == [0.0] * 4


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_groups_are_labels_so_their_order_and_sign_do_not_matter(name: str) -> None:
    rewards = [1.0, 0.0, 0.5, 0.25]
    assert estimate(name, rewards, [0, 1, 0, 1]) == estimate(name, rewards, [9, -4, 9, -4])


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_the_order_of_the_responses_does_not_matter(name: str) -> None:
    rewards, groups, lengths = [1.0, 0.0, 0.5, 0.25], [0, 0, 1, 1], [1, 4, 2, 3]
    order = [2, 0, 3, 1]
    shuffled = estimate(name, *([x[i] for i in order] for x in (rewards, groups, lengths)))  # type: ignore[arg-type]
    plain = estimate(name, rewards, groups, lengths)
    assert shuffled == pytest.approx([plain[i] for i in order])


def test_groups_may_be_strings_or_negative() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.5])
    expected = grpo(rewards, torch.tensor([0, 0, 1]))
    assert torch.equal(grpo(rewards, ["p", "p", "q"]), expected)
    assert torch.equal(grpo(rewards, torch.tensor([-1, -1, 0])), expected)


def test_two_rows_of_equal_text_are_two_groups() -> None:
    """The id is the row, so each row's best answer counts; as one group they would differ."""
    out = grpo(torch.tensor([1.0, 0.0, 5.0, 4.0]), [10, 10, 11, 11], normalize_by_std=False)
    assert out.tolist() == pytest.approx([0.5, -0.5, 0.5, -0.5])


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_every_estimator_returns_one_finite_float32_per_response(name: str) -> None:
    torch.manual_seed(0)
    outcomes = Outcomes(torch.rand(12), torch.arange(12) // 4, torch.arange(12), True)
    out = ADVANTAGES[name](outcomes)
    assert out.shape == (12,)
    assert out.dtype == torch.float32
    assert bool(out.isfinite().all())
