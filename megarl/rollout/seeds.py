"""Independent random streams from a few integers, the same in every process."""

from __future__ import annotations

import hashlib

__all__ = ["derive_seed"]


def derive_seed(*parts: int) -> int:
    """A seed in [0, 2**63) that depends on each of `parts` and on their order."""
    text = ",".join(str(int(part)) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
