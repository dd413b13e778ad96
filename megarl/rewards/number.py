"""Rule reward: the answer's number equals the row's ground truth, compared exactly."""

from __future__ import annotations

from typing import Literal, get_args

from megarl.config.errors import require
from megarl.rewards.base import Reward, RewardResult
from megarl.rewards.numerals import Numeral, last_numeral, leading_numeral, parse_number
from megarl.types import Prompt

__all__ = ["NumberReward"]

Method = Literal["strict", "flexible"]


class NumberReward(Reward):
    """1 for the right number, `format_reward` for a wrong one, 0 for none.

    strict: the number right after the last `####`, however long the text goes on. flexible: the
    last number of the text. What counts as a number: megarl.rewards.numerals. Values are compared
    as exact fractions, so 18, 18.0 and 36/2 are equal and 0.1 + 0.2 plays no tricks.
    """

    def __init__(self, *, method: Method = "strict", format_reward: float = 0.0) -> None:
        """Raises ConfigError for another method or a format_reward outside [0, 1)."""
        require(
            method in get_args(Method), "reward.options.method", method, "is not a valid choice",
            f"use {', '.join(get_args(Method))}",
        )  # fmt: skip
        is_share = isinstance(format_reward, int | float) and 0 <= format_reward < 1
        require(
            is_share, "reward.options.format_reward", format_reward, "must be in [0, 1)", "use 0.0"
        )
        self.method = method
        self.format_reward = float(format_reward)

    def score(self, text: str, prompt: Prompt) -> RewardResult:
        """See Reward.score. Raises ValueError only for a ground truth that is no number."""
        right = self._read_ground_truth(prompt.ground_truth)
        answer, missing = self._find(text)
        if answer is None:
            return RewardResult(reward=0.0, accuracy=0.0, parsed=None, reason=missing)
        if answer.value == right.value:
            return RewardResult(reward=1.0, accuracy=1.0, parsed=answer.text, reason="right")
        reason = f"{answer.text} is not {prompt.ground_truth}"
        return RewardResult(
            reward=self.format_reward, accuracy=0.0, parsed=answer.text, reason=reason
        )

    def check_ground_truth(self, ground_truth: str) -> None:
        self._read_ground_truth(ground_truth)

    def _find(self, text: str) -> tuple[Numeral | None, str]:
        """The answer, and what is missing when there is none."""
        if self.method == "flexible":
            return last_numeral(text), "no readable number"
        # A closing `####` with nothing behind it, as in a Markdown heading, marks no answer.
        _, marker, answer = text.rstrip("# \t\r\n").rpartition("####")
        if not marker:
            return None, "no number after ####"
        return leading_numeral(answer), "no single number right after the last ####"

    def _read_ground_truth(self, ground_truth: str) -> Numeral:
        number = parse_number(ground_truth)
        if number is None:
            raise ValueError(
                f"{ground_truth!r} is not a number, and reward number compares numbers"
            )
        return number
