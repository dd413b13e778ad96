"""Stopping: one rank's failure stops all, with its traceback first, no hang and no orphan.

The first rank that fails prints its traceback and leaves a notice in the launcher's store. Ranks
that fail because of it, by an agreed failure or a broken collective, wait for the notice and add
one line.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable

import torch.distributed as dist

from megarl.common.log import get_logger
from megarl.config import ConfigError
from megarl.data import DataError
from megarl.parallel import PeerFailure, World

__all__ = ["leave", "run_guarded"]

logger = get_logger(__name__)

NOTICE = "megarl/failure"
WAIT_FOR_NOTICE_S = 5.0
EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def run_guarded(world: World, main: Callable[[], None], cleanup: Callable[[], None]) -> int:
    """Run `main`, always `cleanup`.

    Returns:
        0; 2 when the settings or the data cannot work (said in one line); 1 after any other
        failure, here or on another rank; 130 after an interrupt.
    """
    code = 0
    try:
        main()
        dist.barrier()
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except PeerFailure as error:
        _wait_for_notice(world)
        logger.error("stops: %s", error)
        code = EXIT_FAILED
    except Exception as error:
        code = EXIT_USAGE if isinstance(error, ConfigError | DataError) else EXIT_FAILED
        _report(world, error)
    cleanup()
    if code == 0:
        dist.destroy_process_group()
    return code


def leave(code: int) -> None:
    """End the process now: after a failure, threads of broken process groups may never join."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _report(world: World, error: Exception) -> None:
    """Print the error if it is the job's first, else one line that names the first."""
    try:
        is_first = world.store.add(f"{NOTICE}/count", 1) == 1
    except Exception:  # the store is gone with the launcher: say everything
        is_first = True
    is_usage = isinstance(error, ConfigError | DataError)
    if not is_first and is_usage:
        return  # every rank reads the same settings and data: said once
    if not is_first:
        notice = _wait_for_notice(world)
        logger.error("stops after the failure of %s", notice or "another rank")
        return
    if is_usage:
        logger.error("megarl: %s", error)
    else:
        sys.stderr.write(f"rank {world.rank} failed:\n{traceback.format_exc()}")
        sys.stderr.flush()
    try:
        world.store.set(NOTICE, f"rank {world.rank}: {type(error).__name__}: {error}")
    except Exception:
        logger.warning("could not leave a failure notice: the launcher's store does not answer")


def _wait_for_notice(world: World) -> str | None:
    """The first failure's notice; None if none comes within seconds (its rank was killed)."""
    deadline = time.monotonic() + WAIT_FOR_NOTICE_S
    try:
        while not world.store.check([NOTICE]):
            if time.monotonic() > deadline:
                return None
            time.sleep(0.05)
        return world.store.get(NOTICE).decode()
    except Exception:  # the store is gone with the launcher
        return None
