"""Tokenizer and chat template: messages -> the token ids the model continues."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megarl.config.errors import ConfigError
from megarl.data.schema import DataError

__all__ = ["encode_prompt", "load_tokenizer"]


def load_tokenizer(
    path: str | Path, *, chat_template: str | None = None
) -> PreTrainedTokenizerBase:
    """Tokenizer of a local folder, never of a hub.

    Args:
        chat_template: path of a Jinja file that replaces the tokenizer's own template.

    Raises:
        ConfigError: no tokenizer, no chat template, or no end-of-sequence token.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"model.path={str(path)!r} has no usable tokenizer ({reason}); copy it there"
        ) from error
    if chat_template is not None:
        try:
            tokenizer.chat_template = Path(chat_template).read_text()
        except OSError as error:
            raise ConfigError(
                f"model.chat_template={chat_template!r} cannot be read ({error.strerror}); give a "
                "Jinja file"
            ) from None
    if not tokenizer.chat_template:
        raise ConfigError(
            f"model.path={str(path)!r} has a tokenizer without a chat template; set "
            "model.chat_template=PATH"
        )
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"model.path={str(path)!r} has a tokenizer without eos_token; set it in "
            "tokenizer_config.json"
        )
    return tokenizer


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]]
) -> list[int]:
    """Token ids of `messages` and the header of the assistant's turn.

    The template writes the special tokens itself, so the tokenizer adds none: one BOS, not two.

    Raises:
        DataError: the template refuses the messages, or they give no token.
    """
    try:
        text = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=False
        )
    except TemplateError as error:
        roles = [m.get("role") for m in messages]
        raise DataError(
            f"the chat template refuses messages of roles {roles}: {error}; correct the row"
        ) from None
    ids = tokenizer.encode(text, add_special_tokens=False)
    if not ids:
        raise DataError(
            "the chat template makes no token of the messages; correct the row or the template"
        )
    return list(ids)
