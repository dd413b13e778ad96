"""log_prob_from_logits, every backend, against float64 and torch's own softmax."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from megarl_kernels import log_prob_from_logits, log_prob_from_logits_reference
from megarl_kernels.log_prob import torch_backend
from megarl_kernels.log_prob.partials import TOP, TOTAL, WEIGHTED, new_partials
from megarl_kernels.log_prob.primitives import add_partials


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few tokens in the torch backend, so that the tests cross their borders."""
    monkeypatch.setattr(torch_backend, "MAX_BLOCK_LOGITS", 3000)


def make(
    num_tokens: int, vocab: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_tokens, vocab, generator=generator, dtype=torch.float64) * 4
    targets = torch.randint(vocab, (num_tokens,), generator=generator)
    return logits.to(dtype).requires_grad_(), targets


def evaluate(
    function: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    logits: torch.Tensor,
    targets: torch.Tensor,
    entropy_weight: float = 0.7,
    **kwargs: object,
) -> list[torch.Tensor]:
    """[log_probs, entropy, gradient] in float64 of a weighted sum of both outputs."""
    log_probs, entropy = function(logits, targets, **kwargs)
    by = torch.linspace(-1, 1.3, len(targets), dtype=log_probs.dtype)
    loss = (by * log_probs).sum()
    if entropy_weight:
        loss = loss + entropy_weight * ((by + 0.3) * entropy).sum()
    (grad,) = torch.autograd.grad(loss, logits)
    return [v.detach().double() for v in (log_probs, entropy, grad)]


def truth(logits: torch.Tensor, targets: torch.Tensor, *args: float, **kwargs: object) -> list:
    exact = logits.detach().double().requires_grad_()
    return evaluate(log_prob_from_logits_reference, exact, targets, *args, **kwargs)


# The C++ block is 2048 columns; odd sizes leave ragged vectors at every border.
@pytest.mark.parametrize(
    ("num_tokens", "vocab"), [(1, 1), (1, 2), (3, 17), (7, 2047), (5, 2049), (9, 5003)]
)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("entropy_weight", [0.0, 0.7])
@pytest.mark.parametrize("inplace_backward", [False, True])
def test_values_and_gradients_equal_float64(
    backend: str, num_tokens: int, vocab: int, temperature: float, entropy_weight: float,
    inplace_backward: bool,
) -> None:  # fmt: skip
    logits, targets = make(num_tokens, vocab)
    want = truth(logits, targets, entropy_weight, temperature=temperature)
    got = evaluate(
        log_prob_from_logits, logits, targets, entropy_weight, temperature=temperature,
        inplace_backward=inplace_backward,
    )  # fmt: skip
    for g, w in zip(got, want, strict=True):
        # float32 rounding of scaled logits up to ~30: 30 * 6e-8
        torch.testing.assert_close(g, w, rtol=2e-6, atol=4e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("entropy_weight", [0.0, 0.7])
def test_error_is_no_larger_than_that_of_torch_in_the_same_dtype(
    backend: str, dtype: torch.dtype, entropy_weight: float
) -> None:
    logits, targets = make(40, 3001, dtype)
    want = truth(logits, targets, entropy_weight)
    ours = evaluate(log_prob_from_logits, logits, targets, entropy_weight)
    theirs = evaluate(log_prob_from_logits_reference, logits, targets, entropy_weight)
    for o, t, w in zip(ours, theirs, want, strict=True):
        assert (o - w).abs().max() <= 1.5 * (t - w).abs().max() + 1e-6


@pytest.mark.parametrize("shift", [300.0, 3e4])
def test_a_common_shift_of_the_logits_changes_nothing(backend: str, shift: float) -> None:
    logits, targets = make(6, 700)
    logits = (logits.detach() * 16).round() / 16  # so that adding the shift is exact in float32
    plain = evaluate(log_prob_from_logits, logits.requires_grad_(), targets)
    moved = evaluate(log_prob_from_logits, (logits.detach() + shift).requires_grad_(), targets)
    for m, p in zip(moved, plain, strict=True):
        assert torch.equal(m, p)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inplace_backward", [False, True])
def test_minus_infinity_is_probability_zero(
    backend: str, dtype: torch.dtype, inplace_backward: bool
) -> None:
    logits, targets = make(8, 2500, dtype)
    with torch.no_grad():
        logits[:, ::3] = -torch.inf
        logits[0, :2300] = -torch.inf  # whole C++ blocks without any probability
        logits[1, 100:] = -torch.inf
        logits[2] = -torch.inf
        logits[2, 9] = 1.5  # certain
        targets[:] = torch.tensor([2404, 1, 9, 1, 3, 5, 4, 7])  # 4: itself of probability zero
        targets[4] = 3
    kept = logits.detach().float().isfinite()
    finite = torch.where(kept, logits.detach().double(), -1e9).requires_grad_()
    want = evaluate(log_prob_from_logits_reference, finite, targets)
    got = evaluate(log_prob_from_logits, logits, targets, inplace_backward=inplace_backward)
    assert got[0][4] == -torch.inf
    assert got[0][2] == got[1][2] == 0
    others = [0, 1, 2, 3, 5, 6, 7]
    rounding = (1e-2, 1e-5) if dtype == torch.bfloat16 else (2e-6, 4e-6)  # of the gradient
    torch.testing.assert_close(got[0][others], want[0][others], rtol=2e-6, atol=4e-6)
    torch.testing.assert_close(got[1], want[1], rtol=2e-6, atol=4e-6)
    torch.testing.assert_close(got[2], want[2], rtol=rounding[0], atol=rounding[1])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_logit_is_not_hidden_and_stays_in_its_row(backend: str, bad: float) -> None:
    for column in (0, 1000, 2048, 2999):
        logits, targets = make(3, 3000)
        with torch.no_grad():
            logits[1, column] = bad
        log_probs, entropy, grad = evaluate(log_prob_from_logits, logits, targets)
        assert log_probs.isnan().tolist() == entropy.isnan().tolist() == [False, True, False]
        assert grad[1].isnan().any()
        assert grad[[0, 2]].isfinite().all()


def test_tokens_without_gradient_get_exactly_zero_even_when_nan(backend: str) -> None:
    logits, targets = make(4, 50)
    with torch.no_grad():
        logits[1] = torch.nan
    log_probs, entropy = log_prob_from_logits(logits, targets)
    at = torch.tensor([0, 3])
    (grad,) = torch.autograd.grad(log_probs[at].sum() + entropy[at].sum(), logits)
    assert torch.equal(grad[1:3], torch.zeros(2, 50))
    assert (grad[at] != 0).any(dim=1).all()


def test_no_tokens(backend: str) -> None:
    logits, targets = make(0, 12)
    log_probs, entropy, grad = evaluate(log_prob_from_logits, logits, targets)
    assert log_probs.shape == entropy.shape == (0,)
    assert grad.shape == (0, 12)


@pytest.mark.parametrize("inplace_backward", [False, True])
def test_padded_columns_take_no_part_and_get_no_gradient(
    backend: str, inplace_backward: bool
) -> None:
    logits, targets = make(5, 3000)
    want = evaluate(log_prob_from_logits, logits, targets)
    padded = torch.cat([logits.detach(), torch.full((5, 9), 1e4)], dim=1).requires_grad_()
    got = evaluate(
        log_prob_from_logits, padded, targets, vocab_size=3000, inplace_backward=inplace_backward
    )
    for g, w in zip((got[0], got[1], got[2][:, :3000]), want, strict=True):
        assert torch.equal(g, w)
    assert not got[2][:, 3000:].any()


def test_gradcheck_in_float64(backend: str) -> None:
    logits, targets = make(4, 7, torch.float64)
    assert torch.autograd.gradcheck(
        lambda x: log_prob_from_logits(x, targets.clamp(max=5), temperature=0.7, vocab_size=6),
        logits,
    )


def test_without_entropy_the_log_probs_stay_the_same_and_the_entropy_is_zero(backend: str) -> None:
    logits, targets = make(6, 2500)
    full = evaluate(log_prob_from_logits, logits, targets, 0.0)
    fast = evaluate(log_prob_from_logits, logits, targets, 0.0, with_entropy=False)
    assert torch.equal(full[0], fast[0])
    assert torch.equal(full[2], fast[2])
    assert not fast[1].any()


def test_strided_logits_are_taken(backend: str) -> None:
    logits, targets = make(5, 40)
    want = evaluate(log_prob_from_logits, logits, targets)
    turned = logits.detach().t().contiguous().t().requires_grad_()
    wide = torch.cat([logits.detach(), torch.zeros(5, 8)], dim=1)
    for other in (turned, wide[:, :40].requires_grad_()):
        for g, w in zip(evaluate(log_prob_from_logits, other, targets), want, strict=True):
            assert torch.equal(g, w)
    with pytest.raises(ValueError, match="last dimension is contiguous"):
        log_prob_from_logits(turned, targets, inplace_backward=True)


def test_inplace_backward_reuses_the_memory_of_the_logits_and_runs_once(backend: str) -> None:
    leaf, targets = make(5, 40)
    logits = leaf * 1.0
    log_probs, _ = log_prob_from_logits(logits, targets, inplace_backward=True)
    (grad,) = torch.autograd.grad(log_probs.sum(), logits, retain_graph=True)
    assert grad.data_ptr() == logits.data_ptr()
    with pytest.raises(RuntimeError, match="backward runs once"):
        torch.autograd.grad(log_probs.sum(), logits)


def test_inplace_backward_is_noticed_by_others_who_kept_the_logits(backend: str) -> None:
    leaf, targets = make(5, 40)
    logits = leaf * 1.0
    square = logits.square().sum()
    log_probs, _ = log_prob_from_logits(logits, targets, inplace_backward=True)
    torch.autograd.grad(log_probs.sum(), logits)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(square, logits)


def test_columns_in_any_number_of_parts_give_the_same_partials(backend: str) -> None:
    logits, targets = make(6, 5000)
    logits = logits.detach()
    with torch.no_grad():
        logits[0, :3000] = -torch.inf
    whole = new_partials(6, torch.float32, logits.device)
    parts = new_partials(6, torch.float32, logits.device)
    options = {"scale": 1.25, "with_entropy": True}
    add_partials(backend, logits, targets, whole, first_column=0, **options)
    for first, end in ((0, 1), (1, 1), (1, 2050), (2050, 5000)):
        add_partials(
            backend, logits[:, first:end], targets, parts, first_column=first, **options
        )  # fmt: skip
    torch.testing.assert_close(parts, whole, rtol=2e-6, atol=1e-6)
    exact = logits.double()
    z = (exact - exact.amax(-1, keepdim=True)) * 1.25
    torch.testing.assert_close(whole[TOP], logits.amax(-1))
    torch.testing.assert_close(whole[TOTAL].double(), z.exp().sum(-1), rtol=2e-6, atol=0)
    weighted = (z.exp() * z.clamp(min=-1e9)).sum(-1)
    torch.testing.assert_close(whole[WEIGHTED].double(), weighted, rtol=2e-6, atol=1e-6)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    num_tokens=st.integers(0, 5), vocab=st.integers(1, 300), spread=st.floats(0, 50),
    seed=st.integers(0, 2**16),
)  # fmt: skip
def test_log_prob_and_entropy_stay_in_their_ranges(
    backend: str, num_tokens: int, vocab: int, spread: float, seed: int
) -> None:
    logits, targets = make(num_tokens, vocab, seed=seed)
    log_probs, entropy = log_prob_from_logits(logits.detach() * spread, targets)
    assert (log_probs <= 0).all()
    assert (entropy >= 0).all()
    assert (entropy <= math.log(vocab) * (1 + 1e-6) + 1e-6).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature=0.0 must be > 0"),
        ({"logits": torch.zeros(3)}, r"must be \[T, V_tp\]"),
        ({"logits": torch.zeros(3, 4, dtype=torch.int64)}, "floating point"),
        ({"targets": torch.zeros(2, dtype=torch.int64)}, r"must be \[3\] int64"),
        ({"targets": torch.zeros(3, dtype=torch.int32)}, r"must be \[3\] int64"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, object], message: str) -> None:
    good = {"logits": torch.zeros(3, 4), "targets": torch.zeros(3, dtype=torch.int64)}
    with pytest.raises(ValueError, match=message):
        log_prob_from_logits(**{**good, **change})  # type: ignore[arg-type]
