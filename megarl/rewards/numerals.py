"""Numerals in text: find them and read them exactly, in time linear in the text.

Read: integers and decimals, thousands separators, `.5`, a sign (also the Unicode minus), a currency
sign, fractions `1/2`, exponents `1e3`. Trailing punctuation, `%` and units are ignored:
`$1,234.50.` is 1234.5. Not read, because guessing would credit wrong answers: `1,2` and `1.2.3` (no
thousands grouping), digits glued to a letter before them (`x2`), numerals of more than 100
characters, a zero denominator.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

__all__ = ["Numeral", "last_numeral", "leading_numeral", "parse_number"]

_MAX_LENGTH = 100
_MAX_EXPONENT = 100
# U+2212 minus, U+FE63 small and U+FF0D full-width hyphen, U+2013 en dash, U+2011 hyphen: written
# for a minus
_MINUS = str.maketrans(dict.fromkeys("\u2212\ufe63\uff0d\u2013\u2011", "-"))
_NUMERAL = re.compile(
    r"""
    (?:(?<![\w)\]])(?P<sign>[-+]))?                 # after a word or bracket it is an operator
    (?:\\?[$\u20ac\u00a3\u00a5](?P<inner>[-+])?)?   # currency: $5, -$5, $-5
    (?<![A-Za-z_0-9.,])(?P<run>[.,]*[0-9][0-9.,]*)  # entered at its first character only: linear
    (?:[eE](?P<exponent>[-+]?[0-9]+))?
    (?:[ ]?/[ ]?(?P<denominator>[0-9][0-9.,]*))?
    """,
    re.VERBOSE,
)
_READABLE = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?|[0-9]+(?:\.[0-9]*)?|\.[0-9]+")
# What may stand between `####` and its numeral: white space, Markdown, brackets, \boxed{
_OPENING = re.compile(r"(?:[\s*_`~(\[{:=]|\\boxed|\\[(\[])*")
# A second numeral right after the first: a sum, a list, a range or "5 or 6" is no single answer
_CONTINUES = re.compile(
    r"[ \t]*(?:(?:[-+*/x\u00d7\u00f7=^:,;&|]|or\b|and\b|to\b)[ "
    r"\t]*)*\\?[$\u20ac\u00a3\u00a5]?\.?[0-9]"
)


@dataclass(frozen=True)
class Numeral:
    """A numeral that was read."""

    value: Fraction
    text: str  # without separators, currency and trailing punctuation: "-1234.50"


def _normalise(text: str) -> str:
    """Unicode minus signs to "-"; LaTeX thousands separators `1{,}000` and `1\\,000` to a comma."""
    text = text.translate(_MINUS)
    return text.replace("{,}", ",").replace("\\,", ",").replace("\\!", "")


def _read_digits(run: str) -> str | None:
    """`run` of digits, points and commas as a plain decimal, or None if it is not one numeral."""
    if len(run) > _MAX_LENGTH:
        return None
    run = run.rstrip(".,")
    digits = run.lstrip(".,")
    if (
        run != "." + digits
    ):  # leading punctuation is of the sentence, a single point is of the number
        run = digits
    return run.replace(",", "") if _READABLE.fullmatch(run) else None


def _read(match: re.Match[str]) -> Numeral | None:
    digits = _read_digits(match["run"])
    if digits is None:
        return None
    sign = "-" if "-" in (match["sign"], match["inner"]) else ""
    text = sign + digits
    exponent = match["exponent"]
    if exponent is not None:
        if len(exponent) > 4 or abs(int(exponent)) > _MAX_EXPONENT:
            return None
        text += f"e{exponent}"
    value = Fraction(text)
    if match["denominator"] is not None:
        denominator = _read_digits(match["denominator"])
        if denominator is None or Fraction(denominator) == 0:
            return None
        text, value = f"{text}/{denominator}", value / Fraction(denominator)
    return Numeral(value, text)


def last_numeral(text: str) -> Numeral | None:
    """The last numeral of the text; None without one, or if it cannot be read."""
    match = None
    for match in _NUMERAL.finditer(_normalise(text)):  # noqa: B007
        pass
    return _read(match) if match else None


def leading_numeral(text: str) -> Numeral | None:
    """The numeral the text begins with, Markdown, brackets and `\\boxed{` aside.

    None if there is none, if it cannot be read, or if another follows directly (`1 2`, `3 + 4`, `5
    or 6`).
    """
    text = _normalise(text)
    text = text[_OPENING.match(text).end() :]  # type: ignore[union-attr]  # matches the empty string too
    match = _NUMERAL.match(text)
    if match is None:
        return None
    ends_sentence = match["denominator"] is None and match["run"].endswith(".")
    if not ends_sentence and _CONTINUES.match(text, match.end()):
        return None
    return _read(match)


def parse_number(text: str) -> Numeral | None:
    """The number that is the whole text, `%` and white space around it aside."""
    text = _normalise(text).strip().removesuffix("%")
    match = _NUMERAL.fullmatch(text)
    return _read(match) if match else None
