"""Existing Hugging Face models: read past the training length, without training. Needs `[hf]`."""

from normattn.hf.extension import Extension, extend, extension_of
from normattn.hf.loading import load
from normattn.hf.pretrained import from_pretrained
from normattn.hf.resolved import Resolved
from normattn.hf.scoring import token_scorer

__all__ = [
    "Extension",
    "Resolved",
    "extend",
    "extension_of",
    "from_pretrained",
    "load",
    "token_scorer",
]
