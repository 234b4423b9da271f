"""Recipes to try, tensors for them, and what a `Score` has learned in the oracle's words."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from normattn import Score, ScoreSpec

from . import oracle
from .oracle import Recipe

VARIANTS = (
    *("Baseline", "QNA", "KNA", "CosA", "QKNorm2020"),
    *("QKLayerNorm", "QLayerNorm", "KLayerNorm", "QKRMSNorm", "QRMSNorm", "KRMSNorm"),
    *("QKBatchNorm", "QBatchNorm", "KBatchNorm"),
    *("QKInstanceNorm", "QInstanceNorm", "KInstanceNorm"),
)
LOGN = ("", "logn", "logn+")
PLACES = (
    ("half", ""),
    ("interleaved", ""),
    ("none", ""),
    ("half", "PI"),
    ("half", "ABF"),
    ("half", "NTK"),
    ("interleaved", "NTKMixed"),
    ("half", "YaRN"),
    ("interleaved", "YaRN"),
    ("half", "ReRoPE"),
    ("interleaved", "ReRoPE"),
)
_WORDS = {"query_norm": "Q", "key_norm": "K", "weight": "gain", "bias": "bias"}


def recipes(variant: str) -> Iterator[Recipe]:
    """Every score that can be made with `variant`, gains on and off in turn."""
    for turn, (logn, (position, method)) in enumerate(itertools.product(LOGN, PLACES)):
        recipe = Recipe(
            variant,
            logn,
            position,
            method,
            gain=turn % 2 == 0,
            across="all" if turn % 3 == 0 else "head",
        )
        if not (recipe.leaks and method == "ReRoPE"):
            yield recipe


def tensors(
    *shapes: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Normal tensors that want gradients."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [x.to(dtype).requires_grad_() for x in made]


def array(x: Tensor) -> oracle.Array:
    """A float64 numpy copy."""
    return np.array(x.detach().double().numpy())


def built(recipe: Recipe, heads: int, d: int, kv_heads: int | None = None) -> Score:
    """The float64 score of a recipe, what it learns drawn at random."""
    score = Score(ScoreSpec.parse(recipe.text), heads, d, kv_heads).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in score.parameters():
            noise = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise + 0.5)
    return score


def learned(score: Score) -> dict[str, Tensor]:
    """The score's parameters under the oracle's names: Q.gain, K.bias, scale."""
    return {
        ".".join(_WORDS.get(word, word) for word in name.split(".")): parameter
        for name, parameter in score.named_parameters()
    }
