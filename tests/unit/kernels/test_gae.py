"""gae and discounted_sum, every backend, against the textbook loop in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from megarl_kernels import discounted_sum, gae, gae_reference

# Lengths around the block of the C++ scan (256) and its unrolling by 4; empty and one-token ones.
LENGTHS = [0, 1, 2, 3, 5, 0, 255, 256, 257, 515, 0]


def make(
    lengths: list[int], dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[torch.Tensor, ...]:
    """rewards [T], values [T], cu_seqlens [S + 1], mask [T], bootstrap [S]."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths)
    rewards, values = torch.randn(2, num_tokens, generator=generator, dtype=torch.float64)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    mask = torch.rand(num_tokens, generator=generator) > 0.3
    bootstrap = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    return rewards.to(dtype), values.to(dtype), cu_seqlens, mask, bootstrap.to(dtype)


def truth(
    rewards: torch.Tensor, values: torch.Tensor, cu_seqlens: torch.Tensor, **kwargs: object
) -> tuple[torch.Tensor, torch.Tensor]:
    kwargs = {k: v.double() if k == "bootstrap" else v for k, v in kwargs.items()}  # type: ignore[attr-defined]
    return gae_reference(rewards.double(), values.double(), cu_seqlens, **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 1.0)])
def test_gae_equals_the_float64_loop(
    backend: str, gamma: float, lam: float, masked: bool, dtype: torch.dtype
) -> None:
    if backend == "cpu" and dtype == torch.float16:
        pytest.skip("converted to float32 before dispatch: the float32 case")
    rewards, values, cu_seqlens, mask, bootstrap = make(LENGTHS, dtype)
    kwargs = {"gamma": gamma, "lam": lam, "bootstrap": bootstrap, "mask": mask if masked else None}
    got = gae(rewards, values, cu_seqlens, **kwargs)  # type: ignore[arg-type]
    want = truth(rewards, values, cu_seqlens, **kwargs)
    wide = dtype == torch.float64
    for g, w in zip(got, want, strict=True):
        assert g.dtype == (torch.float64 if wide else torch.float32)
        # 515 additions of numbers up to ~50 in float32
        torch.testing.assert_close(
            g.double(), w, rtol=1e-12 if wide else 2e-6, atol=1e-12 if wide else 2e-5
        )


def test_three_tokens_by_hand(backend: str) -> None:
    # gamma = lam = 1/2, last first: 4 - 2 + 8/2 = 6; 2 + 2/2 - 1 + 6/4 = 3.5; 0 + 1/2 - 1 + 3.5/4
    got = gae(
        torch.tensor([0.0, 2.0, 4.0]), torch.tensor([1.0, 1.0, 2.0]), torch.tensor([0, 3]),
        gamma=0.5, lam=0.5, bootstrap=torch.tensor([8.0]),
    )  # fmt: skip
    assert got[0].tolist() == [0.375, 3.5, 6.0]
    assert got[1].tolist() == [1.375, 4.5, 8.0]


def test_masked_tokens_leave_the_rest_as_if_they_were_cut_out(backend: str) -> None:
    rewards, values, cu_seqlens, mask, bootstrap = make(LENGTHS)
    masked = gae(
        rewards, values, cu_seqlens, gamma=0.9, lam=0.8, mask=mask, bootstrap=bootstrap
    )  # fmt: skip
    kept = torch.cat([torch.zeros(1, dtype=torch.long), mask.long().cumsum(0)])[cu_seqlens.long()]
    cut = gae(rewards[mask], values[mask], kept, gamma=0.9, lam=0.8, bootstrap=bootstrap)
    for m, c in zip(masked, cut, strict=True):
        torch.testing.assert_close(m[mask], c, rtol=1e-5, atol=1e-6)
        assert torch.equal(m[~mask], torch.zeros(int((~mask).sum())))


def test_nan_outside_the_mask_has_no_effect(backend: str) -> None:
    rewards, values, cu_seqlens, mask, _ = make(LENGTHS)
    clean = gae(rewards, values, cu_seqlens, gamma=0.9, lam=0.8, mask=mask)
    rewards[~mask], values[~mask] = torch.nan, torch.inf
    dirty = gae(rewards, values, cu_seqlens, gamma=0.9, lam=0.8, mask=mask)
    assert torch.equal(clean[0], dirty[0])
    assert torch.equal(clean[1], dirty[1])


@pytest.mark.parametrize("lengths", [[], [0], [0, 0], [1]])
def test_no_tokens_and_one_token(backend: str, lengths: list[int]) -> None:
    rewards, values, cu_seqlens, _, bootstrap = make(lengths)
    advantages, returns = gae(rewards, values, cu_seqlens, gamma=0.5, lam=1.0, bootstrap=bootstrap)
    want = rewards + 0.5 * bootstrap[: len(rewards)] - values
    torch.testing.assert_close(advantages, want)
    torch.testing.assert_close(returns, want + values)


def test_all_masked_gives_zeros(backend: str) -> None:
    rewards, values, cu_seqlens, mask, bootstrap = make(LENGTHS)
    for out in gae(
        rewards, values, cu_seqlens, gamma=1, lam=1, mask=torch.zeros_like(mask),
        bootstrap=bootstrap,
    ):  # fmt: skip
        assert torch.equal(out, torch.zeros_like(rewards))


def test_long_sequence_with_strong_discount_does_not_overflow(backend: str) -> None:
    # dividing by powers of 0.5 would overflow float32 after 128 tokens
    rewards = torch.ones(20_000)
    got = gae(rewards, torch.zeros_like(rewards), torch.tensor([0, 20_000]), gamma=0.5, lam=1.0)[0]
    torch.testing.assert_close(got[:-30], torch.full((19_970,), 2.0))


def test_gradients_do_not_flow(backend: str) -> None:
    rewards, values, cu_seqlens, _, _ = make([3])
    advantages, returns = gae(rewards, values.requires_grad_(), cu_seqlens, gamma=1.0, lam=1.0)
    assert not advantages.requires_grad
    assert not returns.requires_grad


def test_inputs_that_are_strided_or_of_mixed_dtypes_are_taken(backend: str) -> None:
    rewards, values, cu_seqlens, mask, _ = make(LENGTHS)
    pairs = torch.stack([rewards, values], dim=1)
    want = gae(rewards, values.bfloat16().float(), cu_seqlens, gamma=0.9, lam=0.9, mask=mask)
    got = gae(
        pairs[:, 0], pairs[:, 1].bfloat16(), cu_seqlens.long(), gamma=0.9, lam=0.9, mask=mask.int()
    )
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    lengths=st.lists(st.integers(0, 40), max_size=8),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
    seed=st.integers(0, 2**16),
)
def test_any_packing_equals_the_loop(
    backend: str, lengths: list[int], gamma: float, lam: float, seed: int
) -> None:
    rewards, values, cu_seqlens, mask, bootstrap = make(lengths, torch.float64, seed)
    kwargs = {"gamma": gamma, "lam": lam, "mask": mask, "bootstrap": bootstrap}
    got = gae(rewards, values, cu_seqlens, **kwargs)  # type: ignore[arg-type]
    for g, w in zip(got, truth(rewards, values, cu_seqlens, **kwargs), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-9, atol=1e-9)


def test_discounted_sum_equals_gae_with_zero_values_and_lam_one(backend: str) -> None:
    rewards, values, cu_seqlens, mask, _ = make(LENGTHS)
    got = discounted_sum(rewards, cu_seqlens, gamma=0.97, mask=mask)
    want = truth(rewards, values * 0, cu_seqlens, gamma=0.97, lam=1.0, mask=mask)[0]
    torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gamma": 1.1}, r"gamma=1.1 must be in \[0, 1\]"),
        ({"lam": -0.1}, r"lam=-0.1 must be in"),
        ({"values": torch.zeros(3)}, r"values \(3,\) must be \[4\]"),
        ({"mask": torch.zeros(4)}, "mask is torch.float32; it must be bool or integer"),
        ({"bootstrap": torch.zeros(3)}, r"bootstrap \(3,\) must be \[2\]"),
        ({"cu_seqlens": torch.tensor([0, 3, 5])}, "must go from 0 to T=4"),
        ({"cu_seqlens": torch.tensor([0, 5, 4])}, "must go from 0 to T=4"),
        ({"cu_seqlens": torch.zeros(2)}, "must be .* int32/int64"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, object], message: str) -> None:
    good = {
        "rewards": torch.zeros(4), "values": torch.zeros(4), "cu_seqlens": torch.tensor([0, 1, 4]),
        "gamma": 1.0, "lam": 1.0,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        gae(**{**good, **change})  # type: ignore[arg-type]
