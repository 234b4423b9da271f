"""Whole models built from the layers: the causal language model, its costs and its files."""

from normattn.models.accounting import Flops, flops_per_token, parameter_count
from normattn.models.causal_lm import CausalLM
from normattn.models.config import CausalLMConfig
from normattn.models.method import MethodHandle
from normattn.models.pretrained import load_model, save_model

__all__ = [
    "CausalLM",
    "CausalLMConfig",
    "Flops",
    "MethodHandle",
    "flops_per_token",
    "load_model",
    "parameter_count",
    "save_model",
]
