"""Scores carried up through layers: every way of holding them against the sum written out.

The oracle adds whole matrices and leaves the gradients to autograd; it knows no tiles and no carry.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from normattn import InputError
from normattn.kernels import Problem, Visibility, attend, reasons, tiles
from normattn.kernels.carry import CarriedScores
from normattn.kernels.score_buffer import ScoreBuffer

WAYS = ("carried", "concatenated", "reference")
few = settings(max_examples=15, deadline=None)
every_way = pytest.mark.parametrize("way", WAYS)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "ROWS", 8)
    monkeypatch.setattr(tiles, "TILE_BYTES", 20000)


@dataclass(frozen=True)
class Shape:
    """Of one layer's problem; `alike` are Problem fields, `drawn` shapes of learned ones."""

    batch: int = 2
    groups: int = 2
    repeat: int = 2
    rows: int = 21
    keys: int = 21
    size: int = 4
    values: int = 6

    @property
    def heads(self) -> int:
        return self.groups * self.repeat


Seen = Callable[[Shape], Visibility]


def _seen(shape: Shape, causal: bool = True, **changes: Any) -> Visibility:
    key = torch.arange(shape.keys)
    return replace(Visibility(causal, key[shape.keys - shape.rows :], key, True), **changes)


def _padding(shape: Shape) -> Tensor:
    return torch.arange(shape.keys) < 3 * torch.arange(shape.batch)[:, None]


def _documents(shape: Shape) -> dict[str, Any]:
    number = (torch.arange(shape.keys) >= shape.keys // 2).long().expand(shape.batch, -1)
    return {
        "key_documents": number,
        "query_documents": number[:, shape.keys - shape.rows :],
    }


# (shape, visibility, fields of the problem, learned fields)
CASES: dict[str, tuple[Shape, Seen, dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "causal": (Shape(), _seen, {}, {}),
    "bidirectional": (Shape(), lambda s: _seen(s, False), {}, {}),
    "last rows": (Shape(rows=9), _seen, {}, {}),
    "cross": (Shape(rows=9, keys=14), lambda s: _seen(s, False), {}, {}),
    "one row": (Shape(rows=1), _seen, {}, {}),
    "window": (Shape(rows=21, keys=33), lambda s: _seen(s, window=5), {}, {}),
    "kept": (Shape(), lambda s: _seen(s, window=5, kept=2), {}, {}),
    "padding": (Shape(), lambda s: _seen(s, padding=_padding(s)), {}, {}),
    "padded encoder": (Shape(), lambda s: _seen(s, False, padding=_padding(s)), {}, {}),
    "documents": (Shape(), lambda s: _seen(s, **_documents(s)), {}, {}),
    "mask": (Shape(), lambda s: _seen(s, mask=torch.ones(21, 21).tril(3) > 0), {}, {}),
    "floating": (Shape(), lambda s: _seen(s, mask=torch.eye(21, dtype=torch.float64)), {}, {}),
    "irregular": (Shape(), lambda s: _seen(s, aligned=False), {}, {}),
    "cap": (Shape(), _seen, {"cap": 1.5}, {}),
    "bias": (Shape(), _seen, {}, {"bias": (4, 21)}),
    "sink": (Shape(), _seen, {}, {"sink": (4,)}),
    "all": (Shape(repeat=1), _seen, {"cap": 0.8}, {"bias": (2, 21), "sink": (2,)}),
}


def _layers(
    shape: Shape,
    seen: Visibility,
    fields: dict[str, Any],
    learned: dict[str, tuple[int, ...]],
    count: int = 4,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> list[Problem]:
    generator = torch.Generator().manual_seed(seed)

    def leaf(*size: int) -> Tensor:
        drawn = torch.randn(size, generator=generator, dtype=torch.float64)
        return drawn.to(dtype).requires_grad_()

    s = shape
    return [
        Problem(
            leaf(s.batch, s.heads, s.rows, s.size),
            leaf(s.batch, s.groups, s.keys, s.size),
            leaf(s.batch, s.groups, s.keys, s.values),
            seen,
            **fields,
            **_leaves(learned, leaf),
        )
        for _ in range(count)
    ]


def _leaves(learned: dict[str, tuple[int, ...]], leaf: Callable[..., Tensor]) -> dict[str, Any]:
    return {name: leaf(*size) for name, size in learned.items()}


def _inputs(layers: list[Problem]) -> list[Tensor]:
    return [x for layer in layers for x in layer.tensors if x is not None]


def _run(layers: list[Problem], way: str, mean: bool = False) -> list[Tensor]:
    carry = CarriedScores(mean)
    return [attend(replace(layer, carry=carry), way) for layer in layers]


def _by_hand(layers: list[Problem], mean: bool = False) -> list[Tensor]:
    """The sum of whole matrices, then cap, bias, masks, sink and softmax."""
    outs, total = [], torch.zeros((), dtype=torch.float64)
    for number, p in enumerate(layers, 1):
        repeat = p.q.shape[1] // p.k.shape[1]
        k, v = (x.repeat_interleave(repeat, 1) for x in (p.k, p.v))
        total = total + torch.einsum("bhtd,bhsd->bhts", p.q, k)
        logits = total / number if mean else total
        if p.cap is not None:
            logits = p.cap * torch.tanh(logits / p.cap)
        distance = p.visibility.query[:, None] - p.visibility.key
        if p.bias is not None:
            logits = logits + p.bias[:, distance.abs()]
        hidden = _hidden(p, distance)
        mask = p.visibility.mask
        if mask is not None and mask.dtype != torch.bool:
            logits = logits + mask
        exps = torch.exp(logits) * ~hidden
        most = exps.sum(-1, keepdim=True)
        if p.sink is not None:
            most = most + torch.exp(p.sink)[:, None, None]
        outs.append(exps / torch.where(most == 0, 1.0, most) @ v)
    return outs


def _hidden(p: Problem, distance: Tensor) -> Tensor:
    seen = p.visibility
    hidden = torch.zeros(p.q.shape[0], 1, *distance.shape, dtype=torch.bool)
    if seen.causal:
        hidden = hidden | (distance < 0)
    if seen.window is not None:
        hidden = hidden | ((distance.abs() >= seen.window) & (seen.key >= seen.kept))
    if seen.padding is not None:
        hidden = hidden | seen.padding[:, None, None]
    if seen.key_documents is not None and seen.query_documents is not None:
        other = seen.query_documents[:, :, None] != seen.key_documents[:, None]
        hidden = hidden | other[:, None]
    if seen.mask is not None and seen.mask.dtype == torch.bool:
        hidden = hidden | ~seen.mask
    return hidden


def _weighted(outs: list[Tensor]) -> Tensor:
    """A loss that every output of every layer matters to."""
    total = outs[0].new_zeros(())
    for turn, out in enumerate(outs):
        total = total + (out * torch.linspace(-1, 1 + turn, out.numel()).view(out.shape)).sum()
    return total


def _agree(layers: list[Problem], way: str, mean: bool, tolerance: float = 1e-10) -> None:
    ours, expected = _run(layers, way, mean), _by_hand(layers, mean)
    for one, two in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, two, atol=tolerance, rtol=tolerance)
    inputs = _inputs(layers)
    mine = torch.autograd.grad(_weighted(ours), inputs)
    hand = torch.autograd.grad(_weighted(expected), inputs)
    for one, two in zip(mine, hand, strict=True):
        torch.testing.assert_close(one, two, atol=tolerance, rtol=tolerance)


@every_way
@pytest.mark.parametrize("mean", [False, True], ids=["sum", "mean"])
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_of_four_layers(case: str, mean: bool, way: str) -> None:
    shape, seen, fields, learned = CASES[case]
    _agree(_layers(shape, seen(shape), fields, learned), way, mean)


@few
@given(random=st.randoms(use_true_random=False), way=st.sampled_from(WAYS))
def test_any_shape_and_depth(random: random.Random, way: str) -> None:
    rows = random.choice([1, 2, 7, 8, 9, 17])
    shape = Shape(
        random.choice([1, 3]),
        random.choice([1, 2]),
        random.choice([1, 3]),
        rows,
        rows + random.choice([0, 0, 3, 20]),
        random.choice([1, 5]),
        random.choice([1, 3]),
    )
    window = random.choice([None, None, 1, 4])
    seen = _seen(shape, random.random() < 0.6, window=window)
    count, seed = random.choice([1, 2, 3, 6]), random.randrange(2**31)
    fields = random.choice([{}, {"cap": 1.0}])
    _agree(_layers(shape, seen, fields, {}, count, seed=seed), way, random.random() < 0.3)


def test_no_layer_of_depth_three_forgets_the_lowest() -> None:
    """The trap: a residual of two layers, because what is handed on lacks what came from below."""
    layers = _causal(3)
    whole = _run(layers, "carried")[2]
    pair = _run(layers[1:], "carried")[1]
    assert (whole - pair).abs().max() > 0.1
    torch.testing.assert_close(whole, _by_hand(layers)[2])


def test_a_bias_does_not_compound() -> None:
    """The trap: a bias within what is carried would count n times in layer n."""
    shape = Shape(repeat=1)
    slopes = -torch.arange(21.0, dtype=torch.float64).expand(2, -1)
    layers = _layers(shape, _seen(shape), {"bias": slopes}, {})
    silent = [replace(p, q=torch.zeros_like(p.q)) for p in layers]
    outs = _run(silent, "carried")
    alone = [attend(p, "reference") for p in silent]
    for one, two in zip(outs, alone, strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("way", ["carried", "concatenated"])
def test_dropout_is_the_same_in_the_backward(way: str) -> None:
    shape = Shape(batch=1, repeat=1, rows=9, keys=9)
    layers = _layers(shape, _seen(shape), {"dropout": 0.4}, {}, count=3)
    inputs = _inputs(layers)

    def loss(step: float) -> Tensor:
        """At the inputs moved along their own direction."""
        torch.manual_seed(3)
        moved = iter([x * (1 + step) for x in inputs])
        drawn = [replace(p, q=next(moved), k=next(moved), v=next(moved)) for p in layers]
        return _weighted(_run(drawn, way))

    found = torch.autograd.grad(loss(0.0), inputs)
    slope = sum(float((x.detach() * grad).sum()) for x, grad in zip(inputs, found, strict=True))
    numeric = float((loss(1e-5) - loss(-1e-5)).detach()) / 2e-5
    assert abs(slope - numeric) <= 1e-6 * abs(slope)
    torch.manual_seed(3)
    assert not torch.equal(_run(layers, way)[0], _run(layers, way)[0])


def test_gradients_in_float32_are_within_1e_5_of_float64() -> None:
    shape = Shape(1, 2, 1, 300, 300, 16, 16)
    for causal in (True, False):
        exact = _layers(shape, _seen(shape, causal), {}, {}, 6)
        single = _layers(shape, _seen(shape, causal), {}, {}, 6, torch.float32)
        expected = torch.autograd.grad(_weighted(_by_hand(exact)), _inputs(exact))
        found = torch.autograd.grad(_weighted(_run(single, "carried")), _inputs(single))
        for one, two in zip(found, expected, strict=True):
            assert (one - two).norm() <= 1e-5 * two.norm()


def test_half_precision_sums_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded products, but a sum of many layers that is rounded no further."""
    shape = Shape(1, 2, 2, 40, 40, 16, 16)
    half = _layers(shape, _seen(shape), {}, {}, 8, torch.bfloat16)
    exact = [
        replace(p, **{n: getattr(p, n).detach().double().requires_grad_() for n in "qkv"})
        for p in half
    ]
    exact = [replace(p, q=(p.q * 0.2).detach().requires_grad_()) for p in exact]
    half = [
        replace(p, q=e.q.detach().bfloat16().requires_grad_())
        for p, e in zip(half, exact, strict=True)
    ]
    made: list[torch.dtype] = []
    tile = ScoreBuffer.tile

    def watched(self: ScoreBuffer, *where: Any) -> Tensor:
        made.append(tile(self, *where).dtype)
        return tile(self, *where)

    monkeypatch.setattr(ScoreBuffer, "tile", watched)
    outs, expected = _run(half, "carried"), _by_hand(exact)
    assert set(made) == {torch.float32}
    for one, two in zip(outs, expected, strict=True):
        assert (one - two).norm() <= 0.02 * two.norm()
    found = torch.autograd.grad(_weighted([x.double() for x in outs]), _inputs(half))
    hand = torch.autograd.grad(_weighted(expected), _inputs(exact))
    for one, two in zip(found, hand, strict=True):
        assert (one - two).norm() <= 0.04 * two.norm()


def _causal(count: int = 3) -> list[Problem]:
    shape = Shape()
    return _layers(shape, _seen(shape), {}, {}, count)


def _same(found: Iterator[Tensor] | Any, expected: Any) -> None:
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two)


@every_way
def test_two_forwards_before_a_backward(way: str) -> None:
    layers = _causal()
    expected = torch.autograd.grad(_weighted(_by_hand(layers)), _inputs(layers))
    first, second = _weighted(_run(layers, way)), _weighted(_run(layers, way))
    _same(torch.autograd.grad(first, _inputs(layers)), expected)
    _same(torch.autograd.grad(second, _inputs(layers)), expected)


@every_way
@pytest.mark.parametrize("exit_after", [1, 2, 3])
def test_a_loss_at_an_early_exit(exit_after: int, way: str) -> None:
    """Layers above that no gradient comes from are undone with what they remember."""
    layers = _causal(4)
    inputs = _inputs(layers[:exit_after])
    ours = _weighted(_run(layers, way)[:exit_after])
    expected = torch.autograd.grad(_weighted(_by_hand(layers)[:exit_after]), inputs)
    _same(torch.autograd.grad(ours, inputs), expected)


@every_way
def test_a_gradient_through_the_carry_alone(way: str) -> None:
    """Only the top layer's output counts: the others are reached by their scores."""
    layers = _causal()
    wanted = [layers[0].q, layers[0].k, layers[1].q, layers[2].v]
    expected = torch.autograd.grad(_weighted(_by_hand(layers)[2:]), wanted)
    _same(torch.autograd.grad(_weighted(_run(layers, way)[2:]), wanted), expected)


@every_way
def test_layers_that_want_no_gradient(way: str) -> None:
    layers = _causal()
    frozen = replace(layers[0], **{n: getattr(layers[0], n).detach() for n in "qkv"})
    layers = [frozen, *layers[1:]]
    inputs = [x for x in _inputs(layers) if x.requires_grad]
    expected = torch.autograd.grad(_weighted(_by_hand(layers)), inputs)
    _same(torch.autograd.grad(_weighted(_run(layers, way)), inputs), expected)


def test_a_second_backward_is_refused_by_name() -> None:
    layers = _causal()
    loss = _weighted(_run(layers, "carried"))
    torch.autograd.backward([loss], retain_graph=True)
    with pytest.raises(InputError, match="undone in a backward and serve one only"):
        torch.autograd.backward([loss])
    outs = _run(layers, "carried")
    torch.autograd.backward([_weighted(outs[:1])], retain_graph=True)
    with pytest.raises(InputError, match="add the losses and call backward once"):
        torch.autograd.backward([_weighted(outs)])


@pytest.mark.parametrize("way", ["concatenated", "reference"])
def test_the_other_ways_serve_a_second_backward(way: str) -> None:
    layers = _causal()
    loss = _weighted(_run(layers, way))
    first = torch.autograd.grad(loss, _inputs(layers), retain_graph=True)
    _same(torch.autograd.grad(loss, _inputs(layers)), first)


def test_a_second_derivative_is_refused_or_given() -> None:
    layers = _causal()
    loss = _weighted(_run(layers, "carried"))
    with pytest.raises(InputError, match="carried kernel gives no second derivatives"):
        torch.autograd.grad(loss, layers[0].q, create_graph=True)
    loss = _weighted(_run(layers, "reference"))
    (first,) = torch.autograd.grad(loss, layers[0].q, create_graph=True)
    assert torch.autograd.grad(first.square().sum(), layers[1].k)[0].abs().max() > 0


@every_way
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_layer_is_refused_by_name(reentrant: bool, way: str) -> None:
    carry = CarriedScores()
    outs = []
    for p in _causal():

        def layer(q: Tensor, k: Tensor, v: Tensor, p: Problem = p) -> Tensor:
            return attend(replace(p, q=q, k=k, v=v, carry=carry), way)

        outs.append(checkpoint(layer, p.q, p.k, p.v, use_reentrant=reentrant))
    with pytest.raises(InputError, match="activation checkpointing of single layers"):
        torch.autograd.backward([_weighted(outs)])


@every_way
def test_a_whole_stack_can_be_checkpointed(way: str) -> None:
    layers = _causal()
    inputs = _inputs(layers)

    def stack(*tensors: Tensor) -> Tensor:
        again = iter(tensors)
        fresh = [replace(p, q=next(again), k=next(again), v=next(again)) for p in layers]
        return _weighted(_run(fresh, way))

    expected = torch.autograd.grad(_weighted(_by_hand(layers)), inputs)
    _same(torch.autograd.grad(checkpoint(stack, *inputs, use_reentrant=False), inputs), expected)


@every_way
def test_layers_must_have_one_shape(way: str) -> None:
    carry = CarriedScores()
    first, other = _causal(1)[0], _layers(Shape(rows=9), _seen(Shape(rows=9)), {}, {}, 1)[0]
    attend(replace(first, carry=carry), way)
    with pytest.raises(InputError, match=r"must have the same shape.*21 queries.*9 queries"):
        attend(replace(other, carry=carry), way)


def test_layers_must_see_the_same_pairs() -> None:
    first = _causal(1)[0]
    for seen in (_seen(Shape(), window=3), _seen(Shape(), False), _seen(Shape(), aligned=False)):
        carry = CarriedScores()
        attend(replace(first, carry=carry), "carried")
        with pytest.raises(InputError, match="must see the same pairs"):
            attend(replace(first, carry=carry, visibility=seen), "carried")


def test_one_kernel_serves_all_layers() -> None:
    first, second = _causal(2)
    for way in WAYS:
        carry = CarriedScores()
        attend(replace(first, carry=carry), way)
        decision = reasons(replace(second, carry=carry))
        assert decision.kernel == way
        assert "layers below were summed by it" in decision.why
        for other in set(WAYS) - {way}:
            with pytest.raises(InputError, match=f"summed by the {way} kernel"):
                attend(replace(second, carry=carry), other)


def test_features_side_by_side_where_they_are_few_and_keys_many() -> None:
    def chosen(layers: int | None, size: int, keys: int) -> str:
        shape = Shape(1, 1, 1, keys, keys, size, size)
        (problem,) = _layers(shape, _seen(shape), {}, {}, 1)
        return reasons(replace(problem, carry=CarriedScores(layers=layers))).kernel

    assert chosen(2, 16, 2048) == "concatenated"
    assert {chosen(None, 16, 2048), chosen(3, 16, 2048), chosen(2, 16, 2047)} == {"carried"}


def test_a_kernel_without_a_carry_says_so() -> None:
    first = _causal(1)[0]
    with pytest.raises(InputError, match="takes no scores of the layers below"):
        attend(replace(first, carry=CarriedScores()), "chunked")
    with pytest.raises(InputError, match="carried up through layers, and there are none"):
        attend(first, "carried")


def test_a_causal_buffer_holds_half_of_the_pairs_and_goes_with_the_backward() -> None:
    shape = Shape(1, 2, 2, 64, 64)
    layers = _layers(shape, _seen(shape), {}, {}, 5)
    carry = CarriedScores()
    outs = [attend(replace(layer, carry=carry), "carried") for layer in layers]
    ledger = carry.ledger
    assert ledger is not None
    assert ledger.sums is not None
    held = sum(x.numel() for x in ledger.sums.tiles.values())
    assert held == 4 * 64 * (64 + tiles.ROWS // 2) / 2
    gone = weakref.ref(ledger.sums)
    torch.autograd.backward([_weighted(outs)])
    assert ledger.sums is None
    assert ledger.gradients is None
    assert not ledger.remembered
    gc.collect()
    assert gone() is None


def test_a_graph_that_is_dropped_drops_its_buffer() -> None:
    carry = CarriedScores()
    outs = [attend(replace(layer, carry=carry), "carried") for layer in _causal()]
    assert carry.ledger is not None
    gone = weakref.ref(carry.ledger)
    del carry, outs
    assert gone() is None


def test_without_gradients_nothing_is_remembered() -> None:
    carry = CarriedScores()
    with torch.no_grad():
        outs = [attend(replace(layer, carry=carry), "carried") for layer in _causal()]
    assert carry.ledger is not None
    assert not carry.ledger.remembered
    _same(outs, [x.detach() for x in _by_hand(_causal())])
