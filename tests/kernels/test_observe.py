"""What an observer gets: every registered score, by every kernel, against independent formulas.

Weights are those of the naive torch formula with unit vectors as values; what they cannot tell, the
size of a logit, is compared with a double loop over the kernel's own inputs.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from normattn import InputError, Score, attention
from normattn.kernels import AttentionInputs, AttentionMask, attend, run_kernel, tiled
from normattn.kernels.residual_scores import ResidualScores
from normattn.kernels.stats import Observation, Observer, observing
from score import naive
from score.cases import (
    METHODS,
    VARIANTS,
    additions,
    built,
    documents,
    learned,
    methods,
    recipes,
    tensors,
)
from score.recipe import Recipe

from .problems import in_float64, make_inputs, outputs_and_gradients

B, H, G, T = 2, 3, 1, 9


@dataclass
class Notes(Observer):
    """Observations put together to whole rows; functions of distance, if any, are asked for."""

    asked: Tensor | None = None
    seen: list[tuple[AttentionInputs, Observation]] = field(default_factory=list)
    rows: list[tuple[slice, Tensor | None]] = field(default_factory=list)
    owners: list[object] = field(default_factory=list)

    def enter(self, owner: Any, q: Tensor, k: Tensor, padding: Any, at: Any) -> None:
        self.owners.append(owner)

    def confine(self, rows: slice, members: Tensor | None) -> None:
        self.rows.append((rows, members))

    def functions(self, inputs: AttentionInputs) -> Tensor | None:
        return self.asked

    def see(self, inputs: AttentionInputs, observation: Observation) -> None:
        self.seen.append((inputs, observation))

    def whole(self, name: str) -> Tensor:
        """A field (…, B, H, T) of all rows."""
        if not self.rows:
            one: Tensor = getattr(self.seen[0][1], name)
            return one.expand(*one.shape[:-3], B, H, T)
        whole = torch.full((), torch.nan)
        for (rows, own), (_, observation) in zip(self.rows, self.seen, strict=True):
            value = getattr(observation, name)
            value = value.expand(*value.shape[:-3], B, H, rows.stop - rows.start)
            if whole.dim() == 0:
                whole = value.new_zeros(*value.shape[:-1], T)
            kept = whole[..., rows] if own is None else whole[..., rows].clone()
            keep = torch.tensor(True) if own is None else own.reshape(-1, 1, own.shape[-1])
            whole[..., rows] = torch.where(keep, value, kept)
        return whole


def naive_weights(
    recipe: Recipe, q: Tensor, k: Tensor, names: dict[str, Tensor], **rest: Any
) -> Tensor:
    """α (B, H, T, S): outputs where values are the unit vectors."""
    keys = k.shape[2]
    unit = torch.eye(keys, dtype=q.dtype).expand(*k.shape[:2], keys, keys)
    weight: Tensor = naive.attend(recipe, q, k, unit, learned=names, **rest)
    return weight.detach()


def entropy_of(weight: Tensor) -> Tensor:
    """−Σ α ln α, what is missing to 1 being the sink's."""
    rest = (1 - weight.sum(-1, keepdim=True)).clamp(min=0.0)
    rest = torch.where(weight.sum(-1, keepdim=True) == 0, 0.0, rest)
    whole = torch.cat((weight, torch.where(rest > 1e-13, rest, 0.0)), -1)
    total: Tensor = torch.special.xlogy(whole, whole).sum(-1)
    return -total


def assert_observed(
    recipe: Recipe, causal: bool, keys: int = T, d: int = 8, kv: int = G, **options: Any
) -> None:
    if (causal and recipe.leaks) or (not causal and recipe.needs_causal):
        return
    q, k, v = (x.detach() for x in tensors((B, H, T, d), (B, kv, keys, d), (B, kv, keys, 5)))
    score = built(recipe, H, d, kv)
    words = {{"key_padding": "padding"}.get(word, word): each for word, each in options.items()}
    weight = naive_weights(recipe, q, k, learned(score), causal=causal, **words)
    expected = entropy_of(weight)
    seen = weight > 0
    asked = torch.stack((torch.arange(64) >= 4, torch.arange(64).sqrt())).double()
    for backend in ("auto", "reference"):
        plain = attention_or_none(q, k, v, score, causal, backend, options)
        if plain is None:
            continue
        notes = Notes(asked)
        with observing(notes):
            out = attention(q, k, v, score, causal, backend=backend, **options)
        where = f"{recipe.text} by {backend}"
        if backend != "auto":
            assert torch.equal(out, plain), where
        close(out, plain, where)
        assert notes.owners == [score]
        close(notes.whole("entropy"), expected, where)
        visible = notes.whole("visible").expand(B, H, T)
        assert torch.equal(visible, seen.sum(-1)), where
        at_first = first_keys(options, keys)
        close(notes.whole("first"), (weight * at_first).sum(-1), where)
        if recipe.sink:
            some = seen.any(-1)
            close(notes.whole("sink"), torch.where(some, 1 - weight.sum(-1), 0.0), where)
        else:
            assert notes.seen[0][1].sink is None
        distance = distances(options, keys)
        for number, function in enumerate(asked):
            table = function[distance.abs()]
            close(notes.whole("mean")[number], (weight * table).sum(-1), where)
            even = (seen * table).sum(-1) / seen.sum(-1).clamp(min=1)
            close(notes.whole("even")[number].expand(B, H, T), even, where)


def attention_or_none(
    q: Tensor, k: Tensor, v: Tensor, score: Any, causal: bool, backend: str, options: Any
) -> Tensor | None:
    """A kernel either serves inputs or says that it cannot."""
    try:
        out: Tensor = attention(q, k, v, score, causal, backend=backend, **options)
        return out
    except InputError as refusal:
        if "kernel cannot serve this" not in str(refusal):
            raise
        return None


def places(options: dict[str, Any], keys: int) -> Tensor:
    """The position of every key, counted by hand, (B, 1, 1, S)."""
    padding, number = options.get("key_padding"), options.get("documents")
    found = torch.zeros(B, keys, dtype=torch.int64)
    for row in range(B):
        count = 0
        for j in range(keys):
            hidden = padding is not None and bool(padding[row, j])
            if number is not None and j and number[row, j] != number[row, j - 1]:
                count = 0
            found[row, j] = count
            count += not hidden
    return found[:, None, None]


def first_keys(options: dict[str, Any], keys: int) -> Tensor:
    return places(options, keys) == 0


def distances(options: dict[str, Any], keys: int) -> Tensor:
    at = places(options, keys)
    return at[..., keys - T :].transpose(-1, -2) - at


def close(ours: Tensor, expected: Tensor, where: str) -> None:
    torch.testing.assert_close(
        ours, expected, rtol=1e-9, atol=1e-10, msg=lambda text: f"{where}: {text}"
    )


both = pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "ROWS", 4)


@both
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(variant: str, causal: bool) -> None:
    for recipe in list(recipes(variant))[3::17]:
        assert_observed(recipe, causal)


@both
@pytest.mark.parametrize("method", METHODS)
def test_methods(method: str, causal: bool) -> None:
    for recipe in list(methods(method))[1::5]:
        assert_observed(recipe, causal, keys=T + 3)


@both
def test_additions(causal: bool) -> None:
    for turn, recipe in list(enumerate(additions()))[1::8]:
        assert_observed(recipe, causal, kv=3 - 2 * (turn % 2), keys=T + 2 * (turn % 3))


@both
@pytest.mark.parametrize("padded", [False, True])
def test_documents_and_padding(causal: bool, padded: bool) -> None:
    every = [recipe for method in METHODS for recipe in methods(method)][::5]
    whole = [r for r in (*recipes("KNA"), *every, *additions()) if r.chunk is None]
    for turn, recipe in enumerate(whole):
        if turn % 37 == 3:
            number, padding = documents(B, T, padded)
            options: dict[str, Any] = {"documents": number}
            options |= {} if padding is None else {"key_padding": padding}
            assert_observed(replace(recipe, packed=True), causal, **options)
            if padding is not None and recipe.method != "DynamicNTK":
                assert_observed(recipe, causal, key_padding=padding)


ADDED = torch.randn(B, 4, 7, 9, generator=torch.Generator().manual_seed(2))
ADDED[0, :, 3] = -torch.inf
ADDED[1, 1, :, ::2] = -torch.inf
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    **{change: (change, {}) for change in ("plain", "two regimes", "bias", "cap", "sink")},
    "sliding": ("plain", {"window": 3}),
    "mask": ("plain", {"mask": ADDED}),
}


def inputs_of(kind: str, dtype: torch.dtype = torch.float64) -> AttentionInputs:
    change, seen = KINDS[kind]
    seen = {name: x.to(dtype) if name == "mask" else x for name, x in seen.items()}
    return make_inputs(7, 9, change, size=4, far_from=3, scale=3, dtype=dtype, **seen)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_types(kind: str, dtype: torch.dtype) -> None:
    """Entropy as good as the scores are: of logits up to ±10, to 2 % of ln n in half precision."""
    inputs = inputs_of(kind, dtype)
    exact, seen = in_float64(inputs), inputs.visibility
    if seen.mask is not None:
        exact = replace(exact, visibility=replace(seen, mask=seen.mask.double()))
    found = run_kernel(inputs, statistics=True).statistics
    expected = run_kernel(exact, statistics=True).statistics
    error = 1e-5 if dtype == torch.float32 else 0.05
    for name in ("entropy", "largest", "lse", "first"):
        ours, best = getattr(found, name), getattr(expected, name)
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), best, rtol=error, atol=error)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_and_dropout_are_those_of_the_unobserved_kernel(kind: str) -> None:
    results = []
    for notes in (None, Notes()):
        inputs = replace(inputs_of(kind), dropout=0.3)
        torch.manual_seed(5)
        with nullcontext() if notes is None else observing(notes):
            results.append(outputs_and_gradients(lambda p: attend(p, "chunked"), inputs))
        if notes is not None:
            assert not notes.seen[0][1].entropy.requires_grad
    for ours, plain in zip(*results, strict=True):
        assert torch.equal(ours, plain)


def test_looking_draws_no_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strips after the first, and what is drawn afterwards, are as they are unobserved."""
    monkeypatch.setattr("normattn.kernels.reference.STRIP_BYTES", 1)
    q, k, v = tensors((1, 2, T, 8), (1, 2, T, 8), (1, 2, T, 8))
    drawn, score = [], Score("Baseline-CoPE", 2, 8).double()
    for on in (False, True):
        torch.manual_seed(5)
        with observing(Notes()) if on else nullcontext():
            out = attention(q, k, v, score, dropout_p=0.3)
        drawn.append((out, torch.rand(3)))
    assert all(torch.equal(one, other) for one, other in zip(*drawn, strict=True))


@both
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("backend", ["auto", "concatenated", "reference"])
def test_residual_scores(backend: str, mean: bool, causal: bool) -> None:
    """Every layer's softmax is that of the sum of the products so far, or of their mean."""
    residual, notes, sums = ResidualScores(mean), Notes(), torch.zeros(())
    for layer in range(1, 4):
        shapes = (B, 4, 7, 4), (B, 2, 7, 4), (B, 2, 7, 3)
        q, k, v = (x.detach() for x in tensors(*shapes, seed=layer))
        sums = sums + q @ k.repeat_interleave(2, 1).mT
        inputs = replace(make_inputs(7, 7, causal=causal), q=q, k=k, v=v)
        score = sums / (layer if mean else 1)
        score = score.masked_fill(torch.ones(7, 7).triu(1).bool() & causal, -torch.inf)
        plain = torch.softmax(score, -1)
        with observing(notes):
            out = attend(replace(inputs, residual_scores=residual), backend)
        close(out, plain @ v.repeat_interleave(2, 1), backend)
        found = notes.seen[-1][1]
        for name, expected in (
            ("entropy", entropy_of(plain)),
            ("first", plain[..., 0]),
            ("largest", score.amax(-1)),
        ):
            close(getattr(found, name), expected, f"{backend}, {name}")


@pytest.mark.parametrize("keys", [0, 1])
def test_a_single_key_and_no_keys_at_all(keys: int) -> None:
    inputs = make_inputs(1, 1, batch=1, heads=1, groups=1, learned=False)
    seen = AttentionMask(False, torch.arange(1), torch.arange(keys), aligned=True)
    inputs = replace(inputs, k=inputs.k[:, :, :keys], v=inputs.v[:, :, :keys], visibility=seen)
    found = run_kernel(inputs, statistics=True).statistics
    assert found is not None
    assert (int(found.visible), float(found.entropy), float(found.first)) == (keys, 0, keys)


def test_nobody_is_told_afterwards() -> None:
    notes = Notes()
    with observing(notes), pytest.raises(ZeroDivisionError):
        raise ZeroDivisionError
    attend(inputs_of("plain"))
    assert not notes.seen
