"""Prompt files, tokenisation, order, balancing, packing: from a Parquet file to a TrainBatch."""

from megarl.data.balance import karmarkar_karp, sequence_cost
from megarl.data.chat import encode_prompt, load_tokenizer
from megarl.data.packing import Assignment, assign, pack
from megarl.data.parquet import iter_prompt_rows, write_prompt_rows
from megarl.data.prompts import PromptDataset, PromptOrder
from megarl.data.schema import DataError, PromptRow

__all__ = [
    "Assignment",
    "DataError",
    "PromptDataset",
    "PromptOrder",
    "PromptRow",
    "assign",
    "encode_prompt",
    "iter_prompt_rows",
    "karmarkar_karp",
    "load_tokenizer",
    "pack",
    "sequence_cost",
    "write_prompt_rows",
]
