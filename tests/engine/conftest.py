"""One engine of each kind per test session, on tiny models."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_models
import torch

from megarl.config.schema import RolloutConfig
from megarl.rollout import RolloutEngine, create_engine
from megarl.rollout.sglang_cpu import check

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """The engines' processes need the cores too."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def needs_sglang() -> None:
    """Fails, and does not skip, when the shim is missing: a suite that skips its engine proves
    nothing.
    """
    check()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def model_a(model_dir: Path) -> str:
    return tiny_models.build(model_dir / "a", "qwen2", seed=0)


@pytest.fixture(scope="session")
def model_b(model_dir: Path) -> str:
    return tiny_models.build(model_dir / "b", "qwen2", seed=1)


CONFIG = {
    "max_total_tokens": 8192,
    "max_running_requests": 16,
    "start_timeout_s": 120.0,
    "generate_timeout_s": 60.0,
}


@pytest.fixture(scope="session")
def hf_engine(model_a: str) -> Iterator[RolloutEngine]:
    engine = create_engine(
        RolloutConfig(engine="hf", **CONFIG), model_path=model_a, dtype="float32"
    )
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def sglang_engine(needs_sglang: None, model_a: str) -> Iterator[RolloutEngine]:
    engine = create_engine(
        RolloutConfig(**CONFIG), model_path=model_a, dtype="float32", num_threads=1
    )
    yield engine
    engine.close()


@pytest.fixture(params=["hf", pytest.param("sglang", marks=pytest.mark.engine)])
def engine(request: pytest.FixtureRequest) -> RolloutEngine:
    """Each engine in turn; a test leaves it with model A's weights."""
    return request.getfixturevalue(f"{request.param}_engine")
