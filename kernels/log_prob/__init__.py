"""Log-probs and entropy from logits; the primitives that linear_log_prob runs on its chunks."""

from megarl_kernels.log_prob.op import log_prob_from_logits
from megarl_kernels.log_prob.reference import log_prob_from_logits_reference

__all__ = ["log_prob_from_logits", "log_prob_from_logits_reference"]
