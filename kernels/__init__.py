"""megarl_kernels: fused log-prob and GAE kernels. Never imports megarl. Plain torch reference for now."""

from megarl_kernels.reference import log_prob_from_logits

__all__ = ["log_prob_from_logits"]
