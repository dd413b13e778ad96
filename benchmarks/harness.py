"""Measures variants of one task against each other: time interleaved, memory in a child process.

Time is CPU time of the process on CPU, so that other work on the machine counts little, and
synchronised wall time on CUDA. A result file says what ran where: commit, hardware, versions, load.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "Timing", "environment", "measure_memory", "measure_times", "peak_bytes", "row", "write_result",
]  # fmt: skip

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Timing:
    """Seconds of one variant over its repeats."""

    median_s: float
    p10_s: float
    p90_s: float
    num_repeats: int


def measure_times(
    variants: dict[str, Callable[[], Any]], *, num_repeats: int, num_warmup: int = 1
) -> dict[str, Timing]:
    """Time each variant num_repeats times; every round runs all, odd rounds in reverse order."""
    for _ in range(num_warmup):
        for run in variants.values():
            run()
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for i in range(num_repeats):
        for name in reversed(variants) if i % 2 else variants:
            start = _now()
            variants[name]()
            samples[name].append(_now() - start)
    return {name: _summary(values) for name, values in samples.items()}


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def _summary(values: list[float]) -> Timing:
    ordered = torch.tensor(sorted(values), dtype=torch.float64)
    p10, median, p90 = torch.quantile(
        ordered, torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    ).tolist()
    return Timing(median, p10, p90, len(values))


def peak_bytes(run: Callable[[], Any]) -> int:
    """Memory at the peak of one call beyond what was in use before it. Call in a fresh process."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark to the present size
    before = _status_bytes("VmRSS")
    run()
    return max(0, _status_bytes("VmHWM") - before)


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def measure_memory(script: str, *arguments: str) -> int:
    """Run `script arguments` in a child process that prints its peak_bytes as the last line."""
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{script} {' '.join(arguments)} failed:\n{done.stderr}")
    return int(done.stdout.split()[-1])


def environment() -> dict[str, Any]:
    """What a result depends on besides the code."""
    info = Path("/proc/cpuinfo")
    names = [
        line.split(":")[1].strip()
        for line in (info.read_text().splitlines() if info.exists() else [])
        if line.startswith("model name")
    ]
    git = {
        key: subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True).stdout
        for key, command in {"commit": ["rev-parse", "HEAD"], "changed": ["diff", "--stat"]}.items()
    }
    return {
        "commit": git["commit"].strip(),
        "has_local_changes": bool(git["changed"].strip()),
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg(),
        "clock": "wall" if torch.cuda.is_available() else "process CPU time",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def write_result(path: Path, rows: list[dict[str, Any]]) -> None:
    """Rows plus the environment, as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


def row(task: str, name: str, timing: Timing, base: Timing, **more: Any) -> dict[str, Any]:
    """One line of a result: times, and the ratio to the task's first variant."""
    ratio = timing.median_s / base.median_s
    return {"task": task, "variant": name, **asdict(timing), "ratio": ratio, **more}
