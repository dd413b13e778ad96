"""What MegatronModel must not touch or accept: other roles, globals, torch itself, wrong use."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.pool import WorkerError, WorkerPool
from distributed.tiny import frozen, loss_fn, make_batch, make_batches, make_model, trainable

pytestmark = pytest.mark.distributed
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("models") / "m", "qwen3", tied=True)


def actor_and_reference(path: str) -> tuple[float, float]:
    """Two roles of different layout: the frozen one must not move when the other trains."""
    reference = frozen(path, {"tp": 2})
    actor = trainable(path, {"pp": 2}, lr=1e-2)
    batches = make_batches(multiple=2)
    before = torch.cat([s.log_probs for s in reference.score(batches, temperature=1.0)])
    for _ in range(2):
        actor.forward_backward(batches, loss_fn, temperature=1.0)
        actor.step()
    after = torch.cat([s.log_probs for s in reference.score(batches, temperature=1.0)])
    trained = torch.cat([s.log_probs for s in actor.score(batches, temperature=1.0)])
    return float((before - after).abs().max()), float((before - trained).abs().max())


def test_roles_of_different_layout_share_ranks_without_touching_each_other(
    folder: str, pool2: WorkerPool
) -> None:
    for moved, trained in pool2.run(actor_and_reference, path=folder):
        assert moved == 0.0
        assert trained > 1e-2


@contextmanager
def fatal_reads_of_parallel_state() -> Iterator[None]:
    """Every getter of megatron's global groups raises, wherever it was imported to."""
    from megatron.core import parallel_state

    def is_getter(name: str, value: Any) -> bool:
        # the memory buffer is scratch space, not a group
        named = name.startswith(("get_", "is_pipeline", "is_rank")) and not name.endswith(
            "memory_buffer"
        )
        return (
            isinstance(value, types.FunctionType)
            and value.__module__ == parallel_state.__name__
            and named
        )

    def trap(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def raise_(*_: Any, **__: Any) -> None:
            raise RuntimeError(f"parallel_state.{function.__name__} was read")

        return raise_

    getters = {f: trap(f) for n, f in vars(parallel_state).items() if is_getter(n, f)}
    assert len(getters) > 50
    changed = []
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core"):
            for key, value in list(vars(module).items()):
                if isinstance(value, types.FunctionType) and value in getters:
                    setattr(module, key, getters[value])
                    changed.append((module, key, value))
    try:
        yield
    finally:
        for module, key, value in changed:
            setattr(module, key, value)


def train_under_tripwire(path: str, layout: dict[str, Any], out: str) -> bool:
    from megatron.core import parallel_state

    with fatal_reads_of_parallel_state():
        with pytest.raises(RuntimeError, match="get_tensor_model_parallel_group was read"):
            parallel_state.get_tensor_model_parallel_group()
        for recompute in ("none", "full"):
            model = trainable(path, layout, recompute=recompute)
            batches = make_batches(multiple=2)
            model.score(batches, temperature=1.0)
            model.forward_backward(batches, loss_fn, temperature=1.0)
            model.step()
        model.save_hf(out)
    return parallel_state.model_parallel_is_initialized()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_no_global_process_group_of_megatron_is_read(
    sequence_parallel: bool, folder: str, tmp_path: Path, pool4: WorkerPool
) -> None:
    layout = {"tp": 2, "pp": 2, "sequence_parallel": sequence_parallel}
    assert (
        pool4.run(train_under_tripwire, path=folder, layout=layout, out=str(tmp_path / "o"))
        == [False] * 4
    )


def train_and_list_modules(path: str) -> tuple[list[str], int, bool, torch.Tensor, torch.Tensor]:
    from megarl.models.cpu_compat import modules_with_real_torch

    state = torch.get_rng_state()
    model = trainable(path, recompute="full")
    model.score(make_batches(), temperature=1.0)
    model.forward_backward(make_batches(), loss_fn, temperature=1.0)
    model.step()
    loaded = sum(name.startswith("megatron.core") for name in sys.modules)
    is_torch_untouched = (
        isinstance(torch.empty, types.BuiltinFunctionType) and torch.cuda.__name__ == "torch.cuda"
    )
    return modules_with_real_torch(), loaded, is_torch_untouched, state, torch.get_rng_state()


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="nothing is replaced when there is a CUDA device"
)
def test_every_loaded_megatron_module_uses_the_cpu_proxy_and_torch_itself_is_left_alone(
    folder: str, pool1: WorkerPool
) -> None:
    left, loaded, is_torch_untouched, before, after = pool1.run(
        train_and_list_modules, path=folder
    )[0]
    assert loaded > 100
    assert left == []
    assert is_torch_untouched
    assert torch.equal(before, after), "the trainer's random stream was moved"


def no_batches(path: str) -> None:
    frozen(path, {"tp": 2}).score([], temperature=1.0)


def unpadded(path: str) -> None:
    frozen(path, {"tp": 2, "sequence_parallel": True}).score(
        [make_batch([5], seed=0)], temperature=1.0
    )


def too_much_tp(path: str) -> None:
    frozen(path, {"tp": 4})


def broken_on_one_rank(path: str, other: str) -> None:
    frozen(path if dist.get_rank() == 0 else other, {"tp": 2})


def test_wrong_use_is_refused_with_its_remedy(
    folder: str, pool2: WorkerPool, pool4: WorkerPool
) -> None:
    with pytest.raises(WorkerError, match="at least one micro-batch"):
        pool2.run(no_batches, path=folder)
    with pytest.raises(WorkerError, match="T=5 over tp=2; pad the batch"):
        pool2.run(unpadded, path=folder)
    with pytest.raises(WorkerError, match=r"parallel\.tp=4 does not divide num_key_value_heads=2"):
        pool4.run(too_much_tp, path=folder)


def test_a_rank_that_cannot_load_stops_the_others(
    folder: str, tmp_path: Path, pool2: WorkerPool
) -> None:
    other = Path(make_model(tmp_path / "m", "qwen3", tied=True))
    (other / "model.safetensors").unlink()
    with pytest.raises(
        WorkerError, match=r"rank 0:(.|\n)*PeerFailure: loading weights failed on rank 1"
    ):
        pool2.run(broken_on_one_rank, path=folder, other=str(other))
