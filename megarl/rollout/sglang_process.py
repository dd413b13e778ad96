"""Starts, watches and stops the processes of one SGLang engine; the only other file that imports
sglang.

SGLang's Engine is written to own its process: it sets signal handlers, environment variables, the
root logger and the start method, and on failure or shutdown kills every child of the process. Here
it is a guest in a training rank: everything is put back after the start and only its own processes
are ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from sglang.srt.entrypoints.engine import Engine

from megarl.rollout.base import RolloutError
from megarl.rollout.sglang_worker import WorkerSpec, run_worker

__all__ = ["EngineProcess"]

# what torchrun tells its ranks; a scheduler that reads it would look for a store that is not its
# own
_LAUNCHER_VARIABLES = (
    "TORCHELASTIC_",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "GROUP_",
    "ROLE_",
    "MASTER_",
)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
_POLL_S = 0.5
_RETIRED_CONTEXTS: list[Any] = []  # see _remove_channels


def _ignore_signal(signum: int, frame: object) -> None:
    """SIGQUIT of a failing scheduler; polling notices its death and raises RolloutError."""


class _Launcher(Engine):
    """SGLang's Engine with megarl's worker entry and none of its process-wide side effects."""

    def __init__(self, spec: WorkerSpec, **server_args: Any) -> None:
        self.run_scheduler_process_func = functools.partial(run_worker, spec)
        make_manager: Callable[..., Any] = Engine.init_tokenizer_manager_func
        made: list[tuple[Any, Any]] = []

        def make_and_remember(args: Any, port_args: Any, **kwargs: Any) -> Any:
            manager, template = make_manager(args, port_args, **kwargs)
            made.append((manager, port_args))
            return manager, template

        self.init_tokenizer_manager_func = make_and_remember
        try:
            super().__init__(**server_args)
        except BaseException:
            for manager, port_args in made:
                _remove_channels(_sockets(manager), port_args)
            raise

    @classmethod
    def _launch_scheduler_processes(  # type: ignore[override]
        cls, server_args: Any, port_args: Any, run_scheduler_process_func: Any, **kwargs: Any
    ) -> Any:
        if threading.current_thread() is threading.main_thread():
            # SGLang's handler, set just before, kills this whole process when a scheduler fails to
            # start
            signal.signal(signal.SIGQUIT, _ignore_signal)
        with _output_to(Path(run_scheduler_process_func.args[0].folder) / "log"):
            return super()._launch_scheduler_processes(
                server_args, port_args, run_scheduler_process_func, **kwargs
            )

    @classmethod
    def _launch_detokenizer_subprocesses(
        cls, *args: Any, **kwargs: Any
    ) -> tuple[list[Any], list[str]]:
        return [], []  # token ids go straight back: with skip_tokenizer_init nothing is sent to it

    def shutdown(self) -> None:
        """SGLang's kills every child of this process; EngineProcess.close ends the engine's own."""


class EngineProcess:
    """A running SGLang engine: its event loop in this process, its schedulers in others."""

    def __init__(
        self,
        server_args: Mapping[str, Any],
        *,
        environment: Mapping[str, str],
        num_threads: int | None,
        start_timeout_s: float,
    ) -> None:
        """
        Args:
            server_args: arguments of sglang's ServerArgs.
            environment: variables the schedulers see on top of this process's.
            num_threads: torch threads of one scheduler; None: torch's default.
            start_timeout_s: limit of the start, seconds.

        Raises:
            RolloutError: the engine did not start; none of its processes is left.
        """
        self.folder = tempfile.mkdtemp(prefix="megarl-sglang-")
        self.children: list[BaseProcess] = []
        self.engine: Engine | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._port = hold_free_port()
        self._quit_handler = signal.getsignal(signal.SIGQUIT)
        spec = WorkerSpec(folder=self.folder, parent_pid=os.getpid(), num_threads=num_threads)
        args = {**server_args, "nccl_port": self._port.getsockname()[1]}
        limit = _StartLimit(start_timeout_s)
        try:
            with _guest(environment), limit:
                self.engine = _Launcher(spec, **args)
                self._adopt()
        except Exception as error:
            self.children = limit.started()
            why = f"not ready after {start_timeout_s:g} s" if limit.is_over else str(error)
            message = f"SGLang did not start: {why}{self.log_tail()}"
            self.close()
            raise RolloutError(message) from error
        finally:
            self._port.close()
        self.children = limit.started()

    def _adopt(self) -> None:
        """Undo what SGLang's event loop took over: its signal handlers and its watchdog, which
        raises SIGQUIT.
        """
        assert self.engine is not None
        manager, loop = self.engine.tokenizer_manager, self.engine.loop
        manager._subprocess_watchdog.stop()

        async def start() -> None:
            manager.auto_create_handle_loop()
            if threading.current_thread() is threading.main_thread():
                for signum in (signal.SIGTERM, signal.SIGQUIT):
                    # uvloop forgets a handler only while it runs; SIGQUIT's would kill this process
                    assert loop.remove_signal_handler(signum), signum

        loop.run_until_complete(start())

    @property
    def manager(self) -> Any:
        """SGLang's TokenizerManager."""
        if self.engine is None:
            raise RolloutError("the engine is closed")
        return self.engine.tokenizer_manager

    def run(self, coroutine: Coroutine[Any, Any, Any], *, what: str, timeout_s: float) -> Any:
        """Run `coroutine` on the engine's loop. Raises RolloutError if a scheduler dies or time is
        up.
        """
        task = self.start(coroutine)
        deadline = time.monotonic() + timeout_s
        while not self.wait({task}):
            try:
                self.require_alive()
                if time.monotonic() > deadline:
                    raise RolloutError(f"SGLang did not finish {what} within {timeout_s:g} s")
            except RolloutError:
                task.cancel()
                raise
        return task.result()

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task on the engine's loop, which only runs inside `wait` and `run`; close ends it."""
        if self.engine is None:
            coroutine.close()
            raise RolloutError("the engine is closed")
        task = self.engine.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def wait(self, tasks: set[asyncio.Task[Any]]) -> set[asyncio.Task[Any]]:
        """The tasks that are done, after at most half a second."""
        if self.engine is None:
            raise RolloutError("the engine is closed")
        waiting = asyncio.wait(tasks, timeout=_POLL_S, return_when=asyncio.FIRST_COMPLETED)
        return set(self.engine.loop.run_until_complete(waiting)[0])

    def drop(self, tasks: set[asyncio.Task[Any]]) -> None:
        """End unfinished requests, here and in the schedulers."""
        if not tasks or self.engine is None:
            return
        self.manager.abort_request(abort_all=True)
        loop = self.engine.loop
        loop.run_until_complete(asyncio.wait(tasks, timeout=5))  # aborted requests come back
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))

    def require_alive(self) -> None:
        """Raise RolloutError if one of the schedulers is gone."""
        for child in self.children:
            if not child.is_alive():
                died = f"SGLang scheduler {child.pid} died, exit code {child.exitcode}"
                message = died + self.log_tail()
                self.close()
                raise RolloutError(message)

    def log_tail(self, max_lines: int = 12) -> str:
        """The end of what the schedulers printed, for error messages."""
        path = Path(self.folder) / "log"
        lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
        return "\n".join(["; the end of its output:", *lines[-max_lines:]]) if lines else ""

    def close(self) -> None:
        """Kill the schedulers, wait for them, remove files. Safe to call twice."""
        for child in self.children:
            child.kill()
        for child in self.children:
            child.join(timeout=10)
        engine, self.engine = self.engine, None
        if engine is not None:
            _close_loop_side(engine, set(self._tasks))
        for child in self.children:  # a killed scheduler cannot remove its own
            _remove_shared_memory(f"sgl_shm_mq_{child.pid}_*")
        self.children = []
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGQUIT) is _ignore_signal:
            signal.signal(signal.SIGQUIT, self._quit_handler or signal.SIG_DFL)
        shutil.rmtree(self.folder, ignore_errors=True)


def hold_free_port() -> socket.socket:
    """A loopback port bound but not listened on, so that no one else is given it before the
    scheduler takes it.

    Both sides set SO_REUSEADDR (torch's TCPStore does); closing the socket frees the port.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder


class _StartLimit:
    """Kills the processes started inside the block when it takes too long; SGLang then reports
    their death.
    """

    def __init__(self, timeout_s: float) -> None:
        self.before = set(multiprocessing.active_children())
        self.timeout_s = timeout_s
        self.is_over = False
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def started(self) -> list[BaseProcess]:
        """In the order they were started, which is that of the ranks."""
        children = [c for c in multiprocessing.active_children() if c not in self.before]
        return sorted(children, key=lambda c: c.pid or 0)

    def _watch(self) -> None:
        if self._is_done.wait(self.timeout_s):
            return
        self.is_over = True
        while not self._is_done.wait(_POLL_S):  # more may be started after the limit
            for child in self.started():
                child.kill()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_done.set()
        self._thread.join()


@contextlib.contextmanager
def _guest(environment: Mapping[str, str]) -> Iterator[None]:
    """Put back what SGLang changes in this process; schedulers inherit `environment`."""
    saved = dict(os.environ)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    method = multiprocessing.get_start_method(allow_none=True)
    in_main = threading.current_thread() is threading.main_thread()
    signals = {s: signal.getsignal(s) for s in _SIGNALS} if in_main else {}
    for name in saved:
        if name.startswith(_LAUNCHER_VARIABLES):
            del os.environ[name]
    os.environ.update(environment)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.environ.clear()
        os.environ.update(saved)
        root.handlers[:] = handlers
        root.setLevel(level)
        multiprocessing.set_start_method(method, force=True)
        for signum, handler in signals.items():
            if signum == signal.SIGQUIT and handler in (None, signal.SIG_DFL):
                # a failing scheduler sends it, and the default ends this process
                handler = _ignore_signal
            signal.signal(signum, handler if handler is not None else signal.SIG_DFL)


@contextlib.contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Processes started inside the block write stdout and stderr to `path`."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [(fd, os.dup(fd)) for fd in (1, 2)]
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        for fd in (1, 2):
            os.dup2(log, fd)
        yield
    finally:
        for fd, copy in saved:
            os.dup2(copy, fd)
            os.close(copy)
        os.close(log)


def _close_loop_side(engine: Engine, own_tasks: set[asyncio.Task[Any]]) -> None:
    """Cancel the engine's tasks on the loop of this process and remove its channels."""
    manager = engine.tokenizer_manager
    tasks = {t for t in own_tasks | manager.asyncio_tasks if not t.done()}
    for task in tasks:
        task.cancel()
    if tasks and not engine.loop.is_closed():
        engine.loop.run_until_complete(asyncio.wait(tasks, timeout=1))
    _remove_channels([engine.send_to_rpc, *_sockets(manager)], engine.port_args)


def _sockets(manager: Any) -> list[Any]:
    return [manager.send_to_scheduler, manager.recv_from_detokenizer]


def _remove_channels(zmq_sockets: list[Any], port_args: Any) -> None:
    """Close SGLang's zmq sockets and remove the files of their channels and of the killed
    schedulers.

    The contexts themselves are kept: ending one, or leaving it to the garbage collector, which ends
    it, can wait for ever for messages to dead processes or for sockets collected with it.
    """
    for zmq_socket in zmq_sockets:
        _RETIRED_CONTEXTS.append(zmq_socket.context)
        zmq_socket.close(linger=0)
    for name in vars(port_args).values():
        if isinstance(name, str) and name.startswith("ipc://"):
            Path(name.removeprefix("ipc://")).unlink(missing_ok=True)
    _remove_shared_memory(f"sglang_loads_{port_args.instance_id}_*")


def _remove_shared_memory(pattern: str) -> None:
    for path in Path("/dev/shm").glob(pattern):
        path.unlink(missing_ok=True)
