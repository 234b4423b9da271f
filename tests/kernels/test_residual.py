"""Residual scores: every way of holding them against the sum written out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.residual_layers import (
    CASES,
    WAYS,
    Shape,
    assert_agree,
    by_hand,
    causal_layers,
    inputs_of,
    make_layers,
    run_layers,
    seen_by,
    weighted,
)
from normattn.kernels import attend

every_way = pytest.mark.parametrize("way", WAYS)


pytestmark = pytest.mark.usefixtures("small_tiles")


@every_way
@pytest.mark.parametrize("mean", [False, True], ids=["sum", "mean"])
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_of_four_layers(case: str, mean: bool, way: str) -> None:
    shape, seen, fields, learned = CASES[case]
    assert_agree(make_layers(shape, seen(shape), fields, learned), way, mean)


def test_no_layer_of_depth_three_forgets_the_lowest() -> None:
    """The trap: a residual of two layers, because what is handed on lacks what came from below."""
    layers = causal_layers(3)
    whole = run_layers(layers, "residual")[2]
    pair = run_layers(layers[1:], "residual")[1]
    assert (whole - pair).abs().max() > 0.1
    torch.testing.assert_close(whole, by_hand(layers)[2])


def test_a_bias_does_not_compound() -> None:
    """The trap: a bias within the sum would count n times in layer n."""
    shape = Shape(repeat=1)
    slopes = -torch.arange(21.0, dtype=torch.float64).expand(2, -1)
    layers = make_layers(shape, seen_by(shape), {"bias": slopes}, {})
    silent = [replace(p, q=torch.zeros_like(p.q)) for p in layers]
    outs = run_layers(silent, "residual")
    alone = [attend(p, "reference") for p in silent]
    for one, two in zip(outs, alone, strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("way", ["residual", "concatenated"])
def test_dropout_is_the_same_in_the_backward(way: str) -> None:
    shape = Shape(batch=1, repeat=1, rows=9, keys=9)
    layers = make_layers(shape, seen_by(shape), {"dropout": 0.4}, {}, count=3)
    inputs = inputs_of(layers)

    def loss(step: float) -> Tensor:
        """At the inputs moved along their own direction."""
        torch.manual_seed(3)
        moved = iter([x * (1 + step) for x in inputs])
        drawn = [replace(p, q=next(moved), k=next(moved), v=next(moved)) for p in layers]
        return weighted(run_layers(drawn, way))

    found = torch.autograd.grad(loss(0.0), inputs)
    slope = sum(float((x.detach() * grad).sum()) for x, grad in zip(inputs, found, strict=True))
    numeric = float((loss(1e-5) - loss(-1e-5)).detach()) / 2e-5
    assert abs(slope - numeric) <= 1e-6 * abs(slope)
    torch.manual_seed(3)
    assert not torch.equal(run_layers(layers, way)[0], run_layers(layers, way)[0])


def test_gradients_in_float32_are_within_1e_5_of_float64() -> None:
    shape = Shape(1, 2, 1, 300, 300, 16, 16)
    for causal in (True, False):
        exact = make_layers(shape, seen_by(shape, causal), {}, {}, 6)
        single = make_layers(shape, seen_by(shape, causal), {}, {}, 6, torch.float32)
        expected = torch.autograd.grad(weighted(by_hand(exact)), inputs_of(exact))
        found = torch.autograd.grad(weighted(run_layers(single, "residual")), inputs_of(single))
        for one, two in zip(found, expected, strict=True):
            assert (one - two).norm() <= 1e-5 * two.norm()
