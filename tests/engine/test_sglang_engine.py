"""SGLang's processes: two ranks with own shards only, death, failed starts, and guests that leave
no trace.
"""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import tiny_models
from torch.distributed import TCPStore

from megarl.config.schema import RolloutConfig
from megarl.rollout import (
    GenerationRequest,
    RolloutEngine,
    RolloutError,
    SamplingParams,
    WeightSyncError,
    create_engine,
    digest,
)
from megarl.rollout.sglang_process import hold_free_port

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("needs_sglang")]

CHILD = Path(__file__).parent / "engine_child.py"
PROMPTS = tiny_models.prompts(4)


def start_child(*args: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, str(CHILD), *args], stdout=subprocess.PIPE, text=True)


def first_line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline()


def wait_gone(pids: list[int], *, within_s: float) -> list[int]:
    """The processes that are still there after `within_s` seconds."""
    deadline = time.monotonic() + within_s
    while (left := [p for p in pids if is_running(p)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def require_log_probs_of(path: str, engine: RolloutEngine) -> None:
    model = tiny_models.load(path)
    requests = [GenerationRequest(key=i, prompt_ids=p, seed=i) for i, p in enumerate(PROMPTS)]
    for key, completions in engine.generate(
        requests, SamplingParams(max_new_tokens=12, num_samples=2)
    ):
        for c in completions:
            truth = tiny_models.true_log_probs(model, PROMPTS[key], c.response_ids, 1.0)
            assert c.log_probs == pytest.approx(truth, abs=1e-4)


# ---- two ranks


@pytest.fixture(scope="module")
def tied_a(model_dir: Path) -> str:
    return tiny_models.build(model_dir / "tied_a", "qwen3", seed=0, is_tied=True)


@pytest.fixture(scope="module")
def tied_b(model_dir: Path) -> str:
    return tiny_models.build(model_dir / "tied_b", "qwen3", seed=1, is_tied=True)


@pytest.fixture(scope="module")
def two_ranks(tied_a: str) -> Iterator[RolloutEngine]:
    config = RolloutConfig(
        tp=2, max_total_tokens=4096, start_timeout_s=150.0, generate_timeout_s=60.0
    )
    engine = create_engine(config, model_path=tied_a, dtype="float32", num_threads=2)
    yield engine
    engine.close()


def test_two_ranks_generate_what_one_model_says(two_ranks: RolloutEngine, tied_a: str) -> None:
    require_log_probs_of(tied_a, two_ranks)


def test_each_rank_is_given_only_its_own_shard(two_ranks: RolloutEngine, tied_b: str) -> None:
    sent = tiny_models.push(two_ranks, tied_b, version=1, tp=2)
    total = sum(t.numel() for shard in sent for t in shard.values())
    whole = sum(p.numel() for p in tiny_models.load(tied_b).parameters())
    assert total < 1.2 * whole  # norms and the padded vocabulary twice, matrices once
    assert two_ranks.checksums() == [{n: digest(t) for n, t in shard.items()} for shard in sent]
    require_log_probs_of(tied_b, two_ranks)


def test_a_rank_takes_a_shard_from_an_unrelated_process(
    two_ranks: RolloutEngine, tied_a: str, tmp_path: Path
) -> None:
    child = start_child("export", tied_a, "2", "1", str(tmp_path / "shard"))
    try:
        assert first_line(child) == "ready\n"
        theirs = pickle.loads((tmp_path / "shard").read_bytes())
        assert max(len(v) for v in theirs.values()) < 2000  # handles, not weights
        mine = tiny_models.shard(two_ranks.weight_layout(0), tied_a)
        two_ranks.begin_update()
        two_ranks.update_weights([mine, theirs])
        two_ranks.end_update(2)
    finally:
        child.kill()
        child.wait()
    expected = tiny_models.shard(two_ranks.weight_layout(1), tied_a)
    assert two_ranks.checksums()[1] == {n: digest(t) for n, t in expected.items()}
    require_log_probs_of(tied_a, two_ranks)


def test_a_push_that_left_one_rank_out_is_partial(two_ranks: RolloutEngine, tied_a: str) -> None:
    two_ranks.begin_update()
    two_ranks.update_weights([tiny_models.shard(two_ranks.weight_layout(0), tied_a), {}])
    with pytest.raises(WeightSyncError, match="of engine rank 1 were not sent"):
        two_ranks.end_update(3)
    tiny_models.push(two_ranks, tied_a, version=3, tp=2)


def test_a_handle_whose_owner_is_gone_is_an_error_and_the_engine_lives(
    two_ranks: RolloutEngine, tied_a: str, tmp_path: Path
) -> None:
    child = start_child("export", tied_a, "2", "1", str(tmp_path / "shard"))
    first_line(child)
    child.kill()
    child.wait()
    for path in Path("/dev/shm").glob(f"torch_{child.pid}_*"):
        path.unlink()
    theirs = pickle.loads((tmp_path / "shard").read_bytes())
    two_ranks.begin_update()
    with pytest.raises(WeightSyncError, match="did not take a parameter"):
        two_ranks.update_weights([{}, theirs])
    with pytest.raises(WeightSyncError, match="partial"):
        two_ranks.end_update(4)
    tiny_models.push(two_ranks, tied_a, version=4, tp=2)
    require_log_probs_of(tied_a, two_ranks)


def test_many_pushes_leave_no_shared_memory_behind(two_ranks: RolloutEngine, tied_a: str) -> None:
    def count() -> int:
        return len(list(Path("/dev/shm").glob(f"torch_{os.getpid()}_*")))

    tiny_models.push(two_ranks, tied_a, version=5, tp=2)
    before = count()
    for version in range(6, 10):
        tiny_models.push(two_ranks, tied_a, version=version, tp=2)
    assert count() <= before


def test_an_idle_engine_leaves_the_cores_to_training(two_ranks: RolloutEngine) -> None:
    workers = [psutil.Process(c.pid) for c in two_ranks._process.children]  # type: ignore[attr-defined]
    before = [sum(w.cpu_times()[:2]) for w in workers]
    time.sleep(3)
    used = [sum(w.cpu_times()[:2]) - b for w, b in zip(workers, before, strict=True)]
    assert max(used) / 3 < 0.1


def test_a_scheduler_that_dies_ends_generation_with_an_error_within_seconds(
    two_ranks: RolloutEngine,
) -> None:
    pids = [c.pid for c in two_ranks._process.children]  # type: ignore[attr-defined]
    threading.Timer(0.3, os.kill, (pids[1], signal.SIGKILL)).start()
    requests = [GenerationRequest(key=i, prompt_ids=PROMPTS[0], seed=i) for i in range(500)]
    started = time.monotonic()
    with pytest.raises(RolloutError, match=f"scheduler {pids[1]} died"):
        list(two_ranks.generate(requests, SamplingParams(max_new_tokens=400, num_samples=8)))
    assert time.monotonic() - started < 10
    assert wait_gone(pids, within_s=2) == []
    with pytest.raises(RolloutError, match="closed"):
        list(two_ranks.generate(requests, SamplingParams(max_new_tokens=1)))
    two_ranks.close()
    two_ranks.close()
    gc.collect()  # messages left for the dead must not be waited for


# ---- a guest in its process


def test_starting_an_engine_leaves_the_process_as_it_was(sglang_engine: RolloutEngine) -> None:
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in os.environ
    assert "OMP_WAIT_POLICY" not in os.environ
    assert logging.getLogger().level == logging.WARNING
    assert multiprocessing.get_start_method() == "fork"


# ---- starts that fail


@pytest.fixture
def no_children_left() -> Iterator[None]:
    before = {c.pid for c in multiprocessing.active_children()}
    folders = set(Path("/tmp").glob("megarl-sglang-*"))
    yield
    assert {c.pid for c in multiprocessing.active_children()} <= before
    assert set(Path("/tmp").glob("megarl-sglang-*")) <= folders


def test_a_folder_without_weights_is_refused_at_once(
    no_children_left: None, model_a: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((Path(model_a) / "config.json").read_text())
    with pytest.raises(RolloutError, match="has no weights"):
        create_engine(RolloutConfig(), model_path=str(tmp_path), dtype="float32")


def test_broken_weights_are_an_error_with_the_schedulers_own_words(
    no_children_left: None, model_a: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((Path(model_a) / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors" * 100)
    with pytest.raises(RolloutError, match=r"SGLang did not start(.|\n)*[Ss]afetensor"):
        create_engine(
            RolloutConfig(max_total_tokens=4096), model_path=str(tmp_path), dtype="float32"
        )


def test_the_port_of_an_engine_is_its_own_until_the_scheduler_takes_it() -> None:
    with hold_free_port() as holder:
        port = holder.getsockname()[1]
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        store.set("key", "value")
        assert store.get("key") == b"value"


def test_a_start_over_its_time_limit_is_ended(no_children_left: None, model_a: str) -> None:
    config = RolloutConfig(start_timeout_s=1.5)
    started = time.monotonic()
    with pytest.raises(RolloutError, match=r"not ready after 1.5 s"):
        create_engine(config, model_path=model_a, dtype="float32")
    assert time.monotonic() - started < 15


def test_a_tp_that_does_not_fit_the_model_is_refused_at_once(model_a: str) -> None:
    with pytest.raises(RolloutError, match=r"rollout\.tp=3 does not divide num_attention_heads=4"):
        create_engine(RolloutConfig(tp=3), model_path=model_a, dtype="float32")


# ---- several engines, and parents that die


def test_two_engines_start_at_once_and_die_with_their_parents(model_dir: Path) -> None:
    tied = tiny_models.build(model_dir / "llama_tied", "llama", seed=2, is_tied=True)
    untied = tiny_models.build(model_dir / "qwen3_untied", "qwen3", seed=3)
    children = [start_child("engine", tied, "1"), start_child("engine", untied, "1")]
    try:
        answers = [json.loads(first_line(child)) for child in children]
        assert [a["worst"] < 1e-4 for a in answers] == [True, True]
        for child, answer, signum in zip(
            children, answers, (signal.SIGTERM, signal.SIGKILL), strict=True
        ):
            child.send_signal(signum)
            assert child.wait(timeout=5) == -signum
            assert wait_gone(answer["pids"], within_s=5) == []
    finally:
        for child in children:
            child.kill()
            child.wait()
