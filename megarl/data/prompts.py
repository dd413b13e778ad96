"""The data set in memory as tokenised prompts, and the resumable order in which steps take them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from megarl.data.chat import encode_prompt
from megarl.data.parquet import iter_prompt_rows
from megarl.data.schema import DataError, PromptRow
from megarl.types import Prompt

__all__ = ["PromptDataset", "PromptOrder"]


class PromptDataset(Sequence[Prompt]):
    """All prompts of some files, tokenised.

    `Prompt.row` counts the rows of all files in order, dropped ones included, so it names a row of
    the files whatever the limit. `num_dropped` counts the rows longer than the limit.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_prompt_tokens: int,
        overlong: Literal["drop", "error"] = "drop",
        check_ground_truth: Callable[[str], None] | None = None,
    ) -> None:
        """Read, check and tokenise.

        Args:
            max_prompt_tokens: limit of a prompt, chat template included.
            check_ground_truth: rule of the reward, raises ValueError; None: rows need no ground
                truth.

        Raises:
            DataError: a file or row breaks a rule, a row is too long with overlong="error", or none
                is left.
        """
        self.num_dropped = 0
        self._prompts: list[Prompt] = []
        number = 0
        for file in files:
            for row_in_file, row in enumerate(
                iter_prompt_rows([file], check_ground_truth=check_ground_truth)
            ):
                where = f"{file}, row {row_in_file}, column prompt"
                prompt_ids = _encode(tokenizer, row, where)
                if len(prompt_ids) <= max_prompt_tokens:
                    self._prompts.append(_make_prompt(number, prompt_ids, row))
                elif overlong == "error":
                    raise DataError(
                        f"{where}: {len(prompt_ids)} tokens are more than data.max_prompt_tokens="
                        f"{max_prompt_tokens}; raise it or use data.overlong_prompt=drop"
                    )
                else:
                    self.num_dropped += 1
                number += 1
        if not self._prompts:
            raise DataError(
                f"{', '.join(map(str, files))}: all {self.num_dropped} rows are longer than "
                f"data.max_prompt_tokens={max_prompt_tokens}; raise it"
            )

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, i: Any) -> Any:
        return self._prompts[i]

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self._prompts)


def _encode(tokenizer: PreTrainedTokenizerBase, row: PromptRow, where: str) -> list[int]:
    try:
        return encode_prompt(tokenizer, row["prompt"])
    except DataError as error:
        raise DataError(f"{where}: {error}") from None


def _make_prompt(number: int, prompt_ids: list[int], row: PromptRow) -> Prompt:
    return Prompt(
        row=number, prompt_ids=prompt_ids, messages=row["prompt"], data_source=row["data_source"],
        ground_truth=row["reward_model"]["ground_truth"], extra_info=row["extra_info"],
    )  # fmt: skip


class PromptOrder:
    """Which rows each step takes: full batches, each row once per epoch, alike on every rank.

    When an epoch ends inside a batch, the batch is filled from the next epoch with rows it does not
    hold yet; the rows passed over come right after it. So no row is twice in a batch.
    """

    def __init__(
        self, num_rows: int, prompts_per_step: int, *, shuffle: bool = True, seed: int = 0
    ) -> None:
        """Raises DataError if there are fewer rows than prompts per step."""
        if num_rows < prompts_per_step:
            raise DataError(
                f"the data has {num_rows} rows, fewer than the {prompts_per_step} a step takes; "
                f"use at most {num_rows} per step (trainer.prompts_per_step or "
                "trainer.rows_per_step) or more data"
            )
        self._identity = {
            "num_rows": num_rows,
            "prompts_per_step": prompts_per_step,
            "shuffle": shuffle,
            "seed": seed,
        }
        self._epoch = self._position = 0
        self._order: list[int] = []
        self._carried: list[int] = []
        self._start_epoch(0, [])

    @property
    def epoch(self) -> int:
        """Epoch of the next row, from 0."""
        return self._epoch

    def next_rows(self) -> list[int]:
        """The rows of the next step, `prompts_per_step` different ones."""
        size = int(self._identity["prompts_per_step"])
        rows = self._order[self._position : self._position + size]
        self._position += len(rows)
        if self._position == len(self._order):
            missing = size - len(rows)
            self._start_epoch(self._epoch + 1, rows if missing else [])
            rows = rows + self._order[:missing]
            self._position = missing
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Position after the last batch, JSON-serialisable."""
        return {
            **self._identity,
            "epoch": self._epoch,
            "position": self._position,
            "carried": list(self._carried),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batch of `state`. Raises DataError if data or settings differ."""
        for key, value in self._identity.items():
            if state.get(key) != value:
                raise DataError(
                    f"the order was saved with {key}={state.get(key)!r}, now it is {value!r}; "
                    "restore it"
                )
        self._start_epoch(state["epoch"], state["carried"])
        self._position = state["position"]

    def _start_epoch(self, epoch: int, carried: Sequence[int]) -> None:
        """Order of an epoch whose first batch already holds the rows `carried`."""
        order = list(range(int(self._identity["num_rows"])))
        if self._identity["shuffle"]:
            # A text seed is hashed by SHA-512, the same in every process.
            random.Random(f"megarl order {self._identity['seed']} {epoch}").shuffle(order)
        if carried:
            held = set(carried)
            missing = int(self._identity["prompts_per_step"]) - len(carried)
            head = [row for row in order if row not in held][:missing]
            taken = set(head)
            order = head + [row for row in order if row not in taken]
        self._epoch, self._order = epoch, order
        self._position, self._carried = 0, list(carried)
