"""Advantages from one reward per response: no critic, no token-level reward, no extra forward pass.

One number per response; the trainer puts it on the response's trained tokens. Sums run in float64
and the result has the dtype of the rewards. A group of one says nothing about which response was
better: its advantage is 0 for every estimator that compares within the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megarl.algorithms.groups import (
    Groups,
    group_centred,
    group_counts,
    group_index,
    group_mean,
    group_std,
)

__all__ = [
    "ADVANTAGES",
    "Outcomes",
    "gdpo",
    "gpg",
    "grpo",
    "grpo_passk",
    "opo",
    "reinforce_plus_plus_baseline",
    "reinforce_plus_plus_outcome",
    "rloo",
    "whiten_by_length",
]


def _double(rewards: torch.Tensor) -> torch.Tensor:
    return rewards.detach().to(torch.float64)


def _like(advantages: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    """Cast to the dtype of the rewards, float32 if that is an integer type."""
    return advantages.to(rewards.dtype if rewards.dtype.is_floating_point else torch.float32)


def grpo(
    rewards: torch.Tensor, groups: Groups, *, normalize_by_std: bool = True, eps: float = 1e-6
) -> torch.Tensor:
    """Group-relative advantage: A_i = (r_i - mean of its group) / (std of its group + eps).

    DeepSeekMath, https://arxiv.org/abs/2402.03300, section 4.1; without the division it is Dr.
    GRPO, https://arxiv.org/abs/2503.20783. The standard deviation is the unbiased one.

    Args:
        rewards: [N] float, one per response.
        groups: [N] labels; responses to one prompt row share one.

    Returns:
        [N]. A group of one, and a group without spread, has advantage 0: it says nothing about
        which response was better.
    """
    index, r = group_index(groups), _double(rewards)
    centred = group_centred(r, index)
    if normalize_by_std:
        centred = centred / (group_std(r, index) + eps)
    return _like(centred, rewards)


def grpo_passk(
    rewards: torch.Tensor, groups: Groups, *, normalize_by_std: bool = True, eps: float = 1e-6
) -> torch.Tensor:
    """Pass@k: only the best response of a group counts, A = (best - second best) / (std + eps).

    https://arxiv.org/abs/2503.19595. Of several equally good ones all have advantage 0.

    Args:
        rewards: [N] float.
        groups: [N] labels.

    Returns:
        [N]; 0 for a group of one.
    """
    index, r = group_index(groups), _double(rewards)
    out, std = torch.zeros_like(r), group_std(r, index)
    for group in range(int(index.max()) + 1 if index.numel() else 0):
        members = (index == group).nonzero().squeeze(1)
        if members.numel() < 2:
            continue
        best, where = r[members].topk(2)
        winner = members[where[0]]
        out[winner] = (best[0] - best[1]) / (std[winner] + eps if normalize_by_std else 1.0)
    return _like(out, rewards)


def rloo(rewards: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Leave-one-out: A_i = r_i - mean of the other rewards of the group = (r_i - mean) * n / (n -
    1).

    https://arxiv.org/abs/2402.14740. Never divided by a leave-one-out standard deviation:
    the others' spread may be 0 where r_i differs from all of them.

    Args:
        rewards: [N] float.
        groups: [N] labels.

    Returns:
        [N]; 0 for a group of one.
    """
    index, r = group_index(groups), _double(rewards)
    counts = group_counts(index)
    scale = counts / (counts - 1).clamp(min=1)
    return _like(group_centred(r, index) * scale, rewards)


def opo(rewards: torch.Tensor, groups: Groups, lengths: torch.Tensor) -> torch.Tensor:
    """Optimal reward baseline: A_i = r_i - sum_j l_j r_j / sum_j l_j over its group, l = length.

    OPO, https://arxiv.org/abs/2505.23585.

    Args:
        rewards: [N] float.
        groups: [N] labels.
        lengths: [N] trained tokens of each response.

    Returns:
        [N]; 0 for a group of one and for a group without trained tokens.
    """
    index, r = group_index(groups), _double(rewards)
    weights = lengths.to(torch.float64)
    has_tokens = group_mean(weights, index) > 0
    centred = group_centred(r, index, weights)
    return _like(torch.where(has_tokens & (group_counts(index) > 1), centred, 0.0), rewards)


def gpg(rewards: torch.Tensor, groups: Groups) -> torch.Tensor:
    """A_i = alpha * (r_i - mean of its group), alpha = responses / responses with a reward other
    than 0.

    GPG, https://arxiv.org/abs/2504.02546; alpha makes up for groups that carry no signal.

    Args:
        rewards: [N] float, of the whole batch: alpha is counted over it.
        groups: [N] labels.

    Returns:
        [N]; 0 for a group of one.
    """
    index, r = group_index(groups), _double(rewards)
    alpha = r.numel() / max(int((r != 0).sum()), 1)
    return _like(alpha * group_centred(r, index), rewards)


def whiten_by_length(
    values: torch.Tensor, lengths: torch.Tensor, *, eps: float = 1e-8
) -> torch.Tensor:
    """Whiten over tokens when all tokens of a response have its value: mean and variance weighted
    by length.

    Args:
        values: [N] float, one per response.
        lengths: [N] trained tokens of each response.

    Returns:
        [N] float64: (v - mean) / sqrt(unbiased variance over tokens + eps); 0 without spread.
    """
    v, w = _double(values), lengths.to(torch.float64)
    total = w.sum()
    v = v - v[:1]  # without spread the result is exactly 0
    centred = v - (w * v).sum() / total.clamp(min=1)
    variance = (w * centred.square()).sum() / (total - 1).clamp(min=1)
    return torch.where(w > 0, centred, 0.0) * (variance + eps).rsqrt()


def reinforce_plus_plus_outcome(rewards: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """REINFORCE++ with an outcome reward and gamma 1: the reward, whitened over all tokens of the
    batch.

    https://arxiv.org/abs/2501.03262. Token rewards or gamma < 1: `reinforce_plus_plus`.

    Args:
        rewards: [N] float.
        lengths: [N] trained tokens of each response.

    Returns:
        [N].
    """
    return _like(whiten_by_length(rewards, lengths), rewards)


def reinforce_plus_plus_baseline(
    rewards: torch.Tensor, groups: Groups, lengths: torch.Tensor
) -> torch.Tensor:
    """REINFORCE++-baseline: r_i - mean of its group, whitened over all tokens of the batch.

    https://arxiv.org/abs/2501.03262.

    Args:
        rewards: [N] float.
        groups: [N] labels.
        lengths: [N] trained tokens of each response.

    Returns:
        [N].
    """
    r = _double(rewards)
    return _like(whiten_by_length(group_centred(r, group_index(groups)), lengths), rewards)


def gdpo(
    rewards: Sequence[torch.Tensor],
    groups: Groups,
    lengths: torch.Tensor,
    *,
    weights: Sequence[float] | None = None,
    normalize_by_std: bool = True,
) -> torch.Tensor:
    """GRPO per kind of reward, then their weighted sum whitened over all tokens: A = whiten(sum_k
    w_k A_k).

    GDPO, https://arxiv.org/abs/2601.05242. A reward of large scale cannot drown a small one.

    Args:
        rewards: K tensors [N], one per kind of reward.
        groups: [N] labels.
        lengths: [N] trained tokens of each response.
        weights: K numbers; None: all 1.

    Returns:
        [N].
    """
    scales = [1.0] * len(rewards) if weights is None else list(weights)
    total = torch.zeros(rewards[0].numel(), dtype=torch.float64)
    for scale, r in zip(scales, rewards, strict=True):
        total = total + scale * grpo(_double(r), groups, normalize_by_std=normalize_by_std)
    return _like(whiten_by_length(total, lengths), rewards[0])


@dataclass(frozen=True)
class Outcomes:
    """What an outcome estimator may look at: all responses of a step."""

    rewards: torch.Tensor  # [N] float32
    groups: torch.Tensor  # [N] int64 labels
    lengths: torch.Tensor  # [N] trained tokens
    normalize_by_std: bool  # grpo and grpo_passk: divide by the group's standard deviation


ADVANTAGES: dict[str, Callable[[Outcomes], torch.Tensor]] = {
    "grpo": lambda o: grpo(o.rewards, o.groups, normalize_by_std=o.normalize_by_std),
    "grpo_passk": lambda o: grpo_passk(o.rewards, o.groups, normalize_by_std=o.normalize_by_std),
    "rloo": lambda o: rloo(o.rewards, o.groups),
    "opo": lambda o: opo(o.rewards, o.groups, o.lengths),
    "gpg": lambda o: gpg(o.rewards, o.groups),
    "reinforce_plus_plus": lambda o: reinforce_plus_plus_outcome(o.rewards, o.lengths),
    "reinforce_plus_plus_baseline": lambda o: reinforce_plus_plus_baseline(
        o.rewards, o.groups, o.lengths
    ),
}
"""Estimators the trainer offers by name: [N] advantages from the outcomes of a step."""
