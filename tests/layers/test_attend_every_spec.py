"""Every registered score, by every kernel: outputs and gradients against two independent writings.

The oracle is a double loop in numpy, the gradients are autograd's of the naive torch formula.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import normattn.layers.plan as plan_module
from normattn import InputError, ScoreSpec, attention
from normattn.kernels import (
    BACKENDS,
    AttentionInputs,
    AttentionOutput,
    attend,
    reference,
    run_kernel,
    tiled,
)
from normattn.score.parts import parts
from score import naive, oracle
from score.cases import (
    ALONE,
    BIASES,
    GROWTHS,
    LAYOUTS,
    LOGN,
    METHODS,
    NORMALISERS,
    PAIRED,
    PLACES,
    RESIDUALS,
    SHAPES,
    VARIANTS,
    additions,
    array,
    built,
    documents,
    learned,
    methods,
    normalised,
    recipes,
    tensors,
)
from score.layouts import laid
from score.recipe import REGIMES, Recipe
from thorough import few

B, H, G, T, D = 2, 2, 1, 9, 4


def test_the_cases_name_every_registered_part() -> None:
    grown = {name.partition("(")[0] for name in (*GROWTHS, *NORMALISERS, *BIASES, *PAIRED)}
    named = {*VARIANTS, *LOGN, *grown, *METHODS, *SHAPES, *ALONE, *LAYOUTS, *RESIDUALS} - {""}
    assert named | {"RoPE", "NoPE"} == set(parts())
    assert {method for _, method in PLACES} <= {*METHODS, ""}


def _gradients(out: Tensor, wanted: list[Tensor]) -> tuple[Tensor, ...]:
    weights = torch.linspace(-1.0, 1.0, out.numel(), dtype=out.dtype).reshape(out.shape)
    # A gradient need not be contiguous either.
    weights = weights.mT.contiguous().mT
    return torch.autograd.grad(out, wanted, weights, retain_graph=True)


@contextmanager
def _may_refuse() -> Iterator[None]:
    """A kernel either serves a problem or says that it cannot."""
    try:
        yield
    except InputError as refusal:
        if "kernel cannot serve this" not in str(refusal):
            raise


def _check(
    recipe: Recipe,
    causal: bool,
    looped: bool,
    kv: int = G,
    keys: int = T,
    d: int = D,
    **options: Any,
) -> None:
    """Outputs by the oracle, gradients by the naive formula, of every kernel that can serve it."""
    heads = 3 if kv == 1 else H
    # Rows of a batch differ by padding and documents, and where statistics are taken over them.
    batch = B if options or recipe.leaks else 1
    leaves = tensors((batch, heads, T, d), (batch, kv, keys, d), (batch, kv, keys, d))
    q, k, v = laid(leaves, f"{recipe.text} {causal}")
    score = built(recipe, heads, d, kv)
    names = learned(score)
    if causal and recipe.leaks:
        with pytest.raises(InputError, match="leaks the future"):
            attention(q, k, v, score, **options)
        return
    if not causal and recipe.needs_causal:
        with pytest.raises(InputError, match="causal attention only"):
            attention(q, k, v, score, causal=False, **options)
        return
    wanted = [*leaves, *names.values()]
    words = {{"key_padding": "padding"}.get(word, word): each for word, each in options.items()}
    expected = naive.attend(recipe, q, k, v, causal=causal, learned=names, **words)
    if looped:
        values = {name: array(value) for name, value in names.items()}
        arrays = {word: each.numpy() for word, each in words.items()}
        by_loop = oracle.attend(
            recipe, array(q), array(k), array(v), causal=causal, learned=values, **arrays
        )
        torch.testing.assert_close(expected.detach(), torch.from_numpy(by_loop))
    by_hand = _gradients(expected, wanted)
    posed: list[AttentionInputs] = []
    for backend in BACKENDS:
        # A kernel may be made for less than all, but these are not.
        must = backend in WHOLE
        must = must or (backend == "chunked" and not recipe.whole_rows and not recipe.normaliser)
        plain = recipe.folds and not options and keys == T and recipe.method != "DynamicNTK"
        refused = nullcontext() if must or (backend == "fused" and plain) else _may_refuse()
        out = None
        with refused:
            if backend in WHOLE or len(posed) != 1:
                with _noting(posed if backend == "auto" else []):
                    out = attention(q, k, v, score, causal, backend=backend, **options)
            else:
                # A kernel's name goes to `attend` as it is: the score poses one problem to all.
                out = attend(posed[0], backend)
        if out is None:
            continue
        where = f"{recipe.text} by {backend}"
        _close(out, expected, where)
        for ours, hand in zip(_gradients(out, wanted), by_hand, strict=True):
            _close(ours, hand, where)


WHOLE = ("auto", "strips", "reference")


@contextmanager
def _noting(posed: list[AttentionInputs]) -> Iterator[None]:
    """Keep the problems that a call of `attention` hands to the kernels."""

    def noting(problem: AttentionInputs, backend: str, lse: bool) -> AttentionOutput:
        posed.append(problem)
        return run_kernel(problem, backend, lse=lse)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "run_kernel", noting)
        yield


both = pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])


@both
@pytest.mark.parametrize("variant", VARIANTS)
def test_outputs_and_gradients(variant: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "ROWS", 4)
    monkeypatch.setattr(reference, "STRIP_BYTES", 2048)
    every = list(recipes(variant))
    if "Norm" in variant and variant != "QKNorm2020":
        # What these share is shared out among them: each third product of log-n and position.
        every = every[VARIANTS.index(variant) % 3 :: 3]
    for turn, recipe in enumerate(every):
        _check(recipe, causal, turn % 3 == 0)


@both
@pytest.mark.parametrize("method", METHODS)
def test_methods(method: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "ROWS", 4)
    monkeypatch.setattr(reference, "STRIP_BYTES", 2048)
    for recipe in methods(method):
        _check(recipe, causal, True, d=8)


@both
def test_additions(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "ROWS", 4)
    monkeypatch.setattr(reference, "STRIP_BYTES", 2048)
    for turn, recipe in enumerate(additions()):
        _check(recipe, causal, True, kv=1 + turn % 2, d=8)


@both
def test_normalisers(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "STRIP_BYTES", 2048)
    for turn, recipe in enumerate(normalised()):
        kv = 1 + turn % 2
        _check(recipe, causal, True, kv, d=8)
        keys = T if recipe.normaliser == "Selective" else T + 3
        number, padding = documents(B, keys, padded=True)
        assert padding is not None
        own = padding[:, keys - T :]
        options = {"documents": number, "key_padding": padding, "query_padding": own}
        _check(replace(recipe, packed=True), causal, True, kv, keys, 8, **options)


@both
@pytest.mark.parametrize("padded", few([False, True], bool))
def test_documents(causal: bool, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents apart, with every method and addition, left padding and fewer queries as well."""
    monkeypatch.setattr(tiled, "ROWS", 4)
    monkeypatch.setattr(reference, "STRIP_BYTES", 2048)
    every = [recipe for method in METHODS for recipe in methods(method)][::3]
    for turn, recipe in enumerate([*recipes("KNA"), *every, *additions()]):
        if turn % 4 and recipe.method not in REGIMES:
            continue
        if recipe.chunk is not None:
            continue  # refused by name (test_layouts.py): both cut a row into pieces
        keys = T + 3 * (turn % 2)
        number, padding = documents(B, keys, padded)
        options = {"documents": number}
        if padding is not None:
            options |= {"key_padding": padding, "query_padding": padding[:, keys - T :]}
        _check(replace(recipe, packed=True), causal, turn % 3 == 0, 1, keys, 8, **options)


def _close(ours: Tensor, expected: Tensor, where: str) -> None:
    same = ours.shape == expected.shape and ours.dtype == expected.dtype
    if same and torch.allclose(ours, expected, rtol=1e-9, atol=1e-10):
        return
    torch.testing.assert_close(
        ours, expected, rtol=1e-9, atol=1e-10, msg=lambda text: f"{where}: {text}"
    )


@pytest.mark.parametrize("variant", [name for name in VARIANTS if "Norm" not in name])
def test_a_bare_specification_is_enough_where_nothing_is_learned(variant: str) -> None:
    q, k, v = tensors((B, H, T, D), (B, G, T, D), (B, G, T, D))
    for recipe in recipes(variant):
        spec = ScoreSpec.parse(recipe.text)
        bare = attention(q, k, v, spec)
        assert torch.equal(bare, attention(q, k, v, recipe.text))
        assert torch.equal(bare, attention(q, k, v, built(recipe, H, D, G)))
