"""megarl_kernels: operators that never materialise what they can stream. Never imports megarl."""

from megarl_kernels.linear_log_prob import linear_log_prob, linear_log_prob_reference

__all__ = ["linear_log_prob", "linear_log_prob_reference"]
