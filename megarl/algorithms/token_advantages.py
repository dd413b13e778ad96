"""Advantages that differ from token to token of a response: GAE, REINFORCE++, ReMax, optimal token
baseline.

All on packed [T] with cu_seqlens. A token with mask 0 inside a response (a tool's output) is
stepped over: it carries no loss, decays no credit, its value is never read, and a reward on it is
    refused.
"""

from __future__ import annotations

import torch

from megarl.algorithms.groups import Groups, group_counts, group_index
from megarl.algorithms.packed import (
    cumsum,
    keep,
    positions,
    reverse_cumsum,
    segment_ids,
    sequence_lengths,
    spread,
    whiten,
)

__all__ = ["check_rewards", "gae", "optimal_token_baseline", "reinforce_plus_plus", "remax"]


def check_rewards(rewards: torch.Tensor, response_mask: torch.Tensor) -> None:
    """Refuse a reward on a token that is not trained: it would silently vanish.

    Raises:
        ValueError: names the first such token.
    """
    wrong = ((response_mask == 0) & (rewards != 0) & ~rewards.isnan()).nonzero()
    if wrong.numel():
        at = int(wrong[0])
        raise ValueError(
            f"rewards[{at}]={float(rewards[at])} lies on a token with response_mask 0, where it "
            "would have no effect; put it on the last trained token of the response"
        )


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    gamma: float,
    lam: float,
    bootstrap_values: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation over the trained tokens of each sequence.

    A_t = d_t + gamma lam A_t', d_t = r_t + gamma V_t' - V_t, t' the next trained token; returns = A
    + V. https://arxiv.org/abs/1506.02438, eq. 16. Not whitened: `whiten` does that over the global
    batch.

    Args:
        rewards, values, response_mask: [T] float; values[t] predicts the return from token t on.
        cu_seqlens: [S+1] int32.
        gamma, lam: in [0, 1].
        bootstrap_values: [S], V after the last trained token: the critic's for a truncated
            response,
            0 for one that ended by itself. None: all 0.

    Returns:
        (advantages [T], returns [T]), 0 where response_mask is 0.

    Raises:
        ValueError: a reward lies on a masked token.
    """
    check_rewards(rewards, response_mask)
    if bootstrap_values is None:
        bootstrap_values = values.new_zeros(cu_seqlens.numel() - 1)
    advantages = torch.zeros_like(values)
    # one step back in every sequence at once: the loop is as long as the longest one
    trained = (response_mask > 0).nonzero().squeeze(1)
    owner = segment_ids(cu_seqlens)[trained]
    ends = torch.bincount(owner, minlength=bootstrap_values.numel()).cumsum(0)
    from_end = ends[owner] - 1 - torch.arange(trained.numel(), device=trained.device)
    next_value, next_advantage = (
        bootstrap_values.to(values.dtype),
        torch.zeros_like(bootstrap_values, dtype=values.dtype),
    )
    for step in range(int(from_end.max()) + 1 if trained.numel() else 0):
        at, s = trained[from_end == step], owner[from_end == step]
        delta = rewards[at] + gamma * next_value[s] - values[at]
        advantages[at] = delta + gamma * lam * next_advantage[s]
        next_value = next_value.index_copy(0, s, values[at])
        next_advantage = next_advantage.index_copy(0, s, advantages[at])
    return advantages, keep(advantages + values, response_mask)


def reinforce_plus_plus(
    rewards: torch.Tensor,
    response_mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    gamma: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Discounted reward to go, whitened over all trained tokens of the batch.

    G_t = r_t + gamma G_t', t' the next trained token. https://arxiv.org/abs/2501.03262.

    Args:
        rewards, response_mask: [T] float.
        cu_seqlens: [S+1] int32.

    Returns:
        (advantages [T], returns [T]), 0 where response_mask is 0.

    Raises:
        ValueError: a reward lies on a masked token.
    """
    _, returns = gae(
        rewards, torch.zeros_like(rewards), response_mask, cu_seqlens, gamma=gamma, lam=1.0
    )
    return whiten(returns, response_mask), returns


def remax(
    rewards: torch.Tensor,
    response_mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    reward_baselines: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """ReMax: reward to go minus the reward of the greedy response to the same prompt.

    https://arxiv.org/abs/2310.10505.

    Args:
        rewards, response_mask: [T] float.
        cu_seqlens: [S+1] int32.
        reward_baselines: [S] float.

    Returns:
        (advantages [T], returns [T]), 0 where response_mask is 0.

    Raises:
        ValueError: a reward lies on a masked token.
    """
    check_rewards(rewards, response_mask)
    returns = keep(reverse_cumsum(keep(rewards, response_mask), cu_seqlens), response_mask)
    return keep(returns - spread(reward_baselines, cu_seqlens), response_mask), returns


def optimal_token_baseline(
    rewards: torch.Tensor,
    response_mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    groups: Groups,
    old_log_probs: torch.Tensor,
    sum_pi_squared: torch.Tensor,
    by_trained_token: bool = False,
    eps: float = 1e-8,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reward to go minus a baseline of its own for each place in the response.

    B_k = sum_i G_ik W_ik / sum_i W_ik over the responses i of the group that have a trained token
    at place k; W_ik = sum of 1 - 2 pi + sum_v pi_v^2 over its trained tokens up to k (squared
    gradient norm of the logits). Only the longest response has places after the end of the second
    longest: its baseline there is 0. The Optimal Token Baseline,
    https://raw.githubusercontent.com/mlresearch/v306/main/assets/li26hy/li26hy.pdf.

    Args:
        rewards, response_mask: [T] float.
        cu_seqlens: [S+1] int32, one sequence per response.
        groups: [S] labels.
        old_log_probs: [T] log pi of the token.
        sum_pi_squared: [T] sum over the vocabulary of squared probabilities.
        by_trained_token: place = number of trained tokens before it, so that tool output of
            different
            length does not shift the responses against each other; False: place in the sequence.

    Returns:
        (advantages [T], returns [T]), 0 where response_mask is 0; advantages 0 in a group of one.

    Raises:
        ValueError: a reward lies on a masked token.
    """
    check_rewards(rewards, response_mask)
    num_sequences, owner = cu_seqlens.numel() - 1, segment_ids(cu_seqlens)
    lengths = sequence_lengths(response_mask, cu_seqlens).long()
    returns = keep(reverse_cumsum(keep(rewards, response_mask), cu_seqlens), response_mask)
    energy = keep(1 - 2 * old_log_probs.exp() + sum_pi_squared, response_mask)
    weight = keep(cumsum(energy, cu_seqlens), response_mask)
    num_before = spread(lengths, cu_seqlens) - reverse_cumsum(response_mask.long(), cu_seqlens)
    place = num_before if by_trained_token else positions(cu_seqlens)
    index = group_index(groups).to(owner.device)
    width = int(cu_seqlens.diff().max()) + 1 if num_sequences else 1
    cell = index[owner] * width + place.clamp(0, width - 1)
    table = torch.zeros(
        (int(index.max()) + 1 if num_sequences else 0) * width,
        dtype=rewards.dtype,
        device=rewards.device,
    )
    numerator = table.index_add(0, cell, returns * weight)
    baseline = numerator[cell] / (table.index_add(0, cell, weight)[cell] + eps)
    baseline = torch.where(
        num_before >= spread(_other_longest(lengths, index), cu_seqlens), 0.0, baseline
    )
    is_alone = spread(group_counts(index), cu_seqlens) < 2
    return keep(torch.where(is_alone, 0.0, returns - baseline), response_mask), returns


def _other_longest(lengths: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """[S]: length of the longest other response of the group, 0 if there is none."""
    out = torch.zeros_like(lengths)
    for s in range(lengths.numel()):
        others = index == index[s]
        others[s] = False
        out[s] = lengths[others].max() if bool(others.any()) else 0
    return out
