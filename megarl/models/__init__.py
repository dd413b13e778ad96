"""Models: families, GPTModel on our process groups, weights in and out, one role's training API."""

import warnings

with warnings.catch_warnings():
    # megatron says at import, six times, that transformer-engine and apex are absent; neither is
    # used
    warnings.simplefilter("ignore")
    from megarl.models.base import LossFn, MegatronModel
from megarl.models.families import FAMILIES, model_spec
from megarl.models.optimizer import StepStats
from megarl.models.weight_layout import weight_layout

__all__ = ["FAMILIES", "LossFn", "MegatronModel", "StepStats", "model_spec", "weight_layout"]
