"""Mesh: which shard index each rank has, on the training and on the rollout side. Pure arithmetic.

Merge candidate: megarl.parallel.ParallelDims has no expert mesh and its package imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from megarl.config.errors import ConfigError, require
from megarl.reshard.plan.rect import IntArray

__all__ = ["Mesh", "engine_stages", "parse_mesh", "training_stages"]

KEYS = {
    "train": ("tp", "pp", "dp", "cp", "ep", "etp", "vpp"),
    "rollout": ("tp", "pp", "dp", "ep", "etp"),
}


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Ranks rank_offset .. rank_offset + size - 1 of one side.

    Training, fastest first: tp, cp, dp, pp; experts: etp, ep, rest, pp. Rollout: the ranks of a
    stage of
    a replica (tp, or etp * ep when that is more: attention is then data parallel), pp, replicas.
    """

    side: str  # "train" or "rollout"
    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    vpp: int = 1
    rank_offset: int = 0
    tp_index: IntArray = field(init=False, repr=False, compare=False)  # [size] by rank
    etp_index: IntArray = field(init=False, repr=False, compare=False)
    ep_index: IntArray = field(init=False, repr=False, compare=False)
    stage: IntArray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for key in KEYS[self.side]:
            value = getattr(self, key)
            require(value >= 1, f"{self.side}.{key}", value, "must be >= 1", "use 1 or more")
        inner, experts = self.inner, self.etp * self.ep
        per_stage = self.tp * self.cp * self.dp
        require(
            inner % self.tp == 0 and inner % experts == 0 and per_stage % inner == 0,
            f"{self.side}.ep", self.ep,
            f"with etp={self.etp} gives expert groups of {experts} ranks, which do not fit "
            f"tp={self.tp} and the {per_stage} ranks of a stage",
            f"use ep * etp that divides {per_stage}, and divides tp or is a multiple of it",
        )  # fmt: skip
        rank = np.arange(self.size)
        at = rank % inner
        stage = rank // per_stage if self.side == "train" else rank // inner % self.pp
        for name, value in (
            ("tp_index", at % self.tp), ("etp_index", at % self.etp),
            ("ep_index", at // self.etp % self.ep), ("stage", stage),
        ):  # fmt: skip
            object.__setattr__(self, name, value)

    @property
    def size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def inner(self) -> int:
        """Ranks of one stage that belong together: of a replica, or of training as a whole."""
        if self.side == "train":
            return self.tp * self.cp * self.dp
        return max(self.tp, self.ep * self.etp)


def parse_mesh(side: str, text: str) -> Mesh:
    """Read `tp=4,pp=2,dp=2`. etp defaults to tp without ep; else to 1 (train) or tp // ep, at
    least 1.

    Raises:
        ConfigError: unknown key, not a positive integer, or sizes that do not fit.
    """
    values: dict[str, int] = {}
    for part in text.split(","):
        key, _, number = part.strip().partition("=")
        known = ", ".join(KEYS[side])
        require(
            key in KEYS[side] and key not in values, f"--{side}", text,
            f"has an unknown or repeated key {key!r}",
            f"use {known}, each at most once, e.g. tp=2,dp=4",
        )  # fmt: skip
        if not number.isdecimal() or int(number) < 1:
            raise ConfigError(f"--{side} {key}={number!r} is not a positive integer; use 1 or more")
        values[key] = int(number)
    tp, ep = values.get("tp", 1), values.get("ep", 1)
    if ep == 1:
        values.setdefault("etp", tp)
    elif side == "rollout":
        values.setdefault("etp", max(tp // ep, 1))
    return Mesh(side=side, **values)


def training_stages(num_layers: int, pp: int, vpp: int = 1) -> IntArray:
    """[num_layers] pipeline stage of each layer; with vpp > 1 chunk c lies on stage c % pp.

    Uneven: only the ends differ, as megarl.models.weight_layout.pipeline_split says (merge
    candidate).
    """
    chunks = pp * vpp
    require(
        1 <= chunks <= num_layers, "train.pp", pp,
        f"with vpp={vpp} needs {chunks} layers and the model has {num_layers}", "use a smaller pp",
    )  # fmt: skip
    if vpp > 1:
        require(
            num_layers % chunks == 0, "train.vpp", vpp,
            f"times pp={pp} does not divide the {num_layers} layers", "use a divisor",
        )  # fmt: skip
    if num_layers % chunks == 0:
        return np.arange(num_layers) // (num_layers // chunks) % pp
    middle = -(-num_layers // pp)
    if num_layers - middle * (pp - 2) < 2:
        middle -= 1
    ends = num_layers - middle * (pp - 2)
    return np.repeat(np.arange(pp), [ends - ends // 2, *[middle] * (pp - 2), ends // 2])


def engine_stages(num_layers: int, pp: int) -> IntArray:
    """[num_layers] pipeline stage of each layer in SGLang: the last stages take what is left
    over.
    """
    require(pp <= num_layers, "rollout.pp", pp, f"exceeds the {num_layers} layers", "use less")
    base, extra = divmod(num_layers, pp)
    return np.repeat(np.arange(pp), [base + (stage >= pp - extra) for stage in range(pp)])
