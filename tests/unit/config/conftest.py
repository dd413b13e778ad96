"""A model folder of given sizes and the overrides that make a config valid."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def model_folder(tmp_path: Path) -> Callable[..., Path]:
    """make(**config.json entries) -> a folder that passes every check; weights and tokenizer are
    stand-ins.
    """

    def make(**changes: object) -> Path:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        config = {
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": 6,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "intermediate_size": 96 * 32,
            "max_position_embeddings": 4096,
        }
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        for name in ("model.safetensors", "tokenizer.json", "chat_template.jinja"):
            (folder / name).write_text("x")
        return folder

    return make


@pytest.fixture
def base(tmp_path: Path, model_folder: Callable[..., Path]) -> list[str]:
    """Overrides of a valid config on one rank."""
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    return [
        f"model.path={model_folder()}",
        f"data.train_files=[{tmp_path / 'a.parquet'}]",
        f"trainer.output_dir={tmp_path / 'out'}",
    ]


@pytest.fixture
def empty_yaml(tmp_path: Path) -> Path:
    path = tmp_path / "empty.yaml"
    path.write_text("")
    return path
