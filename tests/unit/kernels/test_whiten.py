"""whiten and group_mean_std against float64 references."""

from __future__ import annotations

import pytest
import torch
from megarl_kernels import group_mean_std, whiten, whiten_reference


def make(n: int, dtype: torch.dtype, shift: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, generator=generator, dtype=torch.float64) * 3 + shift
    return x.to(dtype), torch.rand(n, generator=generator) > 0.4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("n", [2, 5, 63, 4097, 70_001])  # around the C++ block; above its threads
@pytest.mark.parametrize("masked", [False, True])
def test_whiten_equals_the_float64_reference(
    backend: str, n: int, masked: bool, dtype: torch.dtype
) -> None:
    x, mask = make(n, dtype)
    got = whiten(x, mask if masked else None)
    want = whiten_reference(x.double(), mask if masked else None)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    # one rounding of a result below 8
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)


def test_a_shift_of_30000_costs_only_the_rounding_of_the_input(backend: str) -> None:
    x, mask = make(1000, torch.float32, shift=3e4)
    want = whiten_reference(x.double(), mask)
    torch.testing.assert_close(whiten(x, mask).double(), want, rtol=1e-6, atol=1e-6)


def test_two_and_three_dimensional_input_keeps_its_shape(backend: str) -> None:
    x, mask = make(60, torch.float32)
    flat = whiten(x, mask)
    assert torch.equal(whiten(x.view(3, 4, 5), mask.view(3, 4, 5)), flat.view(3, 4, 5))
    assert torch.equal(whiten(x.view(6, 10).t(), mask.view(6, 10).t()).t(), flat.view(6, 10))


def test_nan_outside_the_mask_has_no_effect_and_the_result_there_is_zero(backend: str) -> None:
    x, mask = make(300, torch.float32)
    clean = whiten(x, mask)
    assert torch.equal(whiten(x.masked_fill(~mask, torch.nan), mask), clean)
    assert not clean[~mask].any()


def test_nan_inside_the_mask_is_not_hidden(backend: str) -> None:
    x, mask = make(300, torch.float32)
    x[mask.nonzero()[0]] = torch.nan
    assert whiten(x, mask)[mask].isnan().all()


@pytest.mark.parametrize("num_live", [0, 1])
def test_fewer_than_two_elements_give_zeros(backend: str, num_live: int) -> None:
    mask = torch.arange(5) < num_live
    assert torch.equal(whiten(torch.full((5,), 7.0), mask), torch.zeros(5))
    assert whiten(torch.zeros(0), None).shape == (0,)


def test_equal_elements_give_zeros(backend: str) -> None:
    assert (
        whiten(torch.full((1000,), 0.1), None).abs().max() < 1e-3
    )  # 0.1 in float32, 1 / sqrt(eps)


@pytest.mark.parametrize(
    ("x", "mask", "message"),
    [
        (torch.zeros(3, dtype=torch.int32), None, "must be floating point"),
        (torch.zeros(3), torch.ones(2, dtype=torch.bool), "bool or integer"),
        (torch.zeros(3), torch.ones(3), "bool or integer"),
    ],
)
def test_wrong_arguments_are_refused(
    x: torch.Tensor, mask: torch.Tensor | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        whiten(x, mask)


def test_group_mean_std_equals_each_group_by_itself() -> None:
    x, mask = make(200, torch.float32, shift=10.0)
    groups = torch.randint(-3, 4, (200,), generator=torch.Generator().manual_seed(1)) * 1000
    mean, std = group_mean_std(x, groups, mask=mask)
    for label in groups.unique():
        chosen = x[(groups == label) & mask].double()
        at = groups == label
        torch.testing.assert_close(mean[at].double(), chosen.mean().expand(int(at.sum())))
        torch.testing.assert_close(std[at].double(), chosen.std().expand(int(at.sum())))


def test_group_of_one_has_no_spread_and_an_empty_one_has_zeros() -> None:
    x, groups = torch.tensor([3.0, torch.nan, 5.0]), torch.tensor([0, 1, 1])
    mean, std = group_mean_std(x, groups, mask=torch.tensor([1, 0, 1]))
    assert mean.tolist() == [3.0, 5.0, 5.0]
    assert std.tolist() == [0.0, 0.0, 0.0]
    mean, std = group_mean_std(x[1:2], groups[1:2], mask=torch.tensor([0]))
    assert mean.tolist() == std.tolist() == [0.0]
    assert group_mean_std(x[:0], groups[:0])[0].shape == (0,)
