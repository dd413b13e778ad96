"""WeightPush: the actor's weights, from the training layout into every engine replica, verified.

Data path: trainer.update -> WeightPush -> rollout. A push that fails, is partial, arrives changed,
or changes nothing although the update should have, raises WeightSyncError on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megarl.parallel import all_agree, gather_objects
from megarl.reshard.gather import cut_shards, gather_window, plan_windows
from megarl.rollout.base import RolloutEngine, WeightSyncError
from megarl.types import WeightLayout

__all__ = ["PushStats", "WeightPush"]


@dataclass(frozen=True)
class PushStats:
    """What a push did, for metrics."""

    version: int
    sent_bytes: int  # canonical bytes broadcast, all ranks together
    num_windows: int
    num_changed: int  # this replica's parameters that differ from the push before; at first all


class WeightPush:
    """Built once by every rank of the job; `push` is collective over the whole job."""

    def __init__(
        self,
        train_layout: WeightLayout,
        engine_layout: WeightLayout,
        *,
        replica_group: ProcessGroup,
        engine: RolloutEngine | None,
        export_shard: Callable[[torch.Tensor], torch.Tensor | bytes],
        digest: Callable[[torch.Tensor], str],
        dtype: torch.dtype,
        device: torch.device,
        max_window_bytes: int = 256 * 2**20,
    ) -> None:
        """
        Args:
            train_layout: what this rank holds in training.
            engine_layout: what this rank's engine worker holds.
            replica_group: the ranks of this replica; its first rank is the leader.
            engine: the replica's engine on the leader, None elsewhere.
            export_shard, digest: of the engine's class.
            dtype: dtype of the engine's weights.
            device: where windows are assembled.
            max_window_bytes: bound of full tensors in flight.
        """
        self.engine = engine
        self.engine_layout = engine_layout
        self.replica_group = replica_group
        self.leader = dist.get_process_group_ranks(replica_group)[0]
        self.export_shard, self.digest = export_shard, digest
        self.dtype, self.device = dtype, device
        layouts = gather_objects(train_layout)
        element_size = torch.empty(0, dtype=dtype).element_size()
        self.windows = plan_windows(
            layouts, engine_layout, max_bytes=max_window_bytes, element_size=element_size
        )
        elements = sum(
            p.source.num_elements for w in self.windows for _, ps in w.senders for p in ps
        )
        self.sent_bytes = elements * element_size
        self.last_digests: list[dict[str, str]] = []

    def push(
        self, parameters: Mapping[str, torch.Tensor], *, version: int, must_change: bool
    ) -> PushStats:
        """Install `parameters` (this rank's local ones) in all engines as `version`.

        Raises:
            WeightSyncError: refused, partial, arrived changed, or nothing changed though
                `must_change`; PeerFailure on the other ranks.
        """
        all_agree("weight push", lambda: self.engine.begin_update() if self.engine else None)
        digests: dict[str, str] = {}
        for window in self.windows:
            full = gather_window(
                window,
                parameters,
                self.engine_layout.canonical_shapes,
                dtype=self.dtype,
                device=self.device,
            )
            shards = cut_shards(window, full, self.engine_layout)
            del full
            digests.update({name: self.digest(t) for name, t in shards.items()})
            self._install(shards)
        sent = gather_objects(digests, self.replica_group)
        num_changed = all_agree("weight push", lambda: self._finish(sent, version, must_change))
        return PushStats(version, self.sent_bytes, len(self.windows), num_changed)

    def _install(self, shards: dict[str, torch.Tensor]) -> None:
        """Hand one window of this replica's shards to its leader's engine."""
        if dist.get_world_size(self.replica_group) == 1:
            payloads: list[dict[str, torch.Tensor | bytes]] = [dict(shards)]
        else:
            exported = {name: self.export_shard(t) for name, t in shards.items()}
            payloads = gather_objects(exported, self.replica_group)
        # the shards stay alive until every leader is done: exported ones are handles to this memory
        all_agree(
            "weight push", lambda: self.engine.update_weights(payloads) if self.engine else None
        )

    def _finish(self, sent: list[dict[str, str]], version: int, must_change: bool) -> int:
        if self.engine is None:
            return 0
        self.engine.end_update(version)
        arrived = self.engine.checksums()
        for tp_rank, (want, got) in enumerate(zip(sent, arrived, strict=True)):
            wrong = [name for name, value in want.items() if got.get(name) != value]
            if wrong:
                raise WeightSyncError(
                    f"version {version}: {len(wrong)} of {len(want)} parameters of "
                    f"engine rank {tp_rank} differ from what was sent, first {wrong[0]}"
                )
        before = self.last_digests or [{} for _ in sent]
        changed = sum(
            old.get(n) != d for old, new in zip(before, sent, strict=True) for n, d in new.items()
        )
        self.last_digests = sent
        if must_change and changed == 0:
            raise WeightSyncError(
                f"version {version}: the update changed no weight of the engine; the learning rate "
                "may be below the weights' precision (raise optim.lr or use model.dtype=float32)"
            )
        return changed
