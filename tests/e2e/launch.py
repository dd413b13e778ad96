"""Runs megarl as a user does, under torchrun, and proves that nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["Finished", "Job", "start"]

DRIVER = Path(__file__).parent / "driver.py"


@dataclass(frozen=True)
class Finished:
    """How a job ended."""

    code: int
    output: str
    seconds: float
    leftovers: list[str]  # command lines of processes the job left running


class Job:
    """A torchrun job in a session of its own."""

    def __init__(self, args: list[str], *, num_ranks: int, log: Path, driver: str | None) -> None:
        program = ["-m", "megarl"] if driver is None else [str(DRIVER), driver]
        launcher = [
            "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks),
            *program,
        ]  # fmt: skip
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        self.log = log
        self.begin = time.monotonic()
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, *launcher, *args],
                stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True,
            )  # fmt: skip
        self.seen: dict[int, psutil.Process] = {}

    def children(self) -> list[psutil.Process]:
        """Every process below torchrun now; remembered, to look for orphans later."""
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            found = []
        self.seen.update({p.pid: p for p in found})
        return found

    def ranks(self) -> list[psutil.Process]:
        """The rank processes, by rank."""
        found = psutil.Process(self.process.pid).children()
        self.children()
        return sorted(found, key=lambda p: int(p.environ().get("RANK", "99")))

    def wait_for(self, text: str, limit_s: float) -> None:
        """Until `text` is in the log. Raises TimeoutError."""
        deadline = time.monotonic() + limit_s
        while text not in self.log.read_text():
            self.children()
            if time.monotonic() > deadline or self.process.poll() is not None:
                self.finish(0.0)
                raise TimeoutError(f"no {text!r} in:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.2)

    def finish(self, limit_s: float) -> Finished:
        """Wait for the end; a job over its limit is killed and reported as code -9."""
        deadline = time.monotonic() + limit_s
        while self.process.poll() is None and time.monotonic() < deadline:
            self.children()
            time.sleep(0.2)
        code = self.process.poll()
        if code is None:
            self.children()
            for process in [psutil.Process(self.process.pid), *self.seen.values()]:
                if process.is_running():
                    process.send_signal(signal.SIGKILL)
            code = self.process.wait() and -9
        seconds = time.monotonic() - self.begin
        _, alive = psutil.wait_procs(list(self.seen.values()), timeout=5)
        leftovers = [" ".join(p.cmdline()) for p in alive if p.status() != psutil.STATUS_ZOMBIE]
        for process in alive:
            process.kill()
        return Finished(code, self.log.read_text(), seconds, leftovers)


def start(args: list[str], *, num_ranks: int, log: Path, driver: str | None = None) -> Job:
    """Start `megarl ARGS` on `num_ranks` ranks; `driver` names a fault of driver.py to inject."""
    return Job(args, num_ranks=num_ranks, log=log, driver=driver)
