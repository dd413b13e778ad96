"""What megarl adds inside SGLang's scheduler processes, one per tensor-parallel rank.

`run_worker` replaces SGLang's process entry; `install_shards` and the reports are custom weight
loaders, which SGLang calls with its model between begin_weight_update and end_weight_update.
Nothing here may
raise: an exception in a loader kills the scheduler, so errors go into this rank's report file,
which the leader reads.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.rollout.shards import digest

__all__ = [
    "INSTALL", "REPORT_DIGESTS", "REPORT_SHAPES", "WorkerSpec", "install_shards", "report_digests",
    "report_path", "report_shapes", "run_worker",
]  # fmt: skip

INSTALL, REPORT_SHAPES, REPORT_DIGESTS = (
    f"{__name__}.{name}" for name in ("install_shards", "report_shapes", "report_digests")
)
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """What a worker needs to know from the process that starts it."""

    folder: str  # of this engine: reports and the log
    parent_pid: int
    num_threads: int | None  # torch threads of one worker on CPU; None: torch's default


@dataclass
class _This:
    """This worker's identity; set once by run_worker."""

    report: Path | None = None


_THIS = _This()


def report_path(folder: str, tp_rank: int) -> Path:
    return Path(folder) / f"report{tp_rank}.json"


def run_worker(spec: WorkerSpec, *args: Any) -> None:
    """Entry of a scheduler process; `args` are those of sglang's run_scheduler_process."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    _die_with_parent(spec.parent_pid)
    tp_rank = args[3]
    _THIS.report = report_path(spec.folder, tp_rank)
    if spec.num_threads is not None:
        torch.set_num_threads(spec.num_threads)
    _honour_request_seeds()
    run_scheduler_process(*args)


def _die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies, however it dies (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(1)


def _honour_request_seeds() -> None:
    """Make each request draw from its own `sampling_seed`, whatever else is in the batch.

    SGLang carries the seed to the sampler only in deterministic mode, which also swaps attention
    kernels and does not exist on CPU. Its plugin hooks let the seed through without the rest.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    info = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch"
    HookRegistry.register(info, _attach_seeds, HookType.AFTER)
    if not torch.cuda.is_available():  # SGLang's own is a Triton kernel
        sampler = "sglang.srt.layers.sampler.multinomial_with_seed"
        HookRegistry.register(sampler, seeded_multinomial, HookType.REPLACE)
    HookRegistry.apply_hooks()


def _attach_seeds(info: Any, *args: Any, **kwargs: Any) -> Any:
    batch = next(a for a in (*args, *kwargs.values()) if hasattr(a, "reqs"))
    seeds = [r.sampling_params.sampling_seed or 0 for r in batch.reqs]
    info.sampling_seed = torch.tensor(seeds, dtype=torch.int64, device=info.temperatures.device)
    return info


def seeded_multinomial(
    logprobs: torch.Tensor, seed: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Draw one column per row by the Gumbel-max trick with counter-based noise.

    Args:
        logprobs: [N, M] unnormalised log-probabilities; -inf is never drawn.
        seed: [N] int64.
        positions: [N] position of the token in its sequence: the draw depends on (seed, position)
            only.

    Returns:
        [N, 1] int64.
    """
    column = torch.arange(1, logprobs.shape[1] + 1, dtype=torch.int64, device=logprobs.device)
    row = _mix(seed.to(torch.int64) ^ _mix(positions.to(torch.int64)))
    bits = _mix(row[:, None] + column[None, :] * -7046029254386353131)
    uniform = ((bits >> 11) & (2**53 - 1)).to(torch.float64).add_(0.5).mul_(2.0**-53)
    gumbel = uniform.log_().neg_().log_().neg_()
    return (gumbel + logprobs.to(torch.float64)).argmax(dim=1, keepdim=True)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's finaliser on int64, wrapping."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * -4658895280553007687
    x = (x ^ ((x >> 27) & (2**37 - 1))) * -7723592293110705685
    return x ^ ((x >> 31) & (2**33 - 1))


def _report(content: Callable[[], dict[str, Any]]) -> None:
    """Write `content()` or the error it raises to this rank's report file."""
    assert _THIS.report is not None, "not inside a worker"
    try:
        report = {"ok": True, **content()}
    except Exception as error:
        report = {"ok": False, "error": f"{type(error).__name__}: {error}"}
    partial = _THIS.report.with_suffix(".partial")
    partial.write_text(json.dumps(report))
    partial.replace(_THIS.report)


@torch.no_grad()
def install_shards(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Copy whole local parameters into the model.

    `named_tensors` holds one uint8 tensor: a pickled list of (parameter, exported tensor).
    """

    def install() -> dict[str, Any]:
        from sglang.srt.utils import MultiprocessingSerializer

        parameters = dict(model.named_parameters())
        (_, packed), *_ = named_tensors
        shards: list[tuple[str, bytes]] = pickle.loads(packed.cpu().numpy().tobytes())
        for name, payload in shards:
            parameter = parameters[name].data
            value = MultiprocessingSerializer.deserialize(payload)
            if value.shape != parameter.shape or value.dtype != parameter.dtype:
                raise ValueError(
                    f"{name} is {value.dtype} {tuple(value.shape)}, "
                    f"the engine holds {parameter.dtype} {tuple(parameter.shape)}"
                )
            parameter.copy_(value)
        return {"installed": len(shards)}

    _report(install)


def report_shapes(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Report {parameter: [shape, dtype]}."""
    _report(
        lambda: {
            "parameters": {
                name: [list(p.shape), str(p.dtype).removeprefix("torch.")]
                for name, p in model.named_parameters()
            }
        }
    )


@torch.no_grad()
def report_digests(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Report {parameter: digest} of what the model holds now."""
    _report(lambda: {"digests": {name: digest(p.data) for name, p in model.named_parameters()}})
