"""What holds for every score: properties over generated specifications, positions and tensors."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from normattn import InputError, Score, ScoreSpec, attention
from normattn.score import Positions
from normattn.score.part import Part, Slot, rope_frequencies
from normattn.score.registry import parts
from normattn.score.rotary import rotation

from .cases import tensors

# The run-time type checker samples items of containers by `random`.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module")
quick = settings(max_examples=30, deadline=None, derandomize=True)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "base": st.floats(1.5, 1e9),
    "factor": st.floats(1, 1e6) | st.integers(1, 64),
    "window": st.integers(1, 2**40),
    "layout": st.sampled_from(["half", "interleaved"]),
    "c": st.floats(0.1, 20),
    "b": st.floats(0.1, 1e3),
    "eps": st.just(0.0) | st.floats(1e-12, 1.0),
    "gain": st.booleans(),
    "across": st.sampled_from(["head", "all"]),
    "length": st.integers(2, 2**40),
    "beta_fast": st.floats(40, 1e3),
    "beta_slow": st.floats(1e-3, 30),
}


@st.composite
def part_values(draw: st.DrawFn, slot: Slot) -> tuple[str, dict[str, Any]]:
    """A part of that slot and some of its parameters."""
    name = draw(st.sampled_from([n for n, part in parts().items() if part.slot is slot]))
    own = [field.name for field in dataclasses.fields(parts()[name])]
    chosen = draw(st.lists(st.sampled_from(own), unique=True)) if own else []
    return name, {field: draw(FIELDS[field]) for field in chosen}


@st.composite
def specs(draw: st.DrawFn, resolved: bool = False) -> ScoreSpec:
    """A specification that makes sense, spelt in any order after its variant."""
    slots = [slot for slot in Slot if slot is Slot.VARIANT or draw(st.booleans())]
    words = []
    for slot in slots:
        name, fields = draw(part_values(slot))
        inside = ",".join(f"{k}={str(v).lower()}" for k, v in fields.items())
        words.append(f"{name}({inside})" if inside else name)
    text = "-".join([words[0], *draw(st.permutations(words[1:]))])
    length = draw(st.integers(2, 10**6) | (st.nothing() if resolved else st.none()))
    try:
        spec = ScoreSpec.parse(text, train_length=length)
    except InputError as error:
        assert "sense" in str(error) or "combined" in str(error), text  # noqa: PT017
        assume(False)
    return spec.resolve(factor=draw(st.floats(1, 64))) if resolved else spec


@quick
@given(specs())
def test_printing_and_reading_back(spec: ScoreSpec) -> None:
    again = ScoreSpec.parse(str(spec))
    assert again == spec
    assert str(again) == str(spec)
    assert hash(again) == hash(spec)
    assert "(" not in spec.name


@quick
@given(specs(resolved=True))
def test_trained_and_method_make_up_the_whole(spec: ScoreSpec) -> None:
    assert spec.resolve() == spec
    added = [part for part in spec.parts if part.when != "trained-in"]
    text = "-".join(_text(part) for part in added)
    assert spec.trained.with_method(text) == spec
    score = Score(spec.trained, 2, 8)
    score.use(spec)
    assert score.spec == spec


def _text(part: Part) -> str:
    own = dataclasses.fields(part)
    inside = ",".join(f"{field.name}={getattr(part, field.name)}" for field in own)
    return f"{part.name}({inside})" if own else part.name


def _attend(score: Score, q: Tensor, k: Tensor, v: Tensor, backend: str) -> Tensor:
    causal = not score.spec.leaks_future
    return attention(q, k, v, score.eval().double(), causal=causal, backend=backend)


causal_specs = specs(resolved=True).filter(lambda spec: not spec.leaks_future)
backends = st.sampled_from(["reference", "chunked", "auto"])


@quick
@given(causal_specs, backends, st.integers(2, 9), st.data())
def test_no_future_token_leaks(
    spec: ScoreSpec, backend: str, length: int, data: st.DataObject
) -> None:
    at = data.draw(st.integers(1, length - 1))
    q, k, v = tensors((1, 2, length, 8), (1, 1, length, 8), (1, 1, length, 8))
    score = Score(spec, 2, 8, 1)
    expected = _attend(score, q, k, v, backend)
    with torch.no_grad():
        for x in (q, k, v):
            x[:, :, at:] += 3
    torch.testing.assert_close(
        _attend(score, q, k, v, backend)[:, :, :at], expected[:, :, :at], rtol=1e-10, atol=1e-12
    )
    grads = torch.autograd.grad(_attend(score, q, k, v, backend)[:, :, :at].sum(), (q, k, v))
    assert all((grad[:, :, at:] == 0).all() for grad in grads)


@quick
@given(specs(resolved=True), backends, st.permutations(range(3)))
def test_rows_of_a_batch_do_not_see_each_other(
    spec: ScoreSpec, backend: str, order: list[int]
) -> None:
    """In evaluation, batch norms included: any order and any company gives the same row."""
    q, k, v = tensors((3, 2, 7, 8), (3, 1, 7, 8), (3, 1, 7, 8))
    score = Score(spec, 2, 8, 1)
    expected = _attend(score, q, k, v, backend)
    shuffled = _attend(score, q[order], k[order], v[order], backend)
    torch.testing.assert_close(shuffled, expected[order], rtol=1e-12, atol=1e-12)
    alone = _attend(score, q[1:2], k[1:2], v[1:2], backend)
    torch.testing.assert_close(alone, expected[1:2], rtol=1e-12, atol=1e-12)


@st.composite
def turns(draw: st.DrawFn) -> tuple[Tensor, bool]:
    """Frequencies of some specification, and its layout."""
    spec = draw(specs(resolved=True).filter(lambda spec: spec.position.rotary))
    base, layout = spec.position.base, spec.position.layout  # type: ignore[attr-defined]
    if spec.spectrum is None:
        return rope_frequencies(8, base), layout == "interleaved"
    theta = spec.spectrum.inverse_frequencies(8, base, spec.train_length)
    return theta, layout == "interleaved"


where = st.integers(0, 10**5)


@quick
@given(turns(), where, where, st.integers(-(10**5), 10**5))
def test_rotary_scores_depend_on_the_distance_only(
    turn: tuple[Tensor, bool], i: int, j: int, shift: int
) -> None:
    theta, interleaved = turn
    q, k = tensors((1, 1, 1, 8), (1, 1, 1, 8))

    def score(i: int, j: int) -> Tensor:
        at = [torch.tensor([float(n)], dtype=torch.float64) for n in (i, j)]
        left, right = (rotation(a, theta, 1.0, interleaved, torch.float64) for a in at)
        return (left(q) * right(k)).sum()

    torch.testing.assert_close(score(i, j), score(i + shift, j + shift), rtol=0, atol=1e-8)


@quick
@given(turns(), where)
def test_rotations_keep_norms_and_turn_back(turn: tuple[Tensor, bool], i: int) -> None:
    theta, interleaved = turn
    (x,) = tensors((2, 2, 3, 8))
    at = torch.arange(i, i + 3, dtype=torch.float64)
    forward = rotation(at, theta, 1.0, interleaved, torch.float64)
    back = rotation(-at, theta, 1.0, interleaved, torch.float64)
    torch.testing.assert_close(forward(x).norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(back(forward(x)), x)


@quick
@given(causal_specs.filter(lambda spec: spec.logn is None), where, backends)
def test_moving_all_positions_changes_nothing_without_log_n(
    spec: ScoreSpec, shift: int, backend: str
) -> None:
    q, k, v = tensors((1, 2, 6, 8), (1, 1, 6, 8), (1, 1, 6, 8))
    score = Score(spec, 2, 8, 1).double()
    at = torch.arange(6) + shift
    if backend == "auto":
        backend = "chunked"
    moved = attention(q, k, v, score, q_positions=at, k_positions=at, backend=backend)
    expected = attention(q, k, v, score, backend=backend)
    torch.testing.assert_close(moved, expected, rtol=1e-6, atol=1e-6)


@quick
@given(st.integers(1, 12), st.integers(0, 12), st.booleans())
def test_queries_are_the_last_of_the_keys(queries: int, more: int, padded: bool) -> None:
    keys = queries + more
    padding = (torch.arange(keys)[None] < keys // 3) if padded else None
    places = Positions.of(queries, keys, True, torch.device("cpu"), padding)
    assert torch.equal(places.query, places.key[..., more:])
    assert torch.equal(places.n, places.query + 1)
    assert places.key.max() == keys - 1 - (keys // 3 if padded else 0)
