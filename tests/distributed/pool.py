"""WorkerPool: N processes that are one gloo job, kept alive between tests.

`pool.run(function, **kwargs)` executes a module-level function on every rank and returns the
results in rank order. A call that raises or is too slow costs the pool its processes; the next call
starts new ones.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

__all__ = ["WorkerError", "WorkerPool", "groups_of"]

START_LIMIT_S = 120.0  # importing torch and megatron on busy cores
COLLECTIVE_LIMIT_S = 100.0


class WorkerError(RuntimeError):
    """A function failed on some ranks; the message holds their tracebacks."""


class WorkerPool:
    """N ranks on this machine."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._workers: list[tuple[Any, Connection]] = []

    def run(
        self, function: Callable[..., Any], *, limit_s: float = 120.0, **kwargs: Any
    ) -> list[Any]:
        """Run `function(**kwargs)` on every rank.

        Args:
            function: module-level; pickled by name, as are kwargs and results by value.
            limit_s: wall-clock limit, seconds.

        Returns:
            Results by rank.

        Raises:
            WorkerError: a rank raised or died. TimeoutError: the limit passed.
        """
        if not self._workers:
            self._start()
        call = pickle.dumps((sys.path, pickle.dumps((function, kwargs))))
        for _, connection in self._workers:
            connection.send_bytes(call)
        return self._collect(f"{function.__module__}.{function.__name__}", limit_s)

    def close(self) -> None:
        """End the worker processes; only those this pool started."""
        for process, connection in self._workers:
            connection.close()  # a waiting worker sees the end of its input and leaves
            process.join(0.5)
            if process.is_alive():
                process.kill()
                process.join()
        self._workers = []

    def _start(self) -> None:
        from megarl.parallel import free_port

        context, port = multiprocessing.get_context("spawn"), free_port()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work, args=(rank, self.size, port, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        self._collect("starting the workers", START_LIMIT_S)

    def _collect(self, what: str, limit_s: float) -> list[Any]:
        """One reply per rank. A failure ends all workers: the others may hang in a collective."""
        ranks = {connection: rank for rank, (_, connection) in enumerate(self._workers)}
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + limit_s
        while len(results) + len(errors) < self.size:
            waiting = [c for c, rank in ranks.items() if rank not in results and rank not in errors]
            # after the first error the others get a moment to report their own
            limit = 1.0 if errors else deadline - time.monotonic()
            ready = wait(waiting, timeout=max(0.0, limit))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = ranks[connection]
                try:
                    is_ok, payload = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionError):
                    is_ok, payload = False, "the process died"
                (results if is_ok else errors)[rank] = payload
        if errors:
            self.close()
            raise WorkerError(
                "\n".join(f"{what} on rank {r}:\n{e}" for r, e in sorted(errors.items()))
            )
        if len(results) < self.size:
            missing = sorted(set(range(self.size)) - set(results))
            self.close()
            raise TimeoutError(f"{what}: no answer from ranks {missing} within {limit_s:g} s")
        return [results[rank] for rank in range(self.size)]


def _work(rank: int, size: int, port: int, connection: Connection) -> None:
    """A worker: join the job, then serve calls until the pipe closes."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1",
    )  # fmt: skip

    def start() -> None:
        import torch

        import megarl.models  # noqa: F401  megatron takes seconds to import: once, not per test
        from megarl.parallel import init_world

        torch.set_num_threads(1)
        init_world(device="cpu", timeout_s=COLLECTIVE_LIMIT_S)

    _reply(connection, start)
    while True:
        try:
            path, call = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            os._exit(0)  # not through destructors: peers may be gone and gloo would wait for them
        sys.path[:] = path  # test modules are found the way pytest found them
        _reply(connection, functools.partial(_call, call))


def _call(call: bytes) -> Any:
    function, kwargs = pickle.loads(call)
    return function(**kwargs)


def _reply(connection: Connection, action: Callable[[], Any]) -> None:
    try:
        message = pickle.dumps((True, action()))
    except BaseException:  # also SystemExit: the parent must learn of it
        message = pickle.dumps((False, traceback.format_exc()))
    connection.send_bytes(message)


@functools.cache
def groups_of(
    *, tp: int = 1, pp: int = 1, dp: int = 1, sequence_parallel: bool = False, rank_offset: int = 0
) -> Any:
    """ParallelGroups of a layout, made once per worker: gloo groups own threads and sockets."""
    from megarl.parallel import ParallelDims, ParallelGroups

    dims = ParallelDims(
        tp=tp, pp=pp, dp=dp, sequence_parallel=sequence_parallel, rank_offset=rank_offset
    )
    return ParallelGroups.build(dims, timeout_s=COLLECTIVE_LIMIT_S)
