"""megarl_kernels: operators that never materialise what they can stream. Never imports megarl."""

from megarl_kernels.gae import discounted_sum, gae, gae_reference
from megarl_kernels.group_stats import group_mean_std
from megarl_kernels.linear_log_prob import linear_log_prob, linear_log_prob_reference
from megarl_kernels.log_prob import log_prob_from_logits, log_prob_from_logits_reference
from megarl_kernels.whiten import whiten, whiten_reference

__all__ = [
    "discounted_sum",
    "gae",
    "gae_reference",
    "group_mean_std",
    "linear_log_prob",
    "linear_log_prob_reference",
    "log_prob_from_logits",
    "log_prob_from_logits_reference",
    "whiten",
    "whiten_reference",
]
