"""A prompt row in verl's schema, to be changed."""

from __future__ import annotations

from typing import Any


def make_row(content: str = "a b", truth: object = "3", **changes: Any) -> dict[str, Any]:
    return {
        "data_source": "test",
        "prompt": [{"role": "user", "content": content}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"index": 0, "answer": "3"},
        **changes,
    }
