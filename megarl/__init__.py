"""megarl: reinforcement learning for language models, as one torchrun SPMD program."""

__version__ = "0.1.0"
