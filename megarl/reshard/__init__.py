"""Moves the actor's weights from the training layout into the engines' layout. Knows no engine.

`megarl.reshard.plan` is pure Python and numpy: planning imports neither torch nor
torch.distributed, so the push, which does, is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megarl.reshard.push import PushStats, WeightPush

__all__ = ["PushStats", "WeightPush"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megarl.reshard import push

    return getattr(push, name)
