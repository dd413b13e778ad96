"""`megarl demo-assets`: a tiny model, its tokenizer and word problems, made from nothing.

The demonstrations are deliberately unreliable: their author takes "gives away" for "gets" two times
in three. So the warm start learns to calculate and a wrong habit; only the reward can tell the
right operation.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Problem", "write_demo_assets"]

NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana")
OBJECTS = ("apples", "books", "cards", "coins", "eggs", "kites", "pens", "shells")
GAINS = ("gets", "finds", "buys")
LOSSES = ("loses", "sells", "drops")
MAX_NUMBER = 9
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '> ' + m['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


@dataclass(frozen=True)
class Problem:
    """`name` has `a` things, then gains or loses `b` of them."""

    name: str
    thing: str
    verb: str
    a: int
    b: int

    @property
    def is_loss(self) -> bool:
        return self.verb in LOSSES

    @property
    def question(self) -> str:
        return (
            f"{self.name} has {self.a} {self.thing} . "
            f"{self.name} {self.verb} {self.b} . How many now ?"
        )

    @property
    def result(self) -> int:
        return self.a - self.b if self.is_loss else self.a + self.b

    def worked(self, subtract: bool) -> str:
        """The written answer when the operation is taken to be a subtraction or not."""
        sign, result = ("-", self.a - self.b) if subtract else ("+", self.a + self.b)
        return f"{self.a} {sign} {self.b} = {result} #### {result}"


def all_problems() -> Iterator[Problem]:
    for name in NAMES:
        for thing in OBJECTS:
            for verb in GAINS + LOSSES:
                for a in range(1, MAX_NUMBER + 1):
                    for b in range(1, MAX_NUMBER + 1):
                        if verb in GAINS or b <= a:
                            yield Problem(name, thing, verb, a, b)


def write_demo_assets(output: Path, *, seed: int = 0) -> dict[str, int]:
    """Write model/, train.parquet, test.parquet and demonstrations.parquet.

    Half of each file are losses. The held-out problems are in neither of the others.

    Returns:
        The number of rows of each file.
    """
    rng = random.Random(seed)
    problems = list(all_problems())
    rng.shuffle(problems)
    gains, losses = [p for p in problems if not p.is_loss], [p for p in problems if p.is_loss]
    sizes = {"test": 100, "train": 2000, "demonstrations": 2000}
    at = 0
    for name, size in sizes.items():
        chosen = [
            p
            for pair in zip(gains[at : at + size // 2], losses[at : at + size // 2], strict=True)
            for p in pair
        ]
        at += size // 2
        unreliable = name == "demonstrations"
        rows = [
            _row(p, subtract=p.is_loss and not (unreliable and rng.random() < 2 / 3))
            for p in chosen
        ]
        _write_rows(output / f"{name}.parquet", rows, split=name)
    _write_model(output / "model", seed=seed)
    return sizes


def _row(problem: Problem, *, subtract: bool) -> dict[str, str]:
    return {
        "question": problem.question,
        "ground_truth": str(problem.result),
        "answer": problem.worked(subtract),
    }


def _write_rows(path: Path, rows: list[dict[str, str]], *, split: str) -> None:
    from megarl.data import write_prompt_rows

    path.parent.mkdir(parents=True, exist_ok=True)
    write_prompt_rows(
        path,
        (
            {
                "data_source": "megarl/demo",
                "prompt": [{"role": "user", "content": row["question"]}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": row["ground_truth"]},
                "extra_info": {"split": split, "index": i, "answer": row["answer"]},
            }
            for i, row in enumerate(rows)
        ),
    )


def _write_model(folder: Path, *, seed: int) -> None:
    """A random Llama of 0.4 million parameters and a tokenizer of whole words and whole numbers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    vocab = _write_tokenizer(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(vocab), hidden_size=128, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        tie_word_embeddings=False, initializer_range=0.05,
        bos_token_id=None, eos_token_id=vocab["<end>"], pad_token_id=vocab["<pad>"],
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def _write_tokenizer(folder: Path) -> dict[str, int]:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<unk>", "<end>", "<user>", "<system>", "<assistant>"]
    words = [
        "has",
        ".",
        "How",
        "many",
        "now",
        "?",
        "+",
        "-",
        "=",
        "####",
        *GAINS,
        *LOSSES,
        *NAMES,
        *OBJECTS,
    ]
    numbers = [str(n) for n in range(2 * MAX_NUMBER + 1)]
    vocab = {token: i for i, token in enumerate([*special, *words, *numbers])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>", eos_token="<end>",
        additional_special_tokens=["<user>", "<system>", "<assistant>"],
        chat_template=CHAT_TEMPLATE,
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": vocab["<end>"], "pad_token_id": vocab["<pad>"]}) + "\n"
    )
    return vocab
