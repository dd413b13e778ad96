"""Sources by name; one line each. `megarl prepare NAME` runs them."""

from megarl.data.prepare.arithmetic import ARITHMETIC
from megarl.data.prepare.base import Example, Source, prepare
from megarl.data.prepare.gsm8k import GSM8K
from megarl.data.prepare.mawps import MAWPS

SOURCES = {source.name: source for source in (GSM8K, MAWPS, ARITHMETIC)}

__all__ = ["SOURCES", "Example", "Source", "prepare"]
