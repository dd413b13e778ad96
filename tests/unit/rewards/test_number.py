from __future__ import annotations

import time

import pytest

from megarl.config import ConfigError
from megarl.config.choices import REWARD_OPTIONS
from megarl.config.choices import REWARDS as REWARD_NAMES
from megarl.rewards import REWARDS, NumberReward, create_reward, reward_options
from megarl.rewards.number import Method
from megarl.types import Prompt


def prompt(ground_truth: str) -> Prompt:
    return Prompt(row=0, prompt_ids=[1], messages=[], data_source="x", ground_truth=ground_truth)


def is_right(method: Method, text: str, truth: str) -> bool:
    result = NumberReward(method=method).score(text, prompt(truth))
    assert result.reward == result.accuracy
    return result.accuracy == 1.0


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        ("#### 18", "18"),
        ("#### 18.", "18"),
        ("#### 18.00", "18"),
        ("#### 18", "18.0"),
        ("#### 72\n" + "x" * 1000, "72"),
        ("#### 5\n#### 6", "6"),
        ("#### **18**", "18"),
        ("#### __18__", "18"),
        ("#### 3 apples", "3"),
        ("####18", "18"),
        ("####\n18", "18"),
        ("#### -1,234.50", "-1234.5"),
        ("#### $1,234", "1234"),
        ("#### -$5", "-5"),
        ("#### $-5", "-5"),
        ("#### \\$5", "5"),
        ("#### 50%", "50"),
        ("#### .5", "0.5"),
        ("#### \u22125", "-5"),
        ("#### +5", "5"),
        ("#### 1/2", "0.5"),
        ("#### 36/2", "18"),
        ("#### 1e3", "1000"),
        ("#### 1{,}234", "1234"),
        ("#### \\boxed{18}", "18"),
        ("#### 18 (that is 6 * 3)", "18"),
        ("#### 18. 3 are left over", "18"),
        ("#### 5 ####", "5"),
        ("\0\0 #### 7\0", "7"),
        ("#### 0.30", "0.3"),
        ("#### 123456789012345678901", "123456789012345678901"),
    ],
)
def test_strict_credits_the_right_number(text: str, truth: str) -> None:
    assert is_right("strict", text, truth)


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        ("18", "18"),
        ("The answer is 18.", "18"),
        ("#### 5\n#### 6", "5"),
        ("#### 5\n#### none", "5"),
        ("#### the answer is 5", "5"),
        ("#### 1 2", "12"),
        ("#### 1 2", "1"),
        ("#### 1,2", "12"),
        ("#### 1,2", "1"),
        ("#### 1.2.3", "1.2"),
        ("#### 5 or 6", "5"),
        ("#### 5, 6", "5"),
        ("#### 3 + 4", "3"),
        ("#### 3 x 4", "3"),
        ("#### 10:30", "10"),
        ("#### 1/2", "1"),
        ("#### 1/0", "1"),
        ("#### 1e5", "1"),
        ("#### - 5", "5"),
        ("#### -5", "5"),
        ("#### 18.01", "18"),
        ("#### x5", "5"),
        ("#### 123456789012345678902", "123456789012345678901"),
        ("### 18", "18"),
        ("####", "0"),
        ("", "0"),
    ],
)
def test_strict_gives_no_credit_for_what_is_not_the_answer(text: str, truth: str) -> None:
    assert not is_right("strict", text, truth)


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        ("The answer is 5, ok,", "5"),
        ("the answer is **18**.", "18"),
        ("She has 3 + 4 = 7 eggs left.", "7"),
        ("It costs $1,234.50!", "1234.5"),
        ("x = -5", "-5"),
        ("10-5", "5"),
        ("from 5\u20137", "7"),
        ("5kg", "5"),
        ("...5...", "5"),
        ("#### 18", "18"),
        ("\u7b54\u6848\u662f5\u4e2a", "5"),
        ("2\n" + "y" * 1000, "2"),
    ],
)
def test_flexible_reads_the_last_number(text: str, truth: str) -> None:
    assert is_right("flexible", text, truth)


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        ("7 then 8", "7"),
        ("CO2", "2"),
        ("v1.2.3", "3"),
        ("1,2", "12"),
        ("no number", "0"),
        (".", "0"),
    ],
)
def test_flexible_gives_no_credit_for_other_digits(text: str, truth: str) -> None:
    assert not is_right("flexible", text, truth)


@pytest.mark.parametrize("method", ["strict", "flexible"])
@pytest.mark.parametrize(
    "text",
    [
        "1 " * 500_000,
        "9" * 1_000_000,
        "." * 1_000_000,
        "-$" * 500_000,
        "#" * 1_000_000,
        "\0" * 1_000_000,
        "#### " + "9" * 1_000_000,
        "#### " + "." * 1_000_000,
        "#### 1e" + "9" * 1_000_000,
        "#### 1/" + "9" * 1_000_000,
        "#### " + "*" * 1_000_000,
        "#### 5 " + "+ " * 500_000,
    ],
    ids=lambda text: repr(text[:8]),
)
def test_a_megabyte_of_anything_is_scored_in_bounded_time(method: Method, text: str) -> None:
    start = time.perf_counter()
    NumberReward(method=method).score(text, prompt("7"))
    # Linear scanning takes well under a second; the quadratic alternative takes hours.
    assert time.perf_counter() - start < 10


def test_result_says_what_was_parsed_and_why() -> None:
    reward = NumberReward(method="strict", format_reward=0.1)
    right = reward.score("#### $1,234.50.", prompt("1234.5"))
    assert (right.reward, right.accuracy, right.parsed, right.reason) == (
        1.0,
        1.0,
        "1234.50",
        "right",
    )
    wrong = reward.score("#### 3", prompt("4"))
    assert (wrong.reward, wrong.accuracy, wrong.parsed, wrong.reason) == (
        0.1,
        0.0,
        "3",
        "3 is not 4",
    )
    none = reward.score("3", prompt("4"))
    assert (none.reward, none.accuracy, none.parsed, none.reason) == (
        0.0,
        0.0,
        None,
        "no number after ####",
    )


@pytest.mark.parametrize("truth", ["18", "-1,234.5", " 7 ", "$5", "1/2", "50%"])
def test_number_is_accepted_as_ground_truth(truth: str) -> None:
    NumberReward().check_ground_truth(truth)


@pytest.mark.parametrize(
    "truth", ["", "abc", "5 apples", "1 2", "#### 5", "1,2", "nan", "\\boxed{5}"]
)
def test_other_ground_truth_is_refused(truth: str) -> None:
    with pytest.raises(ValueError, match="is not a number, and reward number compares numbers"):
        NumberReward().check_ground_truth(truth)


def test_unknown_option_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError) as error:
        create_reward("number", {"methd": "strict"})
    assert str(error.value) == (
        "unknown key reward.options.methd (did you mean method?); valid options of number: method, "
        "format_reward"
    )


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nmber", {}, "reward.name='nmber' is not a known name (did you mean number?); use number"),
        (
            "number",
            {"method": "loose"},
            "reward.options.method='loose' is not a valid choice; use strict, flexible",
        ),
        (
            "number",
            {"format_reward": 1},
            "reward.options.format_reward=1 must be in [0, 1); use 0.0",
        ),
        (
            "number",
            {"format_reward": "x"},
            "reward.options.format_reward='x' must be in [0, 1); use 0.0",
        ),
    ],
)
def test_bad_reward_settings_are_refused(
    name: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        create_reward(name, options)
    assert str(error.value) == message


def test_names_and_options_known_to_the_config_are_those_of_the_registry() -> None:
    assert tuple(REWARDS) == REWARD_NAMES
    assert {name: reward_options(name) for name in REWARDS} == {
        n: list(o) for n, o in REWARD_OPTIONS.items()
    }


@pytest.mark.parametrize("name", REWARDS)
def test_every_reward_scores_empty_text_without_credit(name: str) -> None:
    result = create_reward(name, {}).score("", prompt("1"))
    assert (result.reward, result.accuracy, result.parsed) == (0.0, 0.0, None)
    assert result.reason
