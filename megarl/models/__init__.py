"""Models: families, GPTModel on our process groups, weights in and out, and the training API of one role."""

from megarl.models.base import LossFn, MegatronModel
from megarl.models.families import FAMILIES, model_spec
from megarl.models.optimizer import StepStats
from megarl.models.weight_layout import weight_layout

__all__ = ["FAMILIES", "LossFn", "MegatronModel", "StepStats", "model_spec", "weight_layout"]
