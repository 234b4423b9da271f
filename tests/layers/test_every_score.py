"""Every registered score, by every kernel: outputs and gradients against the oracle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from layers.written_out import assert_every_kernel_agrees
from normattn import InputError, attention
from normattn.kernels import reference, tiled
from normattn.score.parts import parts
from score import cases, oracle
from score.cases import METHODS, VARIANTS, built, documents, laid, learned, tensors
from score.recipe import REGIMES, Recipe
from thorough import few

B, H, G, T, D = 2, 2, 1, 9, 4
WHOLE = ("auto", "strips", "reference")
both = pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "ROWS", 4)
    monkeypatch.setattr(reference, "STRIP_BYTES", 2048)


def test_the_cases_name_every_registered_part() -> None:
    several = (*cases.GROWTHS, *cases.NORMALISERS, *cases.BIASES, *cases.PAIRED)
    named = {name.partition("(")[0] for name in several}
    named |= {*VARIANTS, *cases.LOGN, *METHODS, *cases.SHAPES, *cases.ALONE, *cases.LAYOUTS}
    assert (named | {*cases.RESIDUALS}) - {""} | {"RoPE", "NoPE"} == set(parts())
    assert {method for _, method in cases.PLACES} <= {*METHODS, ""}


def assert_is_the_oracles(
    recipe: Recipe, causal: bool, kv: int = G, keys: int = T, d: int = D, **options: Any
) -> None:
    """Outputs and gradients of every kernel that can compute it are the oracle's."""
    heads = 3 if kv == 1 else H
    # Rows of a batch differ by padding and documents, and where statistics are taken over them.
    batch = B if options or recipe.leaks else 1
    leaves = tensors((batch, heads, T, d), (batch, kv, keys, d), (batch, kv, keys, d))
    q, k, v = laid(leaves, f"{recipe.text} {causal}")
    score = built(recipe, heads, d, kv)
    refusal = "leaks the future" if causal and recipe.leaks else ""
    refusal = "causal attention only" if not causal and recipe.needs_causal else refusal
    if refusal:
        with pytest.raises(InputError, match=refusal):
            attention(q, k, v, score, causal, **options)
        return
    names = learned(score)
    wanted = [*leaves, *names.values()]
    words = {{"key_padding": "padding"}.get(word, word): each for word, each in options.items()}
    expected = oracle.attend(recipe, q, k, v, causal=causal, learned=names, **words)
    plain = recipe.folds and not options and keys == T and recipe.method != "DynamicNTK"
    must = [*WHOLE, *(["fused"] if plain else [])]
    must += [] if recipe.whole_rows or recipe.normaliser else ["chunked"]
    run = partial(attention, q, k, v, score, causal, **options)
    assert_every_kernel_agrees(run, expected, wanted, must, where=recipe.text)


def in_turn(recipes: Iterable[Recipe], causal: bool) -> Iterator[tuple[int, Recipe]]:
    """Those of one direction, and the others in one of the two directions each, in turn."""
    for turn, recipe in enumerate(recipes):
        if recipe.leaks or recipe.needs_causal or causal == (turn % 2 == 0):
            yield turn // 2, recipe


@both
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(variant: str, causal: bool) -> None:
    # Products of log-n and position are shared out: those with a norm take each third of them.
    share = 3 if "Norm" in variant and variant != "QKNorm2020" else 2
    every = [*cases.recipes(variant)][VARIANTS.index(variant) % share :: share]
    for _, recipe in in_turn(every, causal):
        assert_is_the_oracles(recipe, causal)


@both
@pytest.mark.parametrize("method", METHODS)
def test_methods(method: str, causal: bool) -> None:
    for _, recipe in in_turn(cases.methods(method), causal):
        assert_is_the_oracles(recipe, causal, d=8)


@both
def test_additions(causal: bool) -> None:
    for turn, recipe in in_turn(cases.additions(), causal):
        assert_is_the_oracles(recipe, causal, kv=1 + turn % 2, d=8)


def assert_documents(recipe: Recipe, causal: bool, keys: int, padded: bool, kv: int = 1) -> None:
    """The recipe over documents, padded on the left or not, by the last T of the keys."""
    number, padding = documents(B, keys, padded)
    options = {"documents": number}
    if padding is not None:
        options |= {"key_padding": padding, "query_padding": padding[:, keys - T :]}
    assert_is_the_oracles(replace(recipe, packed=True), causal, kv, keys, 8, **options)


@both
def test_normalisers(causal: bool) -> None:
    for turn, recipe in in_turn(cases.normalised(), causal):
        kv, keys = 1 + turn % 2, T if recipe.normaliser == "Selective" else T + 3
        assert_is_the_oracles(recipe, causal, kv, d=8)
        assert_documents(recipe, causal, keys, padded=True, kv=kv)


@both
@pytest.mark.parametrize("padded", few([False, True], bool))
def test_documents(causal: bool, padded: bool) -> None:
    """Documents apart, with every method and addition, left padding and fewer queries as well."""
    every: Iterable[Recipe] = [x for method in METHODS for x in cases.methods(method)][::3]
    for turn, recipe in in_turn([*cases.recipes("KNA"), *every, *cases.additions()], causal):
        # Chunks are refused by name (test_spec.py): both cut a row into pieces.
        if recipe.chunk is None and turn % (2 if recipe.method in REGIMES else 3) == 0:
            assert_documents(recipe, causal, T + 3 * (turn % 2), padded)
