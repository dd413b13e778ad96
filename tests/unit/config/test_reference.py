from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from megarl.config import SftConfig, TrainConfig
from megarl.config.load import sections_of
from megarl.config.reference import field_docs, reference_markdown, reference_text

SECTIONS = {*sections_of(TrainConfig).values(), *sections_of(SftConfig).values()}


@pytest.mark.parametrize("section", sorted(SECTIONS, key=lambda cls: cls.__name__))
def test_every_field_has_a_docstring(section: type) -> None:
    docs = field_docs(section)
    assert [f.name for f in fields(section) if not docs.get(f.name)] == []


def test_reference_shows_key_default_type_and_meaning() -> None:
    text = reference_text(TrainConfig)
    assert "  optim.lr=1e-06  (a number)\n      Peak learning rate, > 0.\n" in text
    assert "  model.dtype=float32  (one of float32, bfloat16)\n" in text
    assert "  parallel.dp=null  (an integer or null)\n" in text


def test_markdown_has_one_row_per_key() -> None:
    rows = [line for line in reference_markdown().splitlines() if line.startswith("| `")]
    schemas = (TrainConfig, SftConfig)
    assert len(rows) == sum(
        len(fields(cls)) for schema in schemas for cls in sections_of(schema).values()
    )


def test_committed_reference_is_up_to_date() -> None:
    path = Path(__file__).parents[3] / "docs" / "configuration.md"
    assert path.read_text() == reference_markdown(), (
        "run `megarl config markdown > docs/configuration.md`"
    )
