"""The demo's files, and its warm-started model, made once for the session."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e.launch import start

from megarl.cli.demo import write_demo_assets

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "assets"
    write_demo_assets(folder)
    return folder


@pytest.fixture(scope="session")
def warm_model(assets: Path) -> Path:
    """`megarl sft` of the demo: calculates well, takes losses for gains two times in three."""
    output = assets.parent / "sft"
    args = [
        "sft", str(ROOT / "configs/sft_demo_cpu.yaml"), f"trainer.output_dir={output}",
        f"model.path={assets / 'model'}", f"data.train_files=[{assets / 'demonstrations.parquet'}]",
    ]  # fmt: skip
    done = start(args, num_ranks=2, log=assets.parent / "sft.log").finish(240)
    assert done.code == 0, done.output[-3000:]
    return output / "final"
