"""A small tokenizer made here, prompt rows, and the folder of real data."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

WORDS = ["<unk>", "<s>", "</s>", "<user>", "<system>", "<assistant>", *"abcdefgh"]
TEMPLATE = (
    "<s>{% for m in messages %} <{{ m['role'] }}> {{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %} <assistant>{% endif %}"
)


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    """Whole words; the tokenizer itself would add <s> too, as Llama's does."""
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=TEMPLATE,
    )
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.fixture
def shared() -> Path:
    """Real data; tests that need it skip without it."""
    default = Path(__file__).resolve().parents[4] / "shared"
    folder = Path(os.environ.get("MEGARL_SHARED", default)) / "data"
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}; set MEGARL_SHARED")
    return folder
