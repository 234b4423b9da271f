"""Extend transformers models, and use normattn's models in transformers. Needs `[hf]`.

Importing this registers normattn's models with transformers' Auto classes, if it is installed.
"""

from importlib.util import find_spec
from typing import Any

from normattn.errors import InputError
from normattn.hf.extend import Extension, extend, extension_of
from normattn.hf.llama import from_llama, to_llama
from normattn.hf.load import from_pretrained, load
from normattn.hf.plan import Resolved
from normattn.hf.score_of import score_of
from normattn.hf.token_scorer import token_scorer

if find_spec("transformers") is not None:
    from normattn.hf.modeling_normattn import register, wrap

    register()

__all__ = [
    "AttentionCallback",
    "Extension",
    "Resolved",
    "extend",
    "extension_of",
    "from_llama",
    "from_pretrained",
    "load",
    "register",
    "score_of",
    "to_llama",
    "token_scorer",
    "wrap",
]


def __getattr__(name: str) -> Any:
    if name == "AttentionCallback" and find_spec("transformers") is not None:
        # Its base class in transformers is slow to import.
        from normattn.hf.callback import AttentionCallback

        return AttentionCallback
    if name in __all__:
        raise InputError(f"normattn.hf.{name} needs transformers: pip install normattn[hf]")
    raise AttributeError(f"module 'normattn.hf' has no attribute {name!r}")
