"""Kernels against plain torch, other formulations and the machine's limits, on one thread.

    python benchmarks/kernels.py [--tasks gae logits linear] [--output FILE] [--compile] [--small]

Ratios are to the first variant of each task. "limit" rows move the bytes, or do the products, that
the task cannot do without.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from harness import environment, measure_memory, measure_times, peak_bytes, row, write_result
from megarl_kernels import (
    gae,
    linear_log_prob,
    linear_log_prob_reference,
    log_prob_from_logits,
    log_prob_from_logits_reference,
    whiten,
    whiten_reference,
)

Variants = dict[str, Callable[[], Any]]


def in_torch(run: Callable[[], Any]) -> Callable[[], Any]:
    """The same call on the plain torch backend."""

    def call() -> Any:
        with mock.patch.dict("os.environ", MEGARL_KERNELS="torch"):
            return run()

    return call


def textbook_gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> torch.Tensor:
    """The loop over padded [S, L] that most libraries have; masked tokens are stepped over."""
    next_value = torch.zeros(rewards.size(0))
    last = torch.zeros(rewards.size(0))
    reverse = []
    for t in reversed(range(rewards.size(1))):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * last
        next_value = values[:, t] * mask[:, t] + (1 - mask[:, t]) * next_value
        last = advantage * mask[:, t] + (1 - mask[:, t]) * last
        reverse.append(last)
    return torch.stack(reverse[::-1], dim=1)


def gae_variants(small: bool) -> tuple[str, Variants]:
    num_tokens = 2**14 if small else 2**20
    generator = torch.Generator().manual_seed(0)
    lengths = (torch.rand(490, generator=generator) * 2 * num_tokens / 490).long() + 1
    lengths[-1] += num_tokens - lengths.sum() if lengths.sum() < num_tokens else 0
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).int()
    total = int(cu_seqlens[-1])
    rewards, values = torch.randn(2, total, generator=generator)
    mask = torch.rand(total, generator=generator) > 0.3
    spans = mask.clone()
    spans[:] = (torch.arange(total) // 700) % 3 > 0  # tool output comes in spans
    padded = [
        torch.nn.utils.rnn.pad_sequence(v.split(lengths.tolist()), batch_first=True)
        for v in (rewards, values, torch.ones(total))
    ]
    source, target = torch.randn(2, 2 * total)
    kwargs = {"gamma": 0.99, "lam": 0.95}
    return f"gae, {total} packed tokens, 490 sequences", {
        "ours": lambda: gae(rewards, values, cu_seqlens, **kwargs),
        "limit: copy of the same bytes": lambda: target.copy_(source),
        "ours, masked in spans": lambda: gae(rewards, values, cu_seqlens, mask=spans, **kwargs),
        "ours, random mask": lambda: gae(rewards, values, cu_seqlens, mask=mask, **kwargs),
        "torch backend": in_torch(lambda: gae(rewards, values, cu_seqlens, **kwargs)),
        "textbook loop, padded": lambda: textbook_gae(*padded, **kwargs),
    }


def whiten_variants(small: bool) -> tuple[str, Variants]:
    x = torch.randn(2**14 if small else 2**20)
    mask = torch.rand(x.shape) > 0.3
    return f"whiten, {x.numel()} masked", {
        "ours": lambda: whiten(x, mask),
        "torch backend": in_torch(lambda: whiten(x, mask)),
        "torch, selected": lambda: whiten_reference(x, mask),
    }


def backward(scores: tuple[torch.Tensor, torch.Tensor], *leaves: torch.Tensor) -> Any:
    return torch.autograd.grad((scores[0] + 0.01 * scores[1]).sum(), leaves)


def logits_variants(small: bool, compiled: bool) -> tuple[str, Variants]:
    shape = (64, 4000) if small else (2048, 32000)
    logits = torch.randn(shape).requires_grad_()
    targets = torch.randint(shape[1], shape[:1])
    target = torch.empty(shape)
    bare = logits.detach()

    def inplace() -> Any:  # a gradient in the logits' place is as good an input as any
        return backward(log_prob_from_logits(logits, targets, inplace_backward=True), logits)

    def copies() -> None:  # forward reads once, backward reads and writes
        target.copy_(bare)
        bare.sum()

    naive = log_prob_from_logits_reference
    variants: Variants = {
        "ours, in place": inplace,
        "limit: copy and read of the same bytes": copies,
        "ours": lambda: backward(log_prob_from_logits(logits, targets), logits),
        "ours, forward only": lambda: log_prob_from_logits(bare, targets),
        "torch backend, in place": in_torch(inplace),
        "naive torch": lambda: backward(naive(logits, targets), logits),
    }
    if compiled:
        fast = torch.compile(naive)
        variants["torch.compile of naive"] = lambda: backward(fast(logits, targets), logits)
    return f"log-prob and entropy from logits {shape} fp32, forward + backward", variants


def linear_variants(small: bool, with_backward: bool) -> tuple[str, Variants]:
    tokens, hidden, vocab = (64, 64, 4000) if small else (1024, 896, 151936)
    x = (torch.randn(tokens, hidden) * 0.5).bfloat16().requires_grad_()
    w = (torch.randn(vocab, hidden) * 0.05).bfloat16().requires_grad_()
    t = torch.randint(vocab, (tokens,))
    bare_x, bare_w = x.detach(), w.detach()

    def products(count: int) -> None:
        z = bare_x @ bare_w.t()
        if count == 3:
            z @ bare_w
            z.t() @ bare_x

    if not with_backward:
        return f"linear head {tokens}x{hidden}x{vocab} bf16, forward", {
            "ours": lambda: linear_log_prob(bare_x, bare_w, t),
            "limit: 1 product": lambda: products(1),
            "naive torch": lambda: linear_log_prob_reference(bare_x, bare_w, t),
        }
    return f"linear head {tokens}x{hidden}x{vocab} bf16, forward + backward", {
        "ours, keep": lambda: backward(linear_log_prob(x, w, t, backward="keep"), x, w),
        "limit: 3 products": lambda: products(3),
        "ours, recompute": lambda: backward(linear_log_prob(x, w, t), x, w),
        "naive torch": lambda: backward(linear_log_prob_reference(x, w, t), x, w),
    }


def tasks(args: argparse.Namespace) -> dict[str, tuple[Callable[[], tuple[str, Variants]], int]]:
    """Name -> (builder, repeats)."""
    return {
        "gae": (lambda: gae_variants(args.small), 20),
        "whiten": (lambda: whiten_variants(args.small), 20),
        "logits": (lambda: logits_variants(args.small, args.compile), 20),
        "linear_forward": (lambda: linear_variants(args.small, False), 20),
        "linear": (lambda: linear_variants(args.small, True), 20),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", help="default: all")
    parser.add_argument("--repeats", type=int, help="default: 20")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--compile", action="store_true", help="add torch.compile of naive torch")
    parser.add_argument("--small", action="store_true", help="tiny shapes, to try the script")
    parser.add_argument("--memory", nargs=2, metavar=("TASK", "VARIANT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    available = tasks(args)
    if args.memory:
        task, name = args.memory
        print(peak_bytes(available[task][0]()[1][name]))
        return
    size = [f"--{flag}" for flag in ("small", "compile") if getattr(args, flag)]
    rows = []
    print(environment())
    for task in args.tasks or available:
        build, repeats = available[task]
        title, variants = build()
        times = measure_times(variants, num_repeats=args.repeats or repeats)
        print(f"\n{title}: median [p10, p90] ms, ratio, peak extra MB")
        base = next(iter(times.values()))
        for name, timing in times.items():
            extra = measure_memory(__file__, *size, "--memory", task, name)
            rows.append(row(title, name, timing, base, peak_extra_bytes=extra))
            ms = [1e3 * s for s in (timing.median_s, timing.p10_s, timing.p90_s)]
            print(
                f"  {name:40s} {ms[0]:9.2f} [{ms[1]:9.2f}, {ms[2]:9.2f}]"
                f" {rows[-1]['ratio']:7.2f} {extra / 1e6:8.1f}", flush=True,
            )  # fmt: skip
    if args.output:
        write_result(args.output, rows)


if __name__ == "__main__":
    main()
