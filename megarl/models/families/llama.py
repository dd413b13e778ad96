"""Llama 2 and 3, SmolLM2, and every other checkpoint that names LlamaForCausalLM."""

from __future__ import annotations

from megarl.models.families.base import Family

__all__ = ["LLAMA"]

LLAMA = Family(architecture="LlamaForCausalLM")
