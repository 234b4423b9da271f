"""Every score with a cache: token by token and in chunks, `attention_cached` is `attention`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from normattn import Score, attention
from normattn.layers.attention import attention_cached
from normattn.layers.cache import KeyValueCache
from score.cases import (
    METHODS,
    VARIANTS,
    additions,
    built,
    documents,
    methods,
    normalised,
    recipes,
    tensors,
)
from score.layouts import laid
from score.recipe import REGIMES, Recipe

T, D = 11, 8
# One token, chunks, and a single token again, past windows and blocks of the training length.
CHUNKS = [1, 1, 3, 1, 4, 1]


def _causal() -> Iterator[Recipe]:
    """Scores for causal attention, every part among them."""
    for turn, variant in enumerate(VARIANTS):
        yield from list(recipes(variant))[turn % 8 :: 8]
    for method in METHODS:
        every = 1 if method in (*REGIMES, "DynamicNTK") else 3
        yield from list(methods(method))[::every]
    yield from additions()
    yield from normalised()


RECIPES = [recipe for recipe in _causal() if not recipe.leaks]


def _stored(
    score: Score,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    padding: Tensor | None = None,
    places: Tensor | None = None,
    apart: Tensor | None = None,
) -> Tensor:
    """Each chunk of queries reads what the cache holds by then."""
    cache, pieces, first = KeyValueCache(), [], 0
    for size in CHUNKS:
        last = first + size
        rows, keys, values = (x[:, :, first:last] for x in (q, k, v))
        pad, at, own = (None if x is None else x[:, :last] for x in (padding, places, apart))
        pieces.append(attention_cached(rows, keys, values, score, cache, pad, at, own))
        first = last
    return torch.cat(pieces, 2)


@pytest.mark.parametrize("irregular", ["", "padding", "documents", "both"])
@torch.no_grad()
def test_every_causal_score(irregular: str) -> None:
    plain = tensors((3, 2, T, D), (3, 1, T, D), (3, 1, T, 4))
    numbers, padding = documents(3, T, padded=True)
    apart = numbers if irregular in ("documents", "both") else None
    hidden = padding if irregular in ("padding", "both") else None
    places = _places(hidden, apart) if irregular else None
    for turn, recipe in enumerate(RECIPES):
        if irregular and turn % 3:
            continue
        if apart is not None and recipe.chunk is not None:
            continue  # refused by name (tests/score/test_layouts.py): both cut a row into pieces
        score = built(replace(recipe, packed=apart is not None), 2, D, 1).eval()
        q, k, v = laid(plain, f"{recipe.text} {irregular}")
        out = _stored(score, q, k, v, hidden, places, apart)
        whole = attention(q, k, v, score, key_padding=hidden, documents=apart, backend="reference")
        if hidden is not None:
            # What a padded query reads has no meaning.
            out, whole = (x.masked_fill(hidden[:, None, :, None], 0.0) for x in (out, whole))
        _close(out, whole, score)


def _close(out: Tensor, whole: Tensor, score: Score) -> None:
    torch.testing.assert_close(
        out, whole, rtol=1e-10, atol=1e-10, msg=lambda text: f"{score.spec}: {text}"
    )


def _places(padding: Tensor | None, apart: Tensor | None) -> Tensor:
    """Positions from the first real token, and from the first of each document."""
    rows = []
    for b in range(3):
        count, row = 0, []
        for j in range(T):
            if apart is not None and j and apart[b, j] != apart[b, j - 1]:
                count = 0
            count += 0 if padding is not None and padding[b, j] else 1
            row.append(max(count - 1, 0))
        rows.append(row)
    return torch.tensor(rows)
