"""Policy losses per token, by name. `SELECTIONS` names those that first choose tokens on the whole
minibatch.
"""

from collections.abc import Callable

import torch

from megarl.algorithms.policy_losses.base import LossInputs, LossSettings, TokenLoss
from megarl.algorithms.policy_losses.clipped import geo_mean, gspo, ppo_clip, sapo
from megarl.algorithms.policy_losses.covariance import (
    clip_cov,
    kl_cov,
    select_clip_cov,
    select_kl_cov,
)
from megarl.algorithms.policy_losses.objective import weighted_loss
from megarl.algorithms.policy_losses.weighted import cispo, dppo_kl, dppo_tv, dro, reinforce

__all__ = [
    "POLICY_LOSSES",
    "SELECTIONS",
    "LossInputs",
    "LossSettings",
    "TokenLoss",
    "weighted_loss",
]

POLICY_LOSSES: dict[str, Callable[[LossInputs, LossSettings], TokenLoss]] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "sapo": sapo,
    "geo_mean": geo_mean,
    "cispo": cispo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "dro": dro,
    "reinforce": reinforce,
    "gpg": reinforce,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}
SELECTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "clip_cov": select_clip_cov,
    "kl_cov": select_kl_cov,
}
