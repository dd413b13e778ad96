"""How megarl configures SGLang: the engine's arguments and its workers' environment. Imports no
sglang.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from megarl.config.schema import RolloutConfig
from megarl.rollout.sglang_worker import INSTALL, REPORT_DIGESTS, REPORT_SHAPES

__all__ = ["server_args", "worker_environment"]


def server_args(
    config: RolloutConfig, *, model_path: str, dtype: str, on_cuda: bool, seed: int
) -> dict[str, Any]:
    """SGLang's ServerArgs."""
    args: dict[str, Any] = {
        "model_path": model_path, "dtype": dtype, "tp_size": config.tp, "random_seed": seed,
        "skip_tokenizer_init": True, "host": "127.0.0.1", "log_level": "error",
        "sleep_on_idle": True, "max_running_requests": config.max_running_requests,
        "context_length": config.context_length,
        "custom_weight_loader": [INSTALL, REPORT_SHAPES, REPORT_DIGESTS],
        "sampling_backend": "pytorch",  # the one that draws by a request's own seed
    }  # fmt: skip
    if on_cuda:
        device = {
            "device": "cuda",
            "mem_fraction_static": config.memory_frac,
            "enable_memory_saver": True,
        }
    else:
        device = {
            "device": "cpu", "attention_backend": "torch_native", "disable_cuda_graph": True,
            "max_total_tokens": config.max_total_tokens,
        }  # fmt: skip
    return args | device


def worker_environment(devices: Sequence[int] | None, tp: int) -> dict[str, str]:
    """Variables of the scheduler processes."""
    variables = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
    if devices is None:
        # OpenMP threads otherwise spin at barriers: on a busy machine that made decoding 100 times
        # slower
        variables["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY", "PASSIVE")
        cores = sorted(os.sched_getaffinity(0))
        # one entry per rank, or SGLang asks for a NUMA node per rank
        variables["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(
            str(cores[r % len(cores)]) for r in range(tp)
        )
        return variables
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else None
    variables["CUDA_VISIBLE_DEVICES"] = ",".join(names[d] if names else str(d) for d in devices)
    return variables
