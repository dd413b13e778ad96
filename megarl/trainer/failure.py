"""Stopping: one rank's failure stops all, with its traceback first, no hang and no orphan.

The failing rank prints its traceback and leaves a notice in the launcher's store before it exits. Ranks that
then see a broken collective find the notice and exit with one line instead of a traceback of their own.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

import torch.distributed as dist

from megarl.common.log import get_logger
from megarl.parallel import PeerFailure, World

__all__ = ["run_guarded"]

logger = get_logger(__name__)

NOTICE = "megarl/failure"


def run_guarded(world: World, main: Callable[[], None], cleanup: Callable[[], None]) -> int:
    """Run `main`, always `cleanup`; returns 0, or 1 after a failure on this or another rank."""
    try:
        main()
        dist.barrier()
    except KeyboardInterrupt:
        cleanup()
        return 130
    except PeerFailure as e:
        logger.error("rank %d stops: %s", world.rank, e)
        cleanup()
        return 1
    except Exception as e:
        notice = _notice_of_peer(world)
        if notice is None:
            _leave_notice(world, f"rank {world.rank}: {type(e).__name__}: {e}")
            traceback.print_exc()
            sys.stderr.flush()
        else:
            logger.error("rank %d stops because of %s", world.rank, notice)
        cleanup()
        return 1
    cleanup()
    dist.destroy_process_group()
    return 0


def leave(code: int) -> None:
    """End the process now: after a failure, threads of broken process groups may never join."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _leave_notice(world: World, text: str) -> None:
    try:
        world.store.set(NOTICE, text)
    except Exception:  # the store is gone with the launcher; the traceback still tells
        logger.warning("could not leave a failure notice: the launcher's store does not answer")


def _notice_of_peer(world: World) -> str | None:
    try:
        return world.store.get(NOTICE).decode() if world.store.check([NOTICE]) else None
    except Exception:
        return "another rank or the launcher, which is gone"
