from __future__ import annotations

import math

import pytest
import torch

from megarl.algorithms.packed import masked_var, whiten
from megarl.algorithms.token_advantages import (
    gae,
    optimal_token_baseline,
    reinforce_plus_plus,
    remax,
)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_a_masked_critic_value_never_leaks() -> None:
    """d_1 = 1; A_0 = 0 + .95 * 1: the value 100 on the masked token is not read."""
    advantages, returns = gae(
        tensor(0, 1, 0), tensor(0, 0, 100), tensor(1, 1, 0), torch.tensor([0, 3]), gamma=1, lam=0.95
    )
    assert advantages.tolist() == pytest.approx([0.95, 1, 0])
    assert returns.tolist() == pytest.approx([0.95, 1, 0])


def test_tool_tokens_do_not_decay_credit() -> None:
    """Two masked tokens between action and reward: the same as without them."""
    plain, _ = gae(
        tensor(0, 1), tensor(0.5, 0.2), tensor(1, 1), torch.tensor([0, 2]), gamma=0.9, lam=0.8
    )
    tool, _ = gae(
        tensor(0, 0, 0, 1), tensor(0.5, math.nan, 7, 0.2), tensor(1, 0, 0, 1), torch.tensor([0, 4]),
        gamma=0.9, lam=0.8,
    )  # fmt: skip
    assert plain.tolist() == pytest.approx([0.9 * 0.2 - 0.5 + 0.72 * 0.8, 0.8])
    assert tool.tolist() == pytest.approx([float(plain[0]), 0, 0, float(plain[1])])
    returns = reinforce_plus_plus(
        tensor(0, 0, 0, 1), tensor(1, 0, 0, 1), torch.tensor([0, 4]), gamma=0.9
    )[1]
    assert returns.tolist() == pytest.approx([0.9, 0, 0, 1])


def test_a_truncated_response_bootstraps_and_a_terminated_one_does_not() -> None:
    """Both: r 0, V .5; the first goes on at value 2, A = .9 * 2 - .5; the second ends, A = -.5."""
    advantages, returns = gae(
        tensor(0, 0), tensor(0.5, 0.5), tensor(1, 1), torch.tensor([0, 1, 2]), gamma=0.9, lam=1,
        bootstrap_values=tensor(2, 0),
    )  # fmt: skip
    assert advantages.tolist() == pytest.approx([1.3, -0.5])
    assert returns.tolist() == pytest.approx([1.8, 0])


@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus", "remax", "otb"])
def test_a_reward_on_a_masked_token_is_refused(estimator: str) -> None:
    rewards, mask, cu_seqlens = tensor(0, 1, 0), tensor(1, 0, 1), torch.tensor([0, 3])
    zeros = torch.zeros_like(rewards)
    with pytest.raises(ValueError, match=r"rewards\[1\].*last trained token"):
        {
            "gae": lambda: gae(rewards, zeros, mask, cu_seqlens, gamma=1, lam=1),
            "reinforce_plus_plus": lambda: reinforce_plus_plus(rewards, mask, cu_seqlens),
            "remax": lambda: remax(rewards, mask, cu_seqlens, reward_baselines=tensor(0)),
            "otb": lambda: optimal_token_baseline(
                rewards, mask, cu_seqlens, groups=[0], old_log_probs=zeros, sum_pi_squared=zeros
            ),
        }[estimator]()


def test_gae_of_a_sequence_does_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(0)
    rewards, values = torch.rand(7, dtype=torch.float64), torch.rand(7, dtype=torch.float64)
    mask = tensor(1, 1, 0, 1, 1, 1, 1)
    rewards = rewards * mask
    whole, _ = gae(rewards, values, mask, torch.tensor([0, 4, 4, 7]), gamma=0.9, lam=0.9)
    for start, stop in ((0, 4), (4, 7)):
        span = slice(start, stop)
        alone, _ = gae(
            rewards[span],
            values[span],
            mask[span],
            torch.tensor([0, stop - start]),
            gamma=0.9,
            lam=0.9,
        )
        assert torch.equal(whole[span], alone)


def test_remax_takes_off_the_greedy_reward() -> None:
    advantages, returns = remax(
        tensor(0, 1, 0, 3),
        tensor(1, 1, 1, 1),
        torch.tensor([0, 2, 4]),
        reward_baselines=tensor(0.5, 1),
    )
    assert returns.tolist() == pytest.approx([1, 1, 3, 3])
    assert advantages.tolist() == pytest.approx([0.5, 0.5, 2, 2])


def test_the_token_baseline_weighs_returns_by_the_squared_gradient_norm_so_far() -> None:
    """Lengths 2 and 1, returns 1 and 0. Place 0: weights .5 and 1.5, baseline .25; place 1: the
    longest is alone, 0.
    """
    old = tensor(0.5, 0.5, 0.5).log()
    advantages, returns = optimal_token_baseline(
        tensor(0, 1, 0), tensor(1, 1, 1), torch.tensor([0, 2, 3]), groups=["a", "a"],
        old_log_probs=old, sum_pi_squared=tensor(0.5, 0.5, 1.5),
    )  # fmt: skip
    assert returns.tolist() == pytest.approx([1, 1, 0])
    assert advantages.tolist() == pytest.approx([0.75, 1, -0.25], abs=1e-6)


def test_the_tool_form_of_the_token_baseline_ignores_how_long_the_tool_output_is() -> None:
    old, squares = tensor(0.5, 0.7, 0.5, 0.7).log(), tensor(0.5, 0.6, 1.5, 0.9)
    plain, _ = optimal_token_baseline(
        tensor(0, 1, 0, 0), tensor(1, 1, 1, 1), torch.tensor([0, 2, 4]), groups=[0, 0],
        old_log_probs=old, sum_pi_squared=squares,
    )  # fmt: skip
    with_tool, _ = optimal_token_baseline(
        tensor(0, 0, 0, 1, 0, 0), tensor(1, 0, 0, 1, 1, 1), torch.tensor([0, 4, 6]), groups=[0, 0],
        old_log_probs=torch.cat([old[:1], tensor(math.nan, 0), old[1:]]),
        sum_pi_squared=torch.cat([squares[:1], tensor(9, 9), squares[1:]]), by_trained_token=True,
    )  # fmt: skip
    assert with_tool[[0, 3, 4, 5]].tolist() == pytest.approx(plain.tolist())
    assert with_tool[[1, 2]].tolist() == [0, 0]


def test_whitening_one_token_gives_zero_and_no_crash() -> None:
    assert whiten(tensor(3, 0), tensor(1, 0)).tolist() == [0, 0]
    assert whiten(tensor(3, 4), tensor(0, 0)).tolist() == [0, 0]


def test_whitening_ignores_nan_under_the_mask() -> None:
    out = whiten(tensor(1, math.nan, 3), tensor(1, 0, 1))
    assert out.tolist() == pytest.approx([-1 / 2**0.5, 0, 1 / 2**0.5])
    assert float(masked_var(tensor(1, math.nan, 3), tensor(1, 0, 1))) == pytest.approx(2)
