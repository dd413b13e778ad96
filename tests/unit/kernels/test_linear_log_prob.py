"""linear_log_prob against an unchunked float64 reference, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from megarl_kernels import linear_log_prob, linear_log_prob_reference
from megarl_kernels.linear_log_prob import chunked
from torch.utils._python_dispatch import TorchDispatchMode


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 tokens and 16 rows per chunk, so that the tests cross chunk borders."""
    monkeypatch.setattr(chunked, "CPU_CHUNK", (64, 16))


@pytest.fixture(params=["recompute", "keep"])
def backward(request: pytest.FixtureRequest) -> str:
    return request.param


def make(
    num_tokens: int, hidden: int, vocab: int, dtype: torch.dtype, scale: float = 1.0
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_tokens, hidden, generator=generator, dtype=torch.float64) * scale
    w = torch.randn(vocab, hidden, generator=generator, dtype=torch.float64)
    t = torch.randint(vocab, (num_tokens,), generator=generator)
    return [x.to(dtype).requires_grad_(), w.to(dtype).requires_grad_(), t]


def gradients(
    function: Callable[..., tuple[torch.Tensor, torch.Tensor]], x: torch.Tensor, w: torch.Tensor,
    t: torch.Tensor, *, entropy_weight: float, **kwargs: object,
) -> list[torch.Tensor]:  # fmt: skip
    """[log_probs, entropy, grad x, grad w] in float64 of a weighted sum of both outputs."""
    log_probs, entropy = function(x, w, t, **kwargs)
    by = torch.linspace(-1, 1, len(t), dtype=log_probs.dtype)
    loss = (by * log_probs).sum()
    if entropy_weight:
        loss = loss + entropy_weight * ((by + 0.3) * entropy).sum()
    grads = torch.autograd.grad(loss, (x, w))
    return [v.detach().double() for v in (log_probs, entropy, *grads)]


@pytest.mark.parametrize("entropy_weight", [0.0, 0.7])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("num_tokens", [1, 63, 64, 150])
def test_values_and_gradients_equal_the_float64_reference(
    backend: str, backward: str, num_tokens: int, temperature: float, entropy_weight: float
) -> None:
    x, w, t = make(num_tokens, 16, 53, torch.float32)
    got = gradients(
        linear_log_prob, x, w, t, entropy_weight=entropy_weight, temperature=temperature,
        backward=backward,
    )  # fmt: skip
    exact = [v.detach().double().requires_grad_() for v in (x, w)]
    want = gradients(
        linear_log_prob_reference, *exact, t, entropy_weight=entropy_weight, temperature=temperature
    )
    for g, e in zip(got, want, strict=True):
        # float32 rounding of logits of size ~20: 20 * 6e-8, times a few operations
        torch.testing.assert_close(g, e, rtol=2e-6, atol=2e-5)


def test_gradients_pass_gradcheck_in_float64_for_both_outputs(backend: str) -> None:
    x, w, t = make(5, 4, 7, torch.float64)
    t = t.clamp(max=5)
    assert torch.autograd.gradcheck(
        lambda x, w: linear_log_prob(x, w, t, temperature=0.7, vocab_size=6), (x, w)
    )


def test_no_tokens_give_empty_outputs_and_zero_gradients(backend: str, backward: str) -> None:
    x, w, t = make(0, 4, 7, torch.float32)
    log_probs, entropy = linear_log_prob(x, w, t, backward=backward)  # type: ignore[arg-type]
    grads = torch.autograd.grad(log_probs.sum() + entropy.sum(), (x, w))
    assert log_probs.shape == entropy.shape == (0,)
    assert grads[0].shape == (0, 4)
    assert torch.equal(grads[1], torch.zeros(7, 4))


def test_padded_vocabulary_rows_change_nothing_and_get_no_gradient(
    backend: str, backward: str
) -> None:
    x, w, t = make(70, 8, 30, torch.float32)
    want = gradients(linear_log_prob, x, w, t, entropy_weight=0.5, backward=backward)
    # rows far above every real logit would take all probability if they took part
    padded = torch.cat([w.detach(), torch.full((4, 8), 100.0)]).requires_grad_()
    got = gradients(
        linear_log_prob, x, padded, t, entropy_weight=0.5, vocab_size=30, backward=backward
    )
    for g, e in zip(got[:3], want[:3], strict=True):
        assert torch.equal(g, e)
    assert torch.equal(got[3][:30], want[3])
    assert torch.equal(got[3][30:], torch.zeros(4, 8, dtype=torch.float64))


def test_a_large_common_shift_of_the_logits_does_not_blow_up(backend: str) -> None:
    x, w, t = make(10, 8, 20, torch.float32)
    shift = 3e4  # one extra hidden unit adds it to every logit
    ones = torch.ones(10, 1)
    shifted_x = torch.cat([x.detach(), ones], dim=1).requires_grad_()
    shifted_w = torch.cat([w.detach(), torch.full((20, 1), shift)], dim=1).requires_grad_()
    got = gradients(linear_log_prob, shifted_x, shifted_w, t, entropy_weight=0.5)
    exact = [v.detach().double().requires_grad_() for v in (shifted_x, shifted_w)]
    want = gradients(linear_log_prob_reference, *exact, t, entropy_weight=0.5)
    for g, e in zip(got[:2], want[:2], strict=True):
        # logits near 3e4 have float32 steps of 2e-3; nothing may be lost beyond that
        torch.testing.assert_close(g, e, rtol=0, atol=1e-2)
    assert all(torch.isfinite(g).all() for g in got)


def test_entropy_gradient_is_zero_where_the_distribution_is_uniform(backend: str) -> None:
    x, w, t = make(3, 4, 9, torch.float64)
    w = torch.zeros_like(w).requires_grad_()
    _, entropy = linear_log_prob(x, w, t)
    torch.testing.assert_close(entropy, torch.full((3,), 9.0, dtype=torch.float64).log())
    grad = torch.autograd.grad(entropy.sum(), w)[0]
    torch.testing.assert_close(grad, torch.zeros_like(grad), rtol=0, atol=1e-12)


def test_without_entropy_log_probs_and_gradients_stay_the_same(backend: str) -> None:
    x, w, t = make(100, 8, 40, torch.float32)
    full = gradients(linear_log_prob, x, w, t, entropy_weight=0.0)
    fast = gradients(linear_log_prob, x, w, t, entropy_weight=0.0, with_entropy=False)
    for i in (0, 2, 3):
        assert torch.equal(full[i], fast[i])
    assert torch.equal(fast[1], torch.zeros(100, dtype=torch.float64))


def test_bfloat16_error_is_no_larger_than_that_of_the_bfloat16_reference(
    backend: str, backward: str
) -> None:
    x, w, t = make(130, 32, 64, torch.bfloat16, scale=0.3)
    exact = [v.detach().double().requires_grad_() for v in (x, w)]
    truth = gradients(linear_log_prob_reference, *exact, t, entropy_weight=0.5)
    ours = gradients(linear_log_prob, x, w, t, entropy_weight=0.5, backward=backward)
    theirs = gradients(linear_log_prob_reference, x, w, t, entropy_weight=0.5)
    for truth_, ours_, theirs_ in zip(truth, ours, theirs, strict=True):
        allowed = (theirs_ - truth_).abs().max() * 1.5 + 1e-3  # chunking rounds in another order
        assert (ours_ - truth_).abs().max() <= allowed


def test_kept_logits_serve_one_backward_pass_and_recomputed_ones_any_number(backend: str) -> None:
    x, w, t = make(20, 8, 40, torch.float32)
    log_probs, _ = linear_log_prob(x, w, t)
    first = torch.autograd.grad(log_probs.sum(), (x, w), retain_graph=True)
    second = torch.autograd.grad(log_probs.sum(), (x, w))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    log_probs, _ = linear_log_prob(x, w, t, backward="keep")
    torch.autograd.grad(log_probs.sum(), (x, w), retain_graph=True)
    with pytest.raises(RuntimeError, match="backward runs once"):
        torch.autograd.grad(log_probs.sum(), (x, w))


def test_a_frozen_side_gets_no_gradient_and_does_not_change_the_other(
    backend: str, backward: str
) -> None:
    x, w, t = make(70, 8, 40, torch.float32)
    both = gradients(linear_log_prob, x, w, t, entropy_weight=0.5, backward=backward)
    by = torch.linspace(-1, 1, 70)
    for frozen, at in ((w, 2), (x, 3)):
        frozen.requires_grad_(False)
        log_probs, entropy = linear_log_prob(x, w, t, backward=backward)  # type: ignore[arg-type]
        other = x if frozen is w else w
        loss = (by * log_probs).sum() + 0.5 * ((by + 0.3) * entropy).sum()
        assert torch.equal(torch.autograd.grad(loss, other)[0].double(), both[at])
        frozen.requires_grad_(True)


def test_no_tensor_of_tokens_times_vocabulary_is_made(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: object, types: object, args: tuple = (), kwargs: dict | None = None
        ) -> object:
            out = func(*args, **(kwargs or {}))  # type: ignore[operator]
            for tensor in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(tensor, torch.Tensor):
                    sizes.append(tensor.numel())
            return out

    x, w, t = make(150, 4, 500, torch.float32)
    with Recorder():
        log_probs, entropy = linear_log_prob(x, w, t)
        torch.autograd.grad((log_probs + entropy).sum(), (x, w))
    assert max(sizes) <= 500 * 4  # the gradient of the weight; T * V is 75000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature=0.0 must be > 0"),
        ({"backward": "both"}, "backward='both' must be 'recompute' or 'keep'"),
        ({"hidden": torch.zeros(3, 5)}, r"must be \[T, H\]"),
        ({"targets": torch.zeros(2, dtype=torch.int64)}, r"must be \[3\] int64"),
        ({"weight": torch.zeros(7, 4, dtype=torch.float64)}, "must have one dtype"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, object], message: str) -> None:
    good = {
        "hidden": torch.zeros(3, 4),
        "weight": torch.zeros(7, 4),
        "targets": torch.zeros(3, dtype=torch.int64),
    }
    call = {**good, **change}
    with pytest.raises(ValueError, match=message):
        linear_log_prob(call.pop("hidden"), call.pop("weight"), call.pop("targets"), **call)  # type: ignore[arg-type]
