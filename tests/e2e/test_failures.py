"""Bad input and failing ranks: a clear message, every rank stops, nothing is left running."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from e2e.conftest import ROOT
from e2e.launch import start

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


def train_args(assets: Path, output: Path, *overrides: str) -> list[str]:
    """A run with the in-process engine: the failures here are not the engine's."""
    return [
        str(ROOT / "configs/grpo_demo_cpu.yaml"), f"trainer.output_dir={output}",
        f"model.path={assets / 'model'}", f"data.train_files=[{assets / 'train.parquet'}]",
        "rollout.engine=hf", "trainer.prompts_per_step=4", *overrides,
    ]  # fmt: skip


@pytest.mark.parametrize("fault", ["reward_raises", "stage_raises"])
def test_one_rank_raising_stops_all_with_its_traceback_first(
    assets: Path, tmp_path: Path, fault: str
) -> None:
    args = train_args(assets, tmp_path / "run", "data.val_files=[]")
    job = start(args, num_ranks=2, log=tmp_path / "log", driver=fault)
    job.wait_for("step 1/", 120)
    before = job.begin
    done = job.finish(60)
    assert done.code == 1
    assert done.leftovers == []
    assert done.seconds - (job.begin - before) < 120
    assert "rank 1 failed:\nTraceback" in done.output
    assert "RuntimeError: injected" in done.output
    lines = [n for n, line in enumerate(done.output.splitlines()) if "Traceback" in line]
    told = [n for n, line in enumerate(done.output.splitlines()) if "stops" in line]
    assert all(lines[0] < n for n in told)


def test_a_rank_killed_outright_takes_the_others_along(assets: Path, tmp_path: Path) -> None:
    args = ["train", *train_args(assets, tmp_path / "run", "trainer.num_steps=5000")]
    job = start(args, num_ranks=2, log=tmp_path / "log")
    job.wait_for("step 2/", 120)
    job.ranks()[1].send_signal(signal.SIGKILL)
    done = job.finish(40)
    assert done.code not in (0, -9)
    assert done.leftovers == []


def test_a_rank_that_never_arrives_is_given_up_at_the_time_limit(
    assets: Path, tmp_path: Path
) -> None:
    args = train_args(assets, tmp_path / "run", "parallel.timeout_s=8")
    job = start(args, num_ranks=2, log=tmp_path / "log", driver="stage_hangs")
    job.wait_for("step 1/", 120)
    done = job.finish(60)
    assert done.code not in (0, -9)
    assert done.leftovers == []
    assert "rank 0 failed:" in done.output


def test_a_truncated_file_ends_the_job_with_one_message_and_no_traceback_of_ours(
    assets: Path, tmp_path: Path
) -> None:
    cut = tmp_path / "cut.parquet"
    cut.write_bytes((assets / "train.parquet").read_bytes()[:-500])
    args = ["train", *train_args(assets, tmp_path / "run", f"data.train_files=[{cut}]")]
    done = start(args, num_ranks=2, log=tmp_path / "log").finish(120)
    assert done.code != 0
    assert done.leftovers == []
    assert done.output.count("cut.parquet") == 1
    assert 'Traceback (most recent call last):\n  File "' + str(ROOT) not in done.output
