"""One shape for every complaint about a setting: key, value, rule, remedy."""

from __future__ import annotations

__all__ = ["ConfigError", "require", "require_positive", "require_range"]


class ConfigError(ValueError):
    """A setting that cannot work, said by key, value, rule and remedy; the CLI exits with 2."""


def require(condition: bool, key: str, value: object, rule: str, remedy: str) -> None:
    """Raise ConfigError `key=value rule; remedy` unless `condition` holds."""
    if not condition:
        raise ConfigError(f"{key}={value!r} {rule}; {remedy}")


def require_positive(key: str, value: float) -> None:
    require(value > 0, key, value, "must be > 0", "use a positive number")


def require_range(
    key: str, value: float, low: float, high: float, *, open_low: bool = False
) -> None:
    """low <= value <= high; with `open_low`, low < value."""
    inside = (low < value if open_low else low <= value) and value <= high
    bracket = "(" if open_low else "["
    require(inside, key, value, f"must be in {bracket}{low}, {high}]", "use a number in that range")
