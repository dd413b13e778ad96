"""megatron-core 0.16 on CPU and gloo. `install()` does nothing when CUDA is available.

megatron-core has no CPU device path: it names "cuda" in factory calls and asks torch.cuda for
devices, random states and streams. Replacing torch's own functions would break other libraries
silently (with torch.empty replaced, transformers 5 leaves RoPE frequencies uninitialised), so the
`torch` global of each megatron.core module is replaced by a proxy instead. What the proxy and the
three patches beyond it are for:

* cuda.current_device, the device of every buffer: tensor_parallel/mappings.py, layers.py,
  pipeline_parallel/p2p_communication.py, distributed/param_and_grad_buffer.py,
  rotary_pos_embedding.py
* device="cuda" literals in torch.{tensor,zeros,ones,empty,full,empty_like,arange}: schedules.py,
  optimizer.py, clip_grads.py; pin_memory=True is dropped there, too
* cuda.synchronize: p2p_communication.py after every batched send and receive
* cuda.get_rng_state, manual_seed and the two functions of tensor_parallel/random.py that set the
  state: activation recomputation and the sequence-parallel fork; on CPU they mean the default
  generator
* cuda.Stream, Event, stream, current_stream: bucket communication; nothing is asynchronous here
* Tensor.cuda (patched on torch: it raises on a CPU build anyway): language_module.py, tied
  embeddings
* Tensor.type() (patched on torch, changed for callers in megatron.core.optimizer only): optimizers
  sort parameters by the string "torch.cuda.FloatTensor"
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["install", "modules_with_real_torch"]

CPU = torch.device("cpu")
FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "empty_like", "arange")
# Some of megatron is imported on first use and would escape the proxy; so it is imported before.
LAZY_MODULES = (
    "tensor_parallel", "distributed", "optimizer", "pipeline_parallel", "transformer", "models.gpt",
    "pipeline_parallel.p2p_communication", "models.gpt.gpt_layer_specs",
    "models.common.embeddings.rope_utils", "transformer.multi_token_prediction",
    "transformer.moe.moe_layer", "transformer.moe.token_dispatcher",
)  # fmt: skip


class _Proxy(types.ModuleType):
    """A module that answers some names itself and passes the rest on."""

    def __init__(self, base: types.ModuleType, overrides: dict[str, Any]) -> None:
        super().__init__(base.__name__)
        self.__dict__.update(overrides)
        self.__dict__["_base"] = base

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_base"], name)


class _Stream:
    """A stream or event of a device that does everything at once."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., _Stream]:
        return lambda *_, **__: self

    def query(self) -> bool:
        return True


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`factory` with device="cuda" read as the CPU and pinned memory as memory."""

    @functools.wraps(factory)
    def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("pin_memory", None)
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return wrapper


def _make_torch_proxy() -> _Proxy:
    cuda = _Proxy(torch.cuda, {
        "current_device": lambda: CPU,
        "synchronize": lambda *_, **__: None,
        "manual_seed": torch.manual_seed,
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_device": lambda *_: None,
        "current_stream": lambda *_, **__: _Stream(),
        "default_stream": lambda *_, **__: _Stream(),
        "stream": lambda _: contextlib.nullcontext(),
        "Stream": _Stream,
        "Event": _Stream,
    })  # fmt: skip
    return _Proxy(
        torch, {"cuda": cuda, **{name: _on_cpu(getattr(torch, name)) for name in FACTORIES}}
    )


@functools.cache
def _patch_once() -> _Proxy:
    """The patches that are not in the proxy; returns the proxy."""
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    original_type = torch.Tensor.type

    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return original_type(self, dtype, *args, **kwargs)
        name = original_type(self)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        is_optimizer = caller.startswith("megatron.core.optimizer")
        return name.replace("torch.", "torch.cuda.", 1) if is_optimizer else name

    torch.Tensor.type = type_  # type: ignore[assignment,method-assign]
    return _make_torch_proxy()


def modules_with_real_torch() -> list[str]:
    """Loaded megatron.core modules that the proxy has not reached."""
    return [
        name for name, module in sys.modules.items()
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch
    ]  # fmt: skip


def install() -> None:
    """Make megatron.core run on CPU. Call after importing what is used of it; repeat at will."""
    if torch.cuda.is_available():
        return
    for name in LAZY_MODULES:
        importlib.import_module(f"megatron.core.{name}")
    proxy = _patch_once()
    for name in modules_with_real_torch():
        sys.modules[name].torch = proxy  # type: ignore[attr-defined]
