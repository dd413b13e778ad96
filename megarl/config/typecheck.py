"""Does a YAML value fit the type of a field? Pure functions over type hints.

The only conversion is an integer where a number with decimals is expected.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from math import isfinite
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

__all__ = ["choices_of", "coerce", "describe_type", "did_you_mean"]

_NAMES: dict[object, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
}


def _members(hint: object) -> tuple[object, ...]:
    """Alternatives of a union; the hint itself when it is none."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def choices_of(hint: object) -> tuple[str, ...]:
    """Valid values of a Literal (also inside a union); empty for other types."""
    return tuple(str(c) for m in _members(hint) if get_origin(m) is Literal for c in get_args(m))


def describe_type(hint: object) -> str:
    """`int | None` -> "an integer or null"."""
    parts = []
    for member in _members(hint):
        if member is NoneType:
            parts.append("null")
        elif get_origin(member) is Literal:
            parts.append("one of " + ", ".join(map(str, get_args(member))))
        elif get_origin(member) is list:
            item = get_args(member)[0]
            parts.append(f"a list of {'integers' if item is int else 'texts'}")
        elif get_origin(member) is dict:
            parts.append("a mapping")
        else:
            parts.append(_NAMES[member])
    return " or ".join(parts)


def coerce(value: object, hint: object) -> Any:
    """`value` as the type `hint`.

    Raises:
        TypeError: it does not fit; the message is empty, the caller knows key and expectation.
    """
    for member in _members(hint):
        try:
            return _coerce_one(value, member)
        except TypeError:
            continue
    raise TypeError


def _coerce_one(value: object, hint: object) -> Any:
    if get_origin(hint) is Literal:
        if isinstance(value, str) and value in get_args(hint):
            return value
    elif get_origin(hint) is list:
        if isinstance(value, list):
            return [coerce(item, get_args(hint)[0]) for item in value]
    elif get_origin(hint) is dict:
        if isinstance(value, dict) and all(isinstance(k, str) for k in value):
            return dict(value)
    elif hint is float:
        if type(value) in (int, float) and isfinite(value):  # type: ignore[arg-type]
            return float(value)  # type: ignore[arg-type]
    elif isinstance(hint, type) and type(value) is hint:  # `type is`: a bool is not an integer here
        return value
    raise TypeError


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """` (did you mean X?)` for the candidate of closest spelling, else an empty string."""
    close = difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""
