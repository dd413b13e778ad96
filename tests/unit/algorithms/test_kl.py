from __future__ import annotations

import math

import pytest
import torch

from megarl.algorithms.kl import KL_ESTIMATORS, full_kl, kl_penalty, kl_shaped_rewards
from megarl.algorithms.kl_controllers import (
    AdaptiveKLController,
    FixedKLController,
    KLController,
    MovingAverageKLController,
)


def test_kl_estimators_at_a_known_difference() -> None:
    log_probs, ref = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    assert kl_penalty(log_probs, ref, "k1").tolist() == pytest.approx([0.5, -1.0])
    assert kl_penalty(log_probs, ref, "abs").tolist() == pytest.approx([0.5, 1.0])
    assert kl_penalty(log_probs, ref, "k2").tolist() == pytest.approx([0.125, 0.5])
    expected = [math.exp(-0.5) - 1 + 0.5, math.e - 1 - 1]
    assert kl_penalty(log_probs, ref, "k3").tolist() == pytest.approx(expected)


@pytest.mark.parametrize("name", [n for n in KL_ESTIMATORS if n.endswith("+")])
def test_a_plus_keeps_the_value_and_has_the_gradient_of_k2(name: str) -> None:
    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    ref = torch.tensor([-1.5, -1.0])
    value = kl_penalty(log_probs, ref, name)
    assert value.tolist() == pytest.approx(kl_penalty(log_probs, ref, name[:-1]).tolist())
    value.sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([0.5, -1.0])


def test_the_gradient_of_a_plus_form_is_in_expectation_the_gradient_of_the_full_kl() -> None:
    """Sum over the whole vocabulary with its probabilities in place of sampling."""
    torch.manual_seed(0)
    logits = torch.randn(1, 5, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(1, 5, dtype=torch.float64)
    (exact,) = torch.autograd.grad(full_kl(logits, ref).sum(), logits)
    log_p, log_q = logits.log_softmax(-1)[0], ref.log_softmax(-1)[0]
    sampled = (log_p.detach().exp() * kl_penalty(log_p, log_q, "k3+")).sum()
    (estimated,) = torch.autograd.grad(sampled, logits)
    assert torch.allclose(exact, estimated, atol=1e-12)


def test_the_full_kl_of_two_coins() -> None:
    logits = torch.tensor([[0.5, 0.5]]).log()
    expected = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    assert float(full_kl(logits, torch.tensor([[0.9, 0.1]]).log())) == pytest.approx(expected)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="k9"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k9")


def test_kl_of_a_masked_token_does_not_change_its_reward() -> None:
    rewards = kl_shaped_rewards(
        torch.tensor([0.0, 1.0, 1.0]), torch.tensor([0.5, 10.0, math.nan]), torch.zeros(3),
        torch.tensor([1.0, 0.0, 0.0]), coef=0.1,
    )  # fmt: skip
    assert rewards.tolist() == pytest.approx([-0.05, 1.0, 1.0])


def test_the_adaptive_controller_moves_by_at_most_a_fifth_of_the_samples_share() -> None:
    controller = AdaptiveKLController(0.2, target=6.0, horizon=1000)
    controller.update(3.0, 100)  # error -.5 bounded to -.2
    assert controller.value == pytest.approx(0.2 * (1 - 0.02))
    with pytest.raises(ValueError, match="finite"):
        controller.update(math.nan, 100)


def test_the_moving_average_controller_is_not_moved_by_one_outlier() -> None:
    plain = AdaptiveKLController(1.0, target=1.0, horizon=10)
    smooth = MovingAverageKLController(1.0, target=1.0, horizon=10, decay=0.9)
    for controller in (plain, smooth):
        controller.update(1.0, 1)
        controller.update(1.5, 1)
    assert plain.value == pytest.approx(1.02)  # error .5 bounded to .2, times 1 / 10
    assert smooth.value == pytest.approx(1.005)  # average 1.05


@pytest.mark.parametrize(
    "kind", [FixedKLController, AdaptiveKLController, MovingAverageKLController]
)
def test_a_restored_controller_goes_on_as_the_saved_one(kind: type[KLController]) -> None:
    settings = {} if kind is FixedKLController else {"target": 2.0, "horizon": 10.0}
    saved, restored = kind(0.3, **settings), kind(9.0, **settings)  # type: ignore[call-arg]
    saved.update(3.0, 2)
    restored.load_state_dict(saved.state_dict())
    for controller in (saved, restored):
        controller.update(2.1, 3)
    assert restored.state_dict() == saved.state_dict()
