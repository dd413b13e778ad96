"""Carriers of the data path and weight layouts; data only, nothing that needs another package."""

from megarl.types.batch import FinishReason, Prompt, Sample, SampleGroup, TokenScores, TrainBatch
from megarl.types.layout import Box, Placement, WeightLayout

__all__ = [
    "Box", "FinishReason", "Placement", "Prompt", "Sample", "SampleGroup", "TokenScores",
    "TrainBatch", "WeightLayout",
]  # fmt: skip
