"""Models, text generation, FLOPs, and saved models.

Sizes in shapes: B batch, T tokens, S source tokens or all tokens of a cache, D width, V vocabulary,
K classes or labels, M targets of a row, N layers.
"""

from normattn.models.beam_search import Hypothesis, beam_search
from normattn.models.cache import ModelCache
from normattn.models.causal_lm import CausalLM
from normattn.models.config import CausalLMConfig, MaskedLMConfig, TranslatorConfig
from normattn.models.flops import Flops, flops_per_token, parameter_count
from normattn.models.generation import Answer, Sampling, generate
from normattn.models.masked_lm import MaskedLM
from normattn.models.pretrained import load_model, save_model
from normattn.models.translator import Translator
from normattn.models.utils import MethodHandle

__all__ = [
    "Answer",
    "CausalLM",
    "CausalLMConfig",
    "Flops",
    "Hypothesis",
    "MaskedLM",
    "MaskedLMConfig",
    "MethodHandle",
    "ModelCache",
    "Sampling",
    "Translator",
    "TranslatorConfig",
    "beam_search",
    "flops_per_token",
    "generate",
    "load_model",
    "parameter_count",
    "save_model",
]
