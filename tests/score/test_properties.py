"""What holds for every score: properties over generated specifications, positions and tensors."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from normattn import InputError, Score, ScoreSpec, attention
from normattn.layers.residual_scores import residual_layers
from normattn.score.parts import PairBiasPart, Part, Slot, parts

from .cases import tensors

# The run-time type checker samples items of containers by `random`.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module")
quick = settings(max_examples=30, deadline=None, derandomize=True)
# What would be too large to compute with, or too sharp for the tolerances.
LIMITED: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("CoPE.positions", "FIRE.width"), st.integers(2, 64)),
    "CosA.c": st.floats(0.1, 20),
    "XPos.scale": st.floats(100, 1e6),
    "Entmax.alpha": st.floats(1.1, 2),
    "YaRN.sharpness": st.floats(0, 1),
    "LongRoPE.factors": st.tuples(*[st.floats(0.5, 9)] * 4),
    **dict.fromkeys(("Temperature.beta", "IRoPE.beta"), st.floats(0, 2)),
}
FLOATS = st.floats(0.01, 1) | st.floats(1, 64)


def values(part: type[Part], field: dataclasses.Field[Any]) -> st.SearchStrategy[Any]:
    """Values that a parameter may have, by its type and its range."""
    hint = typing.get_type_hints(part)[field.name]
    choices = typing.get_args(hint)
    if (name := f"{part.name}.{field.name}") in LIMITED:
        return LIMITED[name]
    if typing.get_origin(hint) is typing.Literal:
        return st.sampled_from(choices)
    if hint is bool:
        return st.booleans()
    if field.name == "scale":
        return st.floats(0.05, 2)
    numbers: Any = st.integers(0, 64) | st.just(2**40) if int in (hint, *choices) else FLOATS
    return numbers.filter(field.metadata.get("allowed", lambda value: True))  # type: ignore[no-any-return]


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
    words = []
    for slot in [slot for slot in Slot if slot is Slot.VARIANT or slot in chosen]:
        part = draw(st.sampled_from([part for part in parts().values() if part.slot is slot]))
        own = dataclasses.fields(part)
        fields = draw(st.lists(st.sampled_from(own), unique_by=lambda x: x.name)) if own else []
        inside = ",".join(f"{x.name}={_written(draw(values(part, x)))}" for x in fields)
        words.append(f"{part.name}({inside})" if inside else part.name)
    text = "-".join([words[0], *draw(st.permutations(words[1:]))])
    length = draw(st.integers(2, 10**6) | (st.nothing() if resolved else st.none()))
    try:
        spec = ScoreSpec.parse(text, train_length=length)
        return spec.resolve(factor=draw(st.floats(1, 64))) if resolved else spec
    except InputError as error:
        # Parts that exclude each other, bounds of each other, and a window as long as L, which
        # leaves nothing for the factor to decide.
        known = ["combined", "is not possible", "half of the buckets", "above low"]
        known += ["at least beta_slow", "needs s=", "needs group="]
        assert any(word in str(error) for word in known), text  # noqa: PT017
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
    assert spec.trained.with_method(spec.method_text) == spec
    score = Score(spec.trained, 2, 8, kv_heads=1)
    score.use(spec)
    assert score.spec == spec


def _attend(score: Score, q: Tensor, k: Tensor, v: Tensor, backend: str, **options: Any) -> Tensor:
    """The second of two equal layers where scores are residual, else the only one."""
    spec, residual = score.eval().double().spec, residual_layers(score.spec, 2)
    options["causal"] = not spec.leaks_future
    # What layers make of their input, made of queries and keys here.
    if spec.forgets:
        options["forget"] = k.mean((1, 3))[..., None].expand(-1, -1, q.shape[1])
    if spec.gate is not None:
        logits = spec.gate.logits(q.shape[1], v.shape[-1])
        options["gate"] = q[:, 0, :, :1].expand(-1, -1, logits)
    whole_rows = spec.normaliser is not None or spec.selection is not None
    whole_rows = whole_rows or isinstance(spec.bias, PairBiasPart)
    if backend == "chunked" and (whole_rows or residual is not None):
        backend = "auto"
    if residual is not None:
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
def test_no_future_token_leaks(spec: ScoreSpec, backend: str, length: int, data: Any) -> None:
    at = data.draw(st.integers(1, length - 1))
    score = _score(spec)
    q, k, v = _tensors(score, 1, length)
    expected = _attend(score, q, k, v, backend)
    with torch.no_grad():
        for x in (q, k, v):
            x[:, :, at:] += 3
    changed = _attend(score, q, k, v, backend)[:, :, :at]
    torch.testing.assert_close(changed, expected[:, :, :at], rtol=1e-10, atol=1e-12)
    grads = torch.autograd.grad(changed.sum(), (q, k, v))
    assert all((grad[:, :, at:] == 0).all() for grad in grads)


@quick
@given(specs(resolved=True, layer=True), backends, st.permutations(range(3)))
def test_rows_do_not_see_each_other(spec: ScoreSpec, backend: str, order: list[int]) -> None:
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

    FIRE, log-n, blocks with frequencies of their own, groups, kept first tokens and those never
    selected count from the start; a gain or a mean over rotated features tells the angle itself.
    """
    counted = spec.remapping is not None and spec.remapping.name in ("SelfExtend", "StreamingLLM")
    counted = counted or isinstance(spec.bias, PairBiasPart) or spec.selection is not None
    counted = counted or spec.chunk is not None
    return spec.logn is None and spec.order is None and not spec.blockwise and not counted


where = st.integers(0, 10**5)


@quick
@given(causal_specs.filter(lambda spec: _is_relative(spec)), where, backends)
def test_moving_all_positions_changes_nothing(spec: ScoreSpec, shift: int, backend: str) -> None:
    score = _score(spec).double()
    q, k, v = _tensors(score, 1, 6)
    # XPos grows with the absolute position, up to the end of the dtype.
    at = torch.arange(6) + (shift % 1000 if spec.position.name == "XPos" else shift)
    moved = _attend(score, q, k, v, backend, q_positions=at, k_positions=at)
    expected = _attend(score, q, k, v, backend)
    torch.testing.assert_close(moved, expected, rtol=1e-6, atol=1e-6)
