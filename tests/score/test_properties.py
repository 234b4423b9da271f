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
from normattn.layers.residual_scores import residual_layers
from normattn.score import Positions
from normattn.score.parts import PairBiasPart, Part, Slot, parts, rope_frequencies
from normattn.score.rotary import Rotator

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
    "across": st.sampled_from(["head", "all", "each"]),
    "length": st.integers(2, 2**40),
    "beta_fast": st.floats(40, 1e3),
    "beta_slow": st.floats(1e-3, 30),
    "s": st.floats(1, 1e6),
    "group": st.integers(1, 2**40),
    "sinks": st.integers(0, 2**20),
    "gamma": st.floats(0.1, 10),
    "scale": st.floats(100, 1e6),
    "fraction": st.floats(0.01, 1),
    "side": st.sampled_from(["first", "last"]),
    "direction": st.sampled_from(["forward", "backward"]),
    "low": st.floats(0.1, 1),
    "high": st.floats(1.5, 100),
    "factors": st.lists(st.floats(0.5, 100), min_size=4, max_size=4).map(tuple),
    "cap": st.floats(0.1, 1e3),
    "separator": st.integers(0, 2**20),
    "every": st.integers(2, 9),
    "running_mean": st.booleans(),
    "beta": st.floats(0, 2),
    "shift": st.integers(0, 1),
    "bias": st.booleans(),
    "clip": st.integers(0, 2**20),
    "truncate": st.booleans(),
    "sharpness": st.floats(0, 1),
    "stretch": st.floats(1, 100),
    "stretched": st.booleans(),
    "size": st.integers(1, 2**40),
    "per": st.sampled_from(["feature", "head"]),
    "act": st.sampled_from(["sigmoid", "softplus"]),
    "tokens": st.integers(1, 2**40),
    "current": st.booleans(),
    "threshold": st.integers(1, 2**40),
    "width": st.integers(1, 64),
    "local": st.integers(1, 64),
    "positions": st.integers(2, 64),
    "init": st.floats(0, 0.99),
}


@st.composite
def part_values(draw: st.DrawFn, slot: Slot) -> tuple[str, dict[str, Any]]:
    """A part of that slot and some of its parameters."""
    name = draw(st.sampled_from([n for n, part in parts().items() if part.slot is slot]))
    own = [field.name for field in dataclasses.fields(parts()[name])]
    chosen = draw(st.lists(st.sampled_from(own), unique=True)) if own else []
    own_scale = {"scale": st.floats(0.05, 2)} if slot is Slot.VARIANT else {}
    return name, {field: draw({**FIELDS, **own_scale}[field]) for field in chosen}


def _written(value: Any) -> str:
    return ":".join(map(str, value)) if isinstance(value, tuple) else str(value).lower()


@st.composite
def specs(draw: st.DrawFn, resolved: bool = False, layer: bool = False) -> ScoreSpec:
    """A specification that makes sense, spelt in any order after its variant.

    With `layer` that of one layer, over one document.
    """
    # Few at a time: the more there are, the likelier one refuses another.
    others = [slot for slot in Slot if slot is not Slot.VARIANT]
    if layer:
        others = [slot for slot in others if slot not in (Slot.LAYOUT, Slot.DOCUMENTS)]
    chosen = draw(st.lists(st.sampled_from(others), max_size=4, unique=True))
    slots = [slot for slot in Slot if slot is Slot.VARIANT or slot in chosen]
    words = []
    for slot in slots:
        name, fields = draw(part_values(slot))
        inside = ",".join(f"{k}={_written(v)}" for k, v in fields.items())
        words.append(f"{name}({inside})" if inside else name)
    text = "-".join([words[0], *draw(st.permutations(words[1:]))])
    length = draw(st.integers(2, 10**6) | (st.nothing() if resolved else st.none()))
    try:
        spec = ScoreSpec.parse(text, train_length=length)
    except InputError as error:
        assert "sense" in str(error) or "combined" in str(error), text  # noqa: PT017
        assume(False)
    if not resolved:
        return spec
    try:
        return spec.resolve(factor=draw(st.floats(1, 64)))
    except InputError as error:
        # A window as long as L leaves nothing for the factor to decide.
        assert "needs s=" in str(error) or "needs group=" in str(error), text  # noqa: PT017
        assume(False)
        raise


@quick
@given(specs())
def test_printing_and_reading_back(spec: ScoreSpec) -> None:
    again = ScoreSpec.parse(str(spec))
    assert again == spec
    assert str(again) == str(spec)
    assert hash(again) == hash(spec)
    assert "(" not in spec.name


@quick
@given(specs(resolved=True, layer=True))
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
    given = {field.name: getattr(part, field.name) for field in own}
    inside = ",".join(f"{k}={_written(v)}" for k, v in given.items() if v is not None)
    return f"{part.name}({inside})" if own else part.name


def _attend(score: Score, q: Tensor, k: Tensor, v: Tensor, backend: str, **options: Any) -> Tensor:
    """The second of two equal layers where scores are summed, else the only one."""
    spec, residual = score.eval().double().spec, residual_layers(score.spec, 2)
    options["causal"] = not spec.leaks_future
    # What layers make of their input, made of queries and keys here.
    if spec.forgets:
        options["forget"] = k.mean((1, 3))[..., None].expand(-1, -1, q.shape[1])
    if spec.gate is not None:
        per_head = spec.gate.per == "head"
        wide = q.mean(-1, keepdim=True) if per_head else q[..., :1].expand(-1, -1, -1, v.shape[-1])
        options["gate"] = wide.transpose(1, 2).flatten(2)
    whole_rows = spec.normaliser is not None or spec.selection is not None
    whole_rows = whole_rows or isinstance(spec.bias, PairBiasPart)
    if backend == "chunked" and whole_rows:
        backend = "strips"
    if residual is not None:
        assert spec.residual is not None
        if spec.residual.summed == "scores" and backend in ("chunked", "strips"):
            backend = "concatenated" if whole_rows else "residual"
        attention(q, k, v, score, backend=backend, residual=residual[0], **options)
        options["residual"] = residual[1]
    out: Tensor = attention(q, k, v, score, backend=backend, **options)
    return out


def _score(spec: ScoreSpec) -> Score:
    """The score of two query heads that share a key head, where they are no pair."""
    return Score(spec, 2, 8, 1 if spec.difference is None else 2)


def _tensors(score: Score, batch: int, length: int) -> list[Tensor]:
    shared = (batch, score.kv_heads, length, 8)
    return tensors((batch, 2, length, 8), shared, shared)


causal_specs = specs(resolved=True, layer=True).filter(lambda spec: not spec.leaks_future)
backends = st.sampled_from(["reference", "chunked", "auto"])


@quick
@given(causal_specs, backends, st.integers(2, 9), st.data())
def test_no_future_token_leaks(
    spec: ScoreSpec, backend: str, length: int, data: st.DataObject
) -> None:
    at = data.draw(st.integers(1, length - 1))
    score = _score(spec)
    q, k, v = _tensors(score, 1, length)
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
@given(specs(resolved=True, layer=True), backends, st.permutations(range(3)))
def test_rows_of_a_batch_do_not_see_each_other(
    spec: ScoreSpec, backend: str, order: list[int]
) -> None:
    """In evaluation, batch norms included: any order and any company gives the same row."""
    score = _score(spec)
    q, k, v = _tensors(score, 3, 7)
    expected = _attend(score, q, k, v, backend)
    shuffled = _attend(score, q[order], k[order], v[order], backend)
    torch.testing.assert_close(shuffled, expected[order], rtol=1e-12, atol=1e-12)
    alone = _attend(score, q[1:2], k[1:2], v[1:2], backend)
    torch.testing.assert_close(alone, expected[1:2], rtol=1e-12, atol=1e-12)


def _is_relative(spec: ScoreSpec) -> bool:
    """Whether the score depends on the distance alone.

    FIRE, log-n, blocks of a moving spectrum, groups, kept first tokens and those never selected
    count from the start; a gain or a mean over rotated features tells the angle itself.
    """
    counted = spec.remapping is not None and spec.remapping.name in ("SelfExtend", "StreamingLLM")
    counted = counted or isinstance(spec.bias, PairBiasPart) or spec.selection is not None
    return spec.logn is None and spec.order is None and not spec.blockwise and not counted


@st.composite
def turns(draw: st.DrawFn) -> tuple[Tensor, bool]:
    """Frequencies of some specification, and its layout."""
    spec = draw(specs(resolved=True, layer=True).filter(lambda spec: spec.position.rotary))
    base, layout = spec.position.base, spec.position.layout  # type: ignore[attr-defined]
    spectrum = spec.for_block(draw(st.integers(0, 9))).rope_scaling
    if spectrum is None:
        return rope_frequencies(8, base), layout == "interleaved"
    theta = spectrum.inverse_frequencies(8, base, spec.train_length)
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
        left, right = (Rotator(theta, interleaved).at(a, torch.float64) for a in at)
        return (left(q) * right(k)).sum()

    torch.testing.assert_close(score(i, j), score(i + shift, j + shift), rtol=0, atol=1e-8)


@quick
@given(turns(), where)
def test_rotations_keep_norms_and_turn_back(turn: tuple[Tensor, bool], i: int) -> None:
    theta, interleaved = turn
    (x,) = tensors((2, 2, 3, 8))
    at = torch.arange(i, i + 3, dtype=torch.float64)
    forward = Rotator(theta, interleaved).at(at, torch.float64)
    back = Rotator(theta, interleaved).at(-at, torch.float64)
    torch.testing.assert_close(forward(x).norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(back(forward(x)), x)


@quick
@given(causal_specs.filter(lambda spec: _is_relative(spec)), where, backends)
def test_moving_all_positions_changes_nothing_without_log_n(
    spec: ScoreSpec, shift: int, backend: str
) -> None:
    score = _score(spec).double()
    q, k, v = _tensors(score, 1, 6)
    # XPos grows with the absolute position, up to the end of the dtype.
    at = torch.arange(6) + (shift % 1000 if spec.position.name == "XPos" else shift)
    if backend == "auto":
        backend = "chunked"
    moved = _attend(score, q, k, v, backend, q_positions=at, k_positions=at)
    expected = _attend(score, q, k, v, backend)
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
