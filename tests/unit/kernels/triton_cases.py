"""The Triton kernels under Triton's interpreter, against float64.

test_triton.py runs this file in a process of its own: TRITON_INTERPRET is read when the kernels are
defined. Shapes are tiny, the interpreter is slow; float32 only, its bfloat16 product is wrong.
"""

from __future__ import annotations

import pytest
import torch
from megarl_kernels import (
    gae,
    gae_reference,
    linear_log_prob,
    linear_log_prob_reference,
    log_prob_from_logits,
    log_prob_from_logits_reference,
)
from megarl_kernels.dispatch import choose_backend
from megarl_kernels.gae import triton_backend as gae_triton
from megarl_kernels.linear_log_prob import chunked
from megarl_kernels.log_prob import triton_backend as log_prob_triton


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of which even tiny inputs need several."""
    monkeypatch.setattr(log_prob_triton, "LANES", {torch.float32: 32, torch.bfloat16: 32})
    monkeypatch.setattr(log_prob_triton, "GRADIENT_BLOCK", 64)
    monkeypatch.setattr(chunked, "CPU_CHUNK", (40, 128))


def test_triton_is_what_runs() -> None:
    assert choose_backend("gae", torch.zeros(1)) == "triton"


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95)])
def test_gae(masked: bool, dtype: torch.dtype, gamma: float, lam: float) -> None:
    generator = torch.Generator().manual_seed(0)
    cu_seqlens = torch.tensor([0, 0, 1, 8, 70, 70, 330, 335]).int()
    rewards, values = torch.randn(2, 335, generator=generator).to(dtype)
    bootstrap = torch.randn(7, generator=generator)
    live = torch.rand(335, generator=generator) > 0.4
    live[72:200] = False  # whole chunks without a live token
    rewards[~live] = torch.nan if masked else 0.5
    mask = live if masked else None
    got = [torch.empty(335), torch.empty(335)]
    gae_triton.gae_triton(
        rewards, values, cu_seqlens, mask, bootstrap, gamma, lam, *got, chunk=32, maps_at_once=4
    )
    want = gae_reference(
        rewards.double(), values.double(), cu_seqlens, gamma=gamma, lam=lam, mask=mask,
        bootstrap=bootstrap.double(),
    )  # fmt: skip
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g.double(), w, rtol=2e-6, atol=1e-5)  # sums of ~260 numbers


def test_gae_without_tokens() -> None:
    advantages, returns = gae(torch.zeros(0), torch.zeros(0), torch.tensor([0]), gamma=1, lam=1)
    assert advantages.shape == returns.shape == (0,)


def outputs(function: object, inputs: list[torch.Tensor], **kwargs: object) -> list[torch.Tensor]:
    """[log_probs, entropy, gradients] in float64."""
    *leaves, targets = inputs
    log_probs, entropy = function(*leaves, targets, **kwargs)  # type: ignore[operator]
    by = torch.linspace(-1, 1, len(targets), dtype=log_probs.dtype)
    loss = (by * log_probs).sum() + kwargs.get("with_entropy", True) * ((by + 0.3) * entropy).sum()
    return [v.detach().double() for v in (log_probs, entropy, *torch.autograd.grad(loss, leaves))]


@pytest.mark.parametrize("inplace_backward", [False, True])
@pytest.mark.parametrize("shift", [0.0, 3e4])
def test_log_prob_from_logits(inplace_backward: bool, shift: float) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(5, 301, generator=generator) * 64).round() / 16 + shift
    targets = torch.randint(301, (5,), generator=generator)
    exact = logits.double().requires_grad_()
    want = outputs(log_prob_from_logits_reference, [exact, targets], temperature=0.8)
    padded = torch.cat([logits, torch.full((5, 3), 1e5)], dim=1).requires_grad_()
    got = outputs(
        log_prob_from_logits, [padded, targets], temperature=0.8, vocab_size=301,
        inplace_backward=inplace_backward,
    )  # fmt: skip
    got[2] = got[2][:, :301]
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=2e-6, atol=4e-6)


def test_log_prob_from_logits_with_minus_infinity() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(3, 200, generator=generator)
    logits[:, ::3] = -torch.inf
    logits[1, :190] = -torch.inf
    targets = torch.tensor([4, 199, 1])
    finite = logits.double().clamp(min=-1e9).requires_grad_()
    want = outputs(log_prob_from_logits_reference, [finite, targets])
    got = outputs(log_prob_from_logits, [logits.requires_grad_(), targets])
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=2e-6, atol=4e-6)


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize(("tokens", "hidden", "vocab"), [(1, 4, 3), (50, 36, 300)])
def test_linear_log_prob(with_entropy: bool, tokens: int, hidden: int, vocab: int) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(tokens, hidden, generator=generator)
    w = torch.randn(vocab + 2, hidden, generator=generator)
    w[vocab:] = 100.0
    t = torch.randint(vocab, (tokens,), generator=generator)
    exact = [v.double().requires_grad_() for v in (x, w)]
    want = outputs(
        lambda *a, with_entropy, **k: linear_log_prob_reference(*a, **k), [*exact, t],
        temperature=0.8, vocab_size=vocab, with_entropy=with_entropy,
    )  # fmt: skip
    got = outputs(
        linear_log_prob, [x.requires_grad_(), w.requires_grad_(), t], temperature=0.8,
        vocab_size=vocab, with_entropy=with_entropy,
    )  # fmt: skip
    if not with_entropy:
        want[1].zero_()
    for g, e in zip(got, want, strict=True):
        torch.testing.assert_close(g, e, rtol=3e-6, atol=2e-5)  # logits up to ~30
