"""The reference of all settings, from the schema: key, type, default, string under the field."""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import MISSING, fields
from typing import Any, get_type_hints

from megarl.config.load import sections_of
from megarl.config.schema import SftConfig, TrainConfig
from megarl.config.typecheck import describe_type

__all__ = ["field_docs", "reference_markdown", "reference_text"]


def field_docs(cls: type) -> dict[str, str]:
    """{field: the string literal under it in the source}."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef), "the source of a class"
    docs = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
        ):
            docs[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return docs


def _doc(cls: type) -> str:
    return " ".join((cls.__doc__ or "").split())


def _rows(cls: type[Any]) -> list[tuple[str, str, str, str]]:
    """(name, type, default, meaning) of each field."""
    hints, docs = get_type_hints(cls), field_docs(cls)
    rows = []
    for f in fields(cls):
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        rows.append((f.name, describe_type(hints[f.name]), _yaml(default), docs[f.name]))
    return rows


def _yaml(value: object) -> str:
    """A default as it is written in YAML."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return '""' if value == "" else str(value)


def reference_text(schema: type[TrainConfig] | type[SftConfig]) -> str:
    """Every key for a terminal."""
    lines: list[str] = []
    for section, cls in sections_of(schema).items():
        lines += [f"{section}: {_doc(cls)}"]
        for name, kind, default, doc in _rows(cls):
            lines += [f"  {section}.{name}={default}  ({kind})"]
            lines += textwrap.wrap(doc, 100, initial_indent="      ", subsequent_indent="      ")
        lines += [""]
    return "\n".join(lines)


def reference_markdown() -> str:
    """docs/configuration.md: both commands, one table per section."""
    lines = [
        "# Configuration reference", "",
        "Generated from `megarl/config/schema.py`; do not edit. A YAML file holds what differs "
        "from these",
        "defaults; `section.key=value` on the command line wins over the file. `megarl train "
        "CONFIG.yaml --check`",
        "checks a file without running it.", "",
    ]  # fmt: skip
    for command, schema in (("train", TrainConfig), ("sft", SftConfig)):
        lines += [f"## megarl {command}", ""]
        for section, cls in sections_of(schema).items():
            lines += [f"### {section}", "", _doc(cls), ""]
            lines += ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
            for row in _rows(cls):
                name, kind, default, doc = (cell.replace("|", "\\|") for cell in row)
                lines.append(f"| `{section}.{name}` | {kind} | `{default}` | {doc} |")
            lines.append("")
    return "\n".join(lines)
