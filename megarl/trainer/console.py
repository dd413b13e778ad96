"""What a person sees: one line per step and the summary at the end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import plotext

from megarl.common.log import get_logger
from megarl.trainer.evaluate import Interval

__all__ = ["curve", "progress_line", "write_summary"]

logger = get_logger(__name__)

PHASES = ("generate", "reward", "assemble", "log_probs", "update", "sync")


def progress_line(
    step: int, num_steps: int, metrics: dict[str, float], *, elapsed_s: float
) -> None:
    """Log reward, accuracy, KL, entropy, gradient norm, speed, phase seconds and the time left."""
    eta_s = elapsed_s / step * (num_steps - step)
    kl = metrics.get("update/ref_kl", metrics.get("rollout/kl", 0.0))
    phases = " ".join(f"{p} {metrics.get(f'time/{p}_s', 0.0):.1f}" for p in PHASES)
    logger.info(
        "step %d/%d reward %.3f acc %.3f kl %.2g entropy %.3f grad %.3g | "
        "len %.1f %.0f tok/s | %s | eta %s",
        step, num_steps, metrics["reward/mean"], metrics["reward/accuracy"], kl,
        metrics.get("update/entropy", float("nan")), metrics["update/grad_norm"],
        metrics["rollout/length/mean"], metrics["time/tokens_per_s"], phases, _clock(eta_s),
    )  # fmt: skip


def _clock(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{s:02d}" if hours else f"{minutes}:{s:02d}"


def curve(steps: Sequence[int], values: Sequence[float], title: str) -> str:
    """A text plot, 72 x 15 characters, without colour."""
    plotext.clear_figure()
    plotext.plot_size(72, 15)
    plotext.theme("clear")
    plotext.plot(list(steps), list(values), marker="*")
    plotext.title(title)
    plotext.ylim(0.0, max(1.0, *values))
    return str(plotext.uncolorize(plotext.build()))


def write_summary(
    output_dir: Path, evaluations: Sequence[tuple[int, Interval]], *, elapsed_s: float
) -> str:
    """Write summary.json and return the text of the final summary."""
    rows = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    rows = [r for r in rows if "reward/accuracy" in r]
    summary = {
        "num_steps": len(rows),
        "elapsed_s": elapsed_s,
        "evaluations": [{"step": s, **asdict(i)} for s, i in evaluations],
        "phase_s": {p: sum(r.get(f"time/{p}_s", 0.0) for r in rows) for p in PHASES},
        "tokens_per_s": sum(r["batch/num_tokens"] for r in rows)
        / max(sum(r["time/step_s"] for r in rows), 1e-9),
    }
    (output_dir / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    lines = [
        curve(
            [r["step"] for r in rows],
            [r["reward/accuracy"] for r in rows],
            "accuracy of sampled answers",
        )
    ]
    if evaluations:
        lines += [
            f"greedy accuracy before: {evaluations[0][1]}",
            f"greedy accuracy after:  {evaluations[-1][1]}",
        ]
    lines.append(f"{len(rows)} steps in {_clock(elapsed_s)}; everything is in {output_dir}")
    return "\n".join(lines)
