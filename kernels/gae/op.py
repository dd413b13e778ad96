"""gae and discounted_sum: checks and dispatch. Neither is differentiable: advantages are data."""

from __future__ import annotations

import torch
from megarl_kernels import native
from megarl_kernels.dispatch import choose_backend
from megarl_kernels.gae.torch_backend import gae_torch

__all__ = ["discounted_sum", "gae"]


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    gamma: float,
    lam: float,
    mask: torch.Tensor | None = None,
    bootstrap: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation (https://arxiv.org/abs/1506.02438) over packed sequences.

    Backwards through the live tokens of each sequence, with n(t) the next live token:

        delta_t = r_t + gamma V_n(t) - V_t
        A_t     = delta_t + gamma lam A_n(t)
        R_t     = A_t + V_t

    After the last live token A is 0 and V is `bootstrap`. Tokens outside `mask` (tool output) are
    stepped over: they discount nothing, their rewards and values are never used, NaN included.

    Args:
        rewards: [T] floating point.
        values: [T] floating point.
        cu_seqlens: [S + 1] int32 or int64, from 0 to T, not decreasing; sequences may be empty.
        gamma: discount, in [0, 1].
        lam: in [0, 1].
        mask: [T] bool or integer, 0 for tokens to step over; None: all are live.
        bootstrap: [S] value after the end of each sequence, for truncated ones; None: 0.

    Returns:
        (advantages [T], returns [T]), float32 (float64 if an input is), 0 outside the mask.

    Raises:
        ValueError: shapes, dtypes, devices or ranges do not fit. What cu_seqlens holds is checked
            on CPU only: looking would make the GPU wait.
    """
    _check(rewards, values, cu_seqlens, mask, bootstrap, {"gamma": gamma, "lam": lam})
    return _run("gae", rewards, values, cu_seqlens, mask, bootstrap, gamma, lam)


def discounted_sum(
    rewards: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    gamma: float,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reverse discounted sum G_t = r_t + gamma G_n(t) over the live tokens of packed sequences.

    Args, Returns [T] and Raises as for `gae`, which it is with values 0 and lam 1.
    """
    _check(rewards, None, cu_seqlens, mask, None, {"gamma": gamma})
    return _run("discounted_sum", rewards, None, cu_seqlens, mask, None, gamma, 1.0)[0]


def _check(
    rewards: torch.Tensor,
    values: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    mask: torch.Tensor | None,
    bootstrap: torch.Tensor | None,
    factors: dict[str, float],
) -> None:
    num_tokens, num_seqs = rewards.numel(), cu_seqlens.numel() - 1
    if cu_seqlens.dim() != 1 or num_seqs < 0 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"cu_seqlens {tuple(cu_seqlens.shape)} {cu_seqlens.dtype} must be [S + 1] int32/int64"
        )
    sizes = {"rewards": num_tokens, "values": num_tokens, "mask": num_tokens, "bootstrap": num_seqs}
    given = {"rewards": rewards, "values": values, "mask": mask, "bootstrap": bootstrap}
    for name, tensor in given.items():
        if tensor is None:
            continue
        if tensor.shape != (sizes[name],):
            raise ValueError(f"{name} {tuple(tensor.shape)} must be [{sizes[name]}]")
        if tensor.is_floating_point() == (name == "mask"):
            kind = "bool or integer" if name == "mask" else "floating point"
            raise ValueError(f"{name} is {tensor.dtype}; it must be {kind}")
        if tensor.device != rewards.device:
            raise ValueError(f"{name} is on {tensor.device}, rewards on {rewards.device}")
    if cu_seqlens.device != rewards.device:
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device}, rewards on {rewards.device}")
    for name, factor in factors.items():
        if not 0 <= factor <= 1:
            raise ValueError(f"{name}={factor} must be in [0, 1]")
    if rewards.device.type == "cpu" and (
        int(cu_seqlens[0]) != 0
        or int(cu_seqlens[-1]) != num_tokens
        or bool((cu_seqlens.diff() < 0).any())
    ):
        raise ValueError(f"cu_seqlens must go from 0 to T={num_tokens} and not decrease")


@torch.no_grad()
def _run(
    op: str,
    rewards: torch.Tensor,
    values: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    mask: torch.Tensor | None,
    bootstrap: torch.Tensor | None,
    gamma: float,
    lam: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    shared = rewards.dtype
    for other in (values, bootstrap):
        if other is not None:
            shared = torch.promote_types(shared, other.dtype)
    dtype = torch.promote_types(shared, torch.float32)
    if shared == torch.float16:
        shared = torch.float32
    rewards = rewards.to(shared).contiguous()
    values = None if values is None else values.to(shared).contiguous()
    cu_seqlens = cu_seqlens.to(torch.int32).contiguous()
    mask = None if mask is None else (mask != 0).contiguous()
    bootstrap = None if bootstrap is None else bootstrap.to(dtype).contiguous()
    backend = choose_backend(op, rewards)
    if backend == "torch":
        return gae_torch(rewards, values, cu_seqlens, mask, bootstrap, gamma, lam, dtype)
    advantages = torch.empty_like(rewards, dtype=dtype)
    returns = torch.empty_like(advantages)
    if backend == "triton":
        from megarl_kernels.gae.triton_backend import gae_triton  # imports triton

        gae_triton(rewards, values, cu_seqlens, mask, bootstrap, gamma, lam, advantages, returns)
        return advantages, returns
    native.call(
        "megarl_gae", shared, rewards, values, mask, cu_seqlens, cu_seqlens.numel() - 1, bootstrap,
        float(gamma), float(lam), advantages, None if op == "discounted_sum" else returns,
    )  # fmt: skip
    return advantages, returns
