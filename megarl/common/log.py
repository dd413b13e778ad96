"""Logging: one format, rank 0 speaks by default."""

from __future__ import annotations

import logging
import os
import sys
import warnings

__all__ = ["configure_logging", "get_logger", "quiet_third_parties"]


def get_logger(name: str) -> logging.Logger:
    return logging.getLogger(name)


def configure_logging() -> None:
    """Send megarl's INFO of rank 0, and WARNING of every rank, to stderr. Call once in main()."""
    rank = int(os.environ.get("RANK", "0"))
    handler = logging.StreamHandler(sys.stderr)
    where = "" if rank == 0 else f" [rank {rank}]"
    handler.setFormatter(logging.Formatter(f"%(asctime)s{where} %(message)s", datefmt="%H:%M:%S"))
    root = logging.getLogger("megarl")
    root.handlers[:] = [handler]
    root.propagate = False
    root.setLevel(logging.INFO if rank == 0 else logging.WARNING)


def quiet_third_parties() -> None:
    """Silence what megatron, torch.distributed and torchao say at every start, whatever one does.

    Call before importing them. Errors still show.
    """
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.distributed\.")
    for name in ("torch.utils._pytree", "torchao", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
