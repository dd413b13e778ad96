"""What a Hugging Face folder says about a model, read with json only.

Owns the checks that a folder can be trained: files present, architecture supported. Loads no
weight.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.config.choices import ARCHITECTURES
from megarl.config.errors import ConfigError, require
from megarl.config.schema import ModelConfig

__all__ = ["ModelShape", "read_model_shape"]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes that parallel layouts and limits are checked against."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_size: int
    max_positions: int


def read_model_shape(model: ModelConfig) -> ModelShape:
    """Check the folder and return its sizes.

    Raises:
        ConfigError: a file is missing or unreadable, or the architecture is not supported.
    """
    folder = Path(model.path)
    config_file = folder / "config.json"
    remedy = "give a Hugging Face folder with config.json, *.safetensors and a tokenizer"
    require(folder.is_dir(), "model.path", model.path, "is not a folder on this machine", remedy)
    require(config_file.is_file(), "model.path", model.path, "has no config.json", remedy)
    try:
        config = json.loads(config_file.read_text())
        if not isinstance(config, dict):
            raise ValueError(f"it holds a {type(config).__name__}, not an object")
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"model.path={model.path!r} has an unreadable config.json: {error}; {remedy}"
        ) from None
    architectures = config.get("architectures") or []
    require(
        any(a in ARCHITECTURES for a in architectures), "model.path", model.path,
        f"has architectures {architectures}", f"use one of {', '.join(ARCHITECTURES)}",
    )  # fmt: skip
    require(
        any(folder.glob("*.safetensors")),
        "model.path",
        model.path,
        "has no *.safetensors weights",
        remedy,
    )
    require(
        any((folder / name).is_file() for name in _TOKENIZER_FILES), "model.path", model.path,
        f"has no tokenizer (none of {', '.join(_TOKENIZER_FILES)})", remedy,
    )  # fmt: skip
    _check_chat_template(model, folder)
    return _shape(model, config)


def _check_chat_template(model: ModelConfig, folder: Path) -> None:
    if model.chat_template is not None:
        require(
            Path(model.chat_template).is_file(),
            "model.chat_template",
            model.chat_template,
            "does not exist",
            "give the path of a Jinja file, or null for the tokenizer's own",
        )
        return
    own = any((folder / name).exists() for name in ("chat_template.jinja", "chat_template.json"))
    tokenizer_config = folder / "tokenizer_config.json"
    if not own and tokenizer_config.is_file():
        try:
            own = bool(json.loads(tokenizer_config.read_text()).get("chat_template"))
        except (ValueError, OSError) as error:
            raise ConfigError(
                f"model.path={model.path!r} has an unreadable tokenizer_config.json: {error}; copy "
                "it again"
            ) from None
    require(
        own,
        "model.path",
        model.path,
        "has a tokenizer without a chat template",
        "set model.chat_template=PATH",
    )


def _shape(model: ModelConfig, config: dict[str, Any]) -> ModelShape:
    def size(key: str, default: object = None) -> int:
        value = config.get(key)
        value = default if value is None else value
        require(
            type(value) is int and value > 0, "model.path", model.path,
            f"has {key}={value!r} in config.json, not a positive integer", "copy the folder again",
        )  # fmt: skip
        assert isinstance(value, int)
        return value

    return ModelShape(
        num_layers=size("num_hidden_layers"),
        num_heads=size("num_attention_heads"),
        num_kv_heads=size("num_key_value_heads", config.get("num_attention_heads")),
        ffn_size=size("intermediate_size"),
        max_positions=size("max_position_embeddings"),
    )
