"""What an engine reads from a Hugging Face folder besides the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megarl.rollout.base import RolloutError

__all__ = ["end_of_sequence_ids", "read_hf_config", "require_weights"]


def read_hf_config(model_path: str) -> dict[str, Any]:
    """Content of config.json. Raises RolloutError if there is none."""
    path = Path(model_path) / "config.json"
    if not path.is_file():
        raise RolloutError(f"{model_path} has no config.json; give a Hugging Face folder")
    return dict(json.loads(path.read_text()))


def end_of_sequence_ids(model_path: str) -> tuple[int, ...]:
    """Ids that end a response: eos_token_id of config.json and of generation_config.json."""
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = Path(model_path) / name
        value = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        if value is not None:
            ids.update(value if isinstance(value, list) else [value])
    return tuple(sorted(ids))


def require_weights(model_path: str) -> None:
    """Raise RolloutError unless the folder holds model weights."""
    folder = Path(model_path)
    if not folder.is_dir():
        raise RolloutError(f"model folder {model_path} does not exist")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise RolloutError(
            f"{model_path} has no weights (*.safetensors); give a complete Hugging Face folder"
        )
