"""gae on a GPU: a reverse scan of affine maps in two launches.

The state (A, V) that token t hands to the token before it is an affine map of what t receives:

    live token     A = (r - v) + gamma V' + gamma lam A',  V = v
    masked token   identity
    end of a sequence   first (A', V') := (0, bootstrap)

Maps [[p, q], [0, s]] (A, V) + (c, d) are closed under composition, so a scan may combine them in
any grouping. Nothing is ever divided by powers of gamma lam. The first kernel composes each chunk's
map, the second walks the later chunks' maps to get its incoming state and scans its own chunk.
"""

# mypy: allow-untyped-defs
# Triton reads the kernels' parameters itself; annotations other than constexpr mislead it.
from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["gae_chunk_maps", "gae_scan", "gae_triton"]

CHUNK = 1024  # tokens of one program
MAPS = 256  # chunk maps taken at once


@triton.jit
def _compose(p1, q1, s1, c1, d1, p2, q2, s2, c2, d2):
    """Map 2 after map 1; in a reverse scan 1 is the later token."""
    return p2 * p1, p2 * q1 + q2 * s1, s2 * s1, p2 * c1 + q2 * d1 + c2, s2 * d1 + d2


@triton.jit
def _first(x, n: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, n) == 0, x, 0.0), 0)


@triton.jit
def _scan_tokens(
    rewards, values, mask, ends, bootstrap, at, inside, gamma, decay,
    HAS_VALUES: tl.constexpr, HAS_MASK: tl.constexpr, HAS_BOOTSTRAP: tl.constexpr,
):  # fmt: skip
    r = tl.load(rewards + at, mask=inside, other=0.0).to(tl.float32)
    v = tl.zeros_like(r)
    if HAS_VALUES:
        v = tl.load(values + at, mask=inside, other=0.0).to(tl.float32)
    end = tl.load(ends + at, mask=inside, other=0)  # 1 + sequence at its last token, else 0
    live = inside
    if HAS_MASK:
        live = inside & (tl.load(mask + at, mask=inside, other=0) != 0)
    zero = tl.zeros_like(r)
    p = tl.where(live, decay, 1.0)
    q = tl.where(live, gamma, zero)
    s = tl.where(live, zero, 1.0)
    c = tl.where(live, r - v, zero)
    d = tl.where(live, v, zero)
    is_end = end > 0
    if HAS_BOOTSTRAP:
        after = tl.load(bootstrap + tl.maximum(end - 1, 0), mask=is_end, other=0.0)
        c = tl.where(is_end, c + q * after, c)
        d = tl.where(is_end, d + s * after, d)
    p = tl.where(is_end, zero, p)
    q = tl.where(is_end, zero, q)
    s = tl.where(is_end, zero, s)
    p, q, s, c, d = tl.associative_scan((p, q, s, c, d), 0, _compose, reverse=True)
    return p, q, c, s, d, v, live


@triton.jit
def gae_chunk_maps(
    rewards,  # [T]
    values,  # [T]
    mask,  # [T] bytes
    ends,  # [T] int32
    bootstrap,  # [S] float32
    maps,  # [5, num_chunks] float32, written
    num_tokens, num_chunks, gamma, decay,
    HAS_VALUES: tl.constexpr, HAS_MASK: tl.constexpr, HAS_BOOTSTRAP: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    p, q, c, s, d, _v, _live = _scan_tokens(
        rewards, values, mask, ends, bootstrap, at, at < num_tokens, gamma, decay,
        HAS_VALUES, HAS_MASK, HAS_BOOTSTRAP,
    )  # fmt: skip
    tl.store(maps + chunk, _first(p, CHUNK))
    tl.store(maps + num_chunks + chunk, _first(q, CHUNK))
    tl.store(maps + 2 * num_chunks + chunk, _first(s, CHUNK))
    tl.store(maps + 3 * num_chunks + chunk, _first(c, CHUNK))
    tl.store(maps + 4 * num_chunks + chunk, _first(d, CHUNK))


@triton.jit
def gae_scan(
    rewards, values, mask, ends, bootstrap,  # as above
    maps,  # [5, num_chunks] float32
    advantages,  # [T] float32, written
    returns,  # [T] float32, written
    num_tokens, num_chunks, gamma, decay,
    HAS_VALUES: tl.constexpr, HAS_MASK: tl.constexpr, HAS_BOOTSTRAP: tl.constexpr,
    CHUNK: tl.constexpr, MAPS: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    a = 0.0  # incoming advantage and value, from the chunks after this one
    b = 0.0
    for block in range(0, tl.cdiv(num_chunks - chunk - 1, MAPS)):
        i = num_chunks - (block + 1) * MAPS + tl.arange(0, MAPS)
        later = (i > chunk) & (i < num_chunks)
        p = tl.load(maps + i, mask=later, other=1.0)
        q = tl.load(maps + num_chunks + i, mask=later, other=0.0)
        s = tl.load(maps + 2 * num_chunks + i, mask=later, other=1.0)
        c = tl.load(maps + 3 * num_chunks + i, mask=later, other=0.0)
        d = tl.load(maps + 4 * num_chunks + i, mask=later, other=0.0)
        p, q, s, c, d = tl.associative_scan((p, q, s, c, d), 0, _compose, reverse=True)
        a = _first(p, MAPS) * a + _first(q, MAPS) * b + _first(c, MAPS)
        b = _first(s, MAPS) * b + _first(d, MAPS)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = at < num_tokens
    p, q, c, _s, _d, v, live = _scan_tokens(
        rewards, values, mask, ends, bootstrap, at, inside, gamma, decay,
        HAS_VALUES, HAS_MASK, HAS_BOOTSTRAP,
    )  # fmt: skip
    advantage = p * a + q * b + c
    tl.store(advantages + at, tl.where(live, advantage, 0.0), mask=inside)
    tl.store(returns + at, tl.where(live, advantage + v, 0.0), mask=inside)


def gae_triton(
    rewards: torch.Tensor,
    values: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    mask: torch.Tensor | None,
    bootstrap: torch.Tensor | None,
    gamma: float,
    lam: float,
    advantages: torch.Tensor,
    returns: torch.Tensor,
    *,
    chunk: int = CHUNK,
    maps_at_once: int = MAPS,
) -> None:
    """Write advantages and returns [T]; arguments as gae's, checked and contiguous."""
    num_tokens = rewards.numel()
    if num_tokens == 0:
        return
    bounds = cu_seqlens.long()
    # the last token of each sequence; empty sequences point past the end
    last = torch.where(bounds[1:] > bounds[:-1], bounds[1:] - 1, num_tokens)
    ends = torch.zeros(num_tokens + 1, dtype=torch.int32, device=rewards.device)
    ends[last] = torch.arange(1, last.numel() + 1, dtype=torch.int32, device=rewards.device)
    num_chunks = triton.cdiv(num_tokens, chunk)
    maps = torch.empty(5, num_chunks, dtype=torch.float32, device=rewards.device)
    inputs = (
        rewards,
        rewards if values is None else values,
        ends if mask is None else mask.view(torch.uint8),
        ends,
        advantages if bootstrap is None else bootstrap,
        maps,
    )
    numbers = num_tokens, num_chunks, gamma, gamma * lam
    switches = {
        "HAS_VALUES": values is not None,
        "HAS_MASK": mask is not None,
        "HAS_BOOTSTRAP": bootstrap is not None,
        "CHUNK": chunk,
    }
    grid = (num_chunks,)
    gae_chunk_maps[grid](*inputs, *numbers, **switches)
    gae_scan[grid](*inputs, advantages, returns, *numbers, **switches, MAPS=maps_at_once)
