"""normattn: the attention score as a value that you can specify.

spec = normattn.ScoreSpec.parse("CosA-logn-YaRN", train_length=512, factor=8)
out = normattn.attention(q, k, v, spec)
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from normattn import hf as hf
    from normattn.errors import InputError, NormattnError
    from normattn.hf.engine_check import verify
    from normattn.hf.extend import extend
    from normattn.hf.load import from_pretrained
    from normattn.hf.score_of import score_of
    from normattn.layers.attention import Attention, attention
    from normattn.layers.explain import Explanation, explain
    from normattn.layers.gau import GatedAttentionUnit
    from normattn.models.causal_lm import CausalLM
    from normattn.models.config import CausalLMConfig
    from normattn.models.generation import generate
    from normattn.score.module import Score
    from normattn.score.spec import ScoreSpec

__version__ = "0.2.0"
__all__ = [
    "Attention",
    "CausalLM",
    "CausalLMConfig",
    "Explanation",
    "GatedAttentionUnit",
    "InputError",
    "NormattnError",
    "Score",
    "ScoreSpec",
    "attention",
    "explain",
    "extend",
    "from_pretrained",
    "generate",
    "score_of",
    "verify",
]

# Names are imported when first used, so that `normattn --help` need not wait for torch.
_HOMES = {
    "Attention": "layers.attention",
    "CausalLM": "models.causal_lm",
    "CausalLMConfig": "models.config",
    "Explanation": "layers.explain",
    "GatedAttentionUnit": "layers.gau",
    "InputError": "errors",
    "NormattnError": "errors",
    "Score": "score.module",
    "ScoreSpec": "score.spec",
    "attention": "layers.attention",
    "explain": "layers.explain",
    "extend": "hf.extend",
    "from_pretrained": "hf.load",
    "generate": "models.generation",
    "score_of": "hf.score_of",
    "verify": "hf.engine_check",
}

if not TYPE_CHECKING:  # a type checker that saw it would let every name pass

    def __getattr__(name: str) -> object:
        import importlib

        if name == "hf":  # so that `normattn.hf.AttentionCallback` needs no separate import
            return importlib.import_module("normattn.hf")
        if name not in _HOMES:
            raise AttributeError(f"module 'normattn' has no attribute {name!r}")
        value = getattr(importlib.import_module(f"normattn.{_HOMES[name]}"), name)
        globals()[name] = value  # from now on an ordinary attribute
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
