"""Digests, seeds, exported handles and the push ledger."""

from __future__ import annotations

import pytest
import torch

from megarl.rollout import WeightSyncError
from megarl.rollout.seeds import derive_seed
from megarl.rollout.sglang_worker import seeded_multinomial
from megarl.rollout.shards import PushLedger, digest, export_shard, read_shard
from megarl.types import WeightLayout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float64])
def test_a_digest_changes_with_any_one_element(dtype: torch.dtype) -> None:
    tensor = torch.arange(12).to(dtype).reshape(3, 4)
    before = digest(tensor)
    assert digest(tensor.clone()) == before
    for i in range(12):
        changed = tensor.clone()
        changed.view(-1)[i] += 1
        assert digest(changed) != before


def test_a_digest_sees_order_shape_dtype_and_the_sign_of_zero() -> None:
    a = torch.tensor([1.0, 2.0, 3.0, 0.0])
    others = [a.flip(0), a.reshape(2, 2), a.to(torch.bfloat16), torch.tensor([1.0, 2.0, 3.0, -0.0])]
    assert len({digest(t) for t in (a, *others)}) == 5


def test_a_digest_does_not_depend_on_strides_or_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    from megarl.rollout import shards

    tensor = torch.randn(50, 7)
    whole = digest(tensor)
    assert digest(tensor.t().contiguous().t()) == whole
    monkeypatch.setattr(shards, "_CHUNK", 13)
    assert digest(tensor) == whole
    assert digest(torch.zeros(0, 3)) == "float32:0x3:" + "0" * 32


def test_an_exported_shard_says_what_it_is_without_being_opened() -> None:
    exported = read_shard(export_shard(torch.ones(3, 5, dtype=torch.bfloat16)))
    assert (exported.shape, exported.dtype) == ((3, 5), "bfloat16")
    with pytest.raises(WeightSyncError, match="not the bytes of an exported parameter"):
        read_shard(b"something else")


def test_a_ledger_is_complete_only_when_all_ranks_have_all_parameters() -> None:
    layout = WeightLayout({}, {"a": (2,), "b": (3, 1)})
    ledger = PushLedger([layout, layout], torch.float32)
    ledger.add(0, {"a": torch.zeros(2), "b": torch.zeros(3, 1)})
    ledger.add(1, {"b": torch.zeros(3, 1)})
    with pytest.raises(WeightSyncError, match=r"1 of 2 parameters of engine rank 1 .* first 'a'"):
        ledger.require_complete()
    ledger.add(1, {"a": torch.zeros(2)})
    ledger.require_complete()


def test_seeds_depend_on_every_part_and_their_order() -> None:
    seeds = {derive_seed(*parts) for parts in [(0,), (0, 0), (0, 1), (1, 0), (12, 3), (1, 23)]}
    assert len(seeds) == 6
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(1, 2) == derive_seed(1, 2)


def test_seeded_draws_follow_the_distribution_and_only_seed_and_position() -> None:
    """20000 draws; five standard deviations of each of the four frequencies."""
    probs = torch.tensor([0.5, 0.3, 0.2, 0.0])
    count = 20000
    seeds = torch.tensor([derive_seed(i) for i in range(count)])
    positions = torch.arange(count) % 100
    table = probs.log().expand(count, 4)
    drawn = seeded_multinomial(table, seeds, positions)
    frequencies = torch.bincount(drawn.view(-1), minlength=4) / count
    assert ((frequencies - probs).abs() <= 5 * (probs * (1 - probs) / count).sqrt()).all()
    assert torch.equal(seeded_multinomial(table[:7], seeds[:7], positions[:7]), drawn[:7])


def test_consecutive_positions_of_one_seed_are_independent() -> None:
    count = 20000
    table = torch.tensor([0.5, 0.5]).log().expand(count, 2)
    drawn = (
        seeded_multinomial(table, torch.full((count,), 5), torch.arange(count)).view(-1).double()
    )
    centred = drawn - 0.5
    assert float((centred[1:] * centred[:-1]).mean().abs()) < 5 * 0.25 / count**0.5
