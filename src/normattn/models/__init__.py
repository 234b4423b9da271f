"""Whole models built from the layers: the causal language model, its costs and its files."""

from normattn.models.accounting import Flops, flops_per_token, parameter_count
from normattn.models.cache import ModelCache
from normattn.models.causal_lm import CausalLM
from normattn.models.config import CausalLMConfig
from normattn.models.generation import Answer, generate
from normattn.models.method import MethodHandle
from normattn.models.pretrained import load_model, save_model
from normattn.models.sampling import Sampling

__all__ = [
    "Answer",
    "CausalLM",
    "CausalLMConfig",
    "Flops",
    "MethodHandle",
    "ModelCache",
    "Sampling",
    "flops_per_token",
    "generate",
    "load_model",
    "parameter_count",
    "save_model",
]
