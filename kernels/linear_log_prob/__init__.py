"""Output projection fused with log-softmax: log-probs and entropy without a [T, V] tensor."""

from megarl_kernels.linear_log_prob.op import linear_log_prob
from megarl_kernels.linear_log_prob.reference import linear_log_prob_reference

__all__ = ["linear_log_prob", "linear_log_prob_reference"]
