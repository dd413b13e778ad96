"""Turn a finished run directory into a result file: what was run, on what, and what came out.

python benchmarks/collect_run.py runs/demo/grpo benchmarks/results/demo.json [--note TEXT]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf


def environment() -> dict[str, Any]:
    """Processor, cores and memory of this machine."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [
        line.split(":")[1].strip() for line in info.splitlines() if line.startswith("model name")
    ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"cpu": names[0] if names else None, "cores": os.cpu_count(), "memory_bytes": memory}


def collect(run: Path) -> dict[str, Any]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [r for r in rows if "time/step_s" in r]
    after_warm_up = steps[1:] or steps
    timings = sorted({k for r in steps for k in r if k.startswith("time/")})
    return {
        "versions": json.loads((run / "versions.json").read_text()),
        "environment": environment(),
        "config": OmegaConf.to_container(OmegaConf.load(run / "config.yaml")),
        "summary": json.loads((run / "summary.json").read_text()),
        "median_after_first_step": {
            k: statistics.median(r[k] for r in after_warm_up) for k in timings
        },
        "curve": {
            k: [r.get(k) for r in steps]
            for k in ("reward/accuracy", "rollout/length/mean", "update/entropy", "rollout/kl",
                      "rollout/log_prob_diff/max", "time/step_s", "time/tokens_per_s")
        },
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument(
        "--note", default="", help="what a reader must know, e.g. what else ran on the machine"
    )
    args = parser.parse_args()
    result = {**collect(args.run), "note": args.note}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(args.output)


if __name__ == "__main__":
    main()
