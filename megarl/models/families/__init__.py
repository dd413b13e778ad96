"""Registry of model families: one line per architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.config.errors import ConfigError
from megarl.models.families.base import Family, ModelSpec, Source, Split, TensorRule, read_spec
from megarl.models.families.llama import LLAMA
from megarl.models.families.qwen2 import QWEN2
from megarl.models.families.qwen3 import QWEN3

__all__ = ["FAMILIES", "Family", "ModelSpec", "Source", "Split", "TensorRule", "model_spec"]

FAMILIES: dict[str, Family] = {f.architecture: f for f in (LLAMA, QWEN2, QWEN3)}


def model_spec(hf_config: Mapping[str, Any]) -> ModelSpec:
    """The model of a config.json. Raises ConfigError for an unknown architecture or option."""
    names = hf_config.get("architectures") or []
    if len(names) != 1 or names[0] not in FAMILIES:
        raise ConfigError(
            f"config.json architectures={list(names)!r} is not supported; "
            f"use one of {', '.join(FAMILIES)}"
        )
    return read_spec(FAMILIES[names[0]], hf_config)
