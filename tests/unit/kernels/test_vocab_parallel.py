"""Operators over a process group: three gloo ranks, uneven shards, one of them only padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megarl_kernels import linear_log_prob, log_prob_from_logits, whiten

VOCAB = 41
# Rows of each rank; the last are padding: ids from VOCAB on.
SHARDS = {"three": (7, 30, 8), "padding only": (20, 21, 6), "one holds all": (0, 41, 0)}


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(10, 6, generator=generator)
    weight = torch.randn(48, 6, generator=generator)
    return hidden, weight, torch.randint(VOCAB, (10,), generator=generator)


def score(
    hidden: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor, backward: str, **kwargs: Any
) -> list[torch.Tensor]:
    """[log_probs, entropy, grad hidden, grad rows]; backward "logits": log_prob_from_logits."""
    x, w = hidden.clone().requires_grad_(), rows.clone().requires_grad_()
    if backward == "logits":
        log_probs, entropy = log_prob_from_logits(
            x @ w.t(), targets, temperature=0.8, inplace_backward=True, **kwargs
        )
    else:
        log_probs, entropy = linear_log_prob(
            x, w, targets, temperature=0.8, backward=backward, **kwargs
        )  # type: ignore[call-overload]
    loss = (torch.linspace(-1, 1, 10) * (log_probs + 0.5 * entropy)).sum()
    return [log_probs.detach(), entropy.detach(), *torch.autograd.grad(loss, (x, w))]


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3)
    hidden, weight, targets = inputs()
    results: dict[Any, Any] = {}
    for name, sizes in SHARDS.items():
        first = sum(sizes[:rank])
        for backward in ("recompute", "keep", "logits"):
            results[name, backward] = score(
                hidden, weight[first : first + sizes[rank]], targets, backward,
                vocab_start=first, vocab_size=VOCAB, group=dist.group.WORLD,
            )  # fmt: skip
    values = torch.arange(12.0).square()
    own = [values[:1], values[1:9], values[9:]][rank]
    results["whiten"] = whiten(own, own != 4.0, group=dist.group.WORLD)
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("gloo")
    torch.multiprocessing.spawn(work, args=(str(folder),), nprocs=3)
    return [load(folder / f"{rank}.pt") for rank in range(3)]


def load(path: Path) -> dict[Any, Any]:
    results: dict[Any, Any] = torch.load(path)
    return results


@pytest.mark.parametrize("name", SHARDS)
@pytest.mark.parametrize("backward", ["recompute", "keep", "logits"])
def test_shards_give_what_one_process_gives(
    ranks: list[dict[Any, Any]], name: str, backward: str
) -> None:
    hidden, weight, targets = inputs()
    want = score(hidden, weight, targets, "recompute", vocab_size=VOCAB)
    got = [r[name, backward] for r in ranks]
    for rank in range(3):  # log-probs and entropy are the same everywhere
        torch.testing.assert_close(got[rank][0], want[0], rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(got[rank][1], want[1], rtol=2e-6, atol=2e-6)
    summed = got[0][2] + got[1][2] + got[2][2]  # each rank holds its share
    torch.testing.assert_close(summed, want[2], rtol=2e-6, atol=2e-6)
    rows = torch.cat([g[3] for g in got])
    torch.testing.assert_close(rows, want[3][: len(rows)], rtol=2e-6, atol=2e-6)


def test_whiten_does_not_depend_on_the_split(ranks: list[dict[Any, Any]]) -> None:
    values = torch.arange(12.0).square()
    together = torch.cat([r["whiten"] for r in ranks])
    torch.testing.assert_close(together, whiten(values, values != 4.0))
