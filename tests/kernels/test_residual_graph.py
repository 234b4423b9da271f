"""Residual scores in autograd: exits, several backwards, checkpoints, and what is kept alive."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kernels.residual_layers import (
    WAYS,
    Shape,
    assert_same,
    by_hand,
    causal_layers,
    inputs_of,
    make_layers,
    run_layers,
    seen_by,
    weighted,
)
from normattn import InputError
from normattn.kernels import AttentionInputs, attend, reasons, tiled
from normattn.kernels.residual_scores import ResidualScores

every_way = pytest.mark.parametrize("way", WAYS)


pytestmark = pytest.mark.usefixtures("small_tiles")


@every_way
def test_two_forwards_before_a_backward(way: str) -> None:
    layers = causal_layers()
    expected = torch.autograd.grad(weighted(by_hand(layers)), inputs_of(layers))
    first, second = weighted(run_layers(layers, way)), weighted(run_layers(layers, way))
    assert_same(torch.autograd.grad(first, inputs_of(layers)), expected)
    assert_same(torch.autograd.grad(second, inputs_of(layers)), expected)


@every_way
@pytest.mark.parametrize("exit_after", [1, 3])
def test_a_loss_at_an_early_exit(exit_after: int, way: str) -> None:
    """Without a gradient from the layers above, whose scores a buffer holds: that is refused."""
    layers = causal_layers(4)
    inputs = inputs_of(layers[:exit_after])
    ours = weighted(run_layers(layers, way)[:exit_after])
    if way == "residual":
        with pytest.raises(InputError, match="through all layers"):
            torch.autograd.grad(ours, inputs)
        return
    expected = torch.autograd.grad(weighted(by_hand(layers)[:exit_after]), inputs)
    assert_same(torch.autograd.grad(ours, inputs), expected)


@every_way
def test_a_gradient_through_the_sum_alone(way: str) -> None:
    """Only the top layer's output counts: the others are reached by their scores."""
    layers = causal_layers()
    wanted = [layers[0].q, layers[0].k, layers[1].q, layers[2].v]
    expected = torch.autograd.grad(weighted(by_hand(layers)[2:]), wanted)
    assert_same(torch.autograd.grad(weighted(run_layers(layers, way)[2:]), wanted), expected)
    frozen = replace(layers[0], **{n: getattr(layers[0], n).detach() for n in "qkv"})
    layers = [frozen, *layers[1:]]
    wanted = [x for x in inputs_of(layers) if x.requires_grad]
    expected = torch.autograd.grad(weighted(by_hand(layers)), wanted)
    assert_same(torch.autograd.grad(weighted(run_layers(layers, way)), wanted), expected)


def test_a_second_backward_is_refused_by_name() -> None:
    layers = causal_layers()
    loss = weighted(run_layers(layers, "residual"))
    torch.autograd.backward([loss], retain_graph=True)
    with pytest.raises(InputError, match="add the losses and call backward once"):
        torch.autograd.backward([loss])


@pytest.mark.parametrize("way", ["concatenated", "reference"])
def test_the_other_ways_serve_a_second_backward(way: str) -> None:
    layers = causal_layers()
    loss = weighted(run_layers(layers, way))
    first = torch.autograd.grad(loss, inputs_of(layers), retain_graph=True)
    assert_same(torch.autograd.grad(loss, inputs_of(layers)), first)


def test_a_second_derivative_is_refused_or_given() -> None:
    layers = causal_layers()
    loss = weighted(run_layers(layers, "residual"))
    with pytest.raises(InputError, match="residual kernel gives no second derivatives"):
        torch.autograd.grad(loss, layers[0].q, create_graph=True)
    loss = weighted(run_layers(layers, "reference"))
    (first,) = torch.autograd.grad(loss, layers[0].q, create_graph=True)
    assert torch.autograd.grad(first.square().sum(), layers[1].k)[0].abs().max() > 0


@every_way
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_layer_is_refused_by_name(reentrant: bool, way: str) -> None:
    residual = ResidualScores()
    outs = []
    for p in causal_layers():

        def layer(q: Tensor, k: Tensor, v: Tensor, p: AttentionInputs = p) -> Tensor:
            return attend(replace(p, q=q, k=k, v=v, residual_scores=residual), way)

        outs.append(checkpoint(layer, p.q, p.k, p.v, use_reentrant=reentrant))
    with pytest.raises(InputError, match="activation checkpointing of single layers"):
        torch.autograd.backward([weighted(outs)])


@every_way
def test_a_whole_stack_can_be_checkpointed(way: str) -> None:
    layers = causal_layers()
    inputs = inputs_of(layers)

    def stack(*tensors: Tensor) -> Tensor:
        again = iter(tensors)
        fresh = [replace(p, q=next(again), k=next(again), v=next(again)) for p in layers]
        return weighted(run_layers(fresh, way))

    expected = torch.autograd.grad(weighted(by_hand(layers)), inputs)
    assert_same(
        torch.autograd.grad(checkpoint(stack, *inputs, use_reentrant=False), inputs), expected
    )


def _above(first: AttentionInputs, second: AttentionInputs, way: str) -> Tensor:
    """The output of the second layer."""
    residual = ResidualScores()
    attend(replace(first, residual_scores=residual), way)
    return attend(replace(second, residual_scores=residual), way)


@every_way
def test_layers_must_have_one_shape(way: str) -> None:
    other = make_layers(Shape(rows=9), seen_by(Shape(rows=9)), {}, {}, 1)[0]
    with pytest.raises(InputError, match=r"must have the same shape.*21 queries.*9 queries"):
        _above(causal_layers(1)[0], other, way)


@pytest.mark.parametrize("seen", [{"window": 3}, {"causal": False}, {"aligned": False}])
def test_layers_must_see_the_same_pairs(seen: dict[str, Any]) -> None:
    first = causal_layers(1)[0]
    with pytest.raises(InputError, match="must see the same pairs"):
        _above(first, replace(first, visibility=seen_by(Shape(), **seen)), "residual")


def test_one_kernel_serves_all_layers() -> None:
    first, second = causal_layers(2)
    for way in WAYS:
        residual = ResidualScores()
        attend(replace(first, residual_scores=residual), way)
        decision = reasons(replace(second, residual_scores=residual))
        assert decision.kernel == way
        assert "layers below were summed by it" in decision.why
        for other in set(WAYS) - {way}:
            with pytest.raises(InputError, match=f"summed by the {way} kernel"):
                attend(replace(second, residual_scores=residual), other)


def test_where_no_kernel_can_go_on_the_reason_is_said() -> None:
    first, second = causal_layers(2)
    residual = ResidualScores()
    attend(replace(first, residual_scores=residual), "residual")
    learned = torch.zeros(second.q.shape[2], second.v.shape[2], requires_grad=True)
    mask = replace(second.visibility, mask=learned.to(second.q.dtype))
    with pytest.raises(InputError, match="summed by the residual kernel"):
        reasons(replace(second, visibility=mask, residual_scores=residual))


def test_a_kernel_without_residual_scores_says_so() -> None:
    first = causal_layers(1)[0]
    with pytest.raises(InputError, match=r"cannot serve this: .*residual scores"):
        attend(replace(first, residual_scores=ResidualScores()), "chunked")
    with pytest.raises(InputError, match="without residual scores"):
        attend(first, "residual")


def test_a_causal_buffer_holds_half_of_the_pairs_and_goes_with_the_backward() -> None:
    shape = Shape(1, 2, 2, 64, 64)
    layers = make_layers(shape, seen_by(shape), {}, {}, 5)
    residual = ResidualScores()
    outs = [attend(replace(p, residual_scores=residual), "residual") for p in layers]
    buffer = residual.buffer
    assert buffer is not None
    held = sum(x.numel() for x in buffer.sums.values())
    assert held == 4 * 64 * (64 + tiled.ROWS // 2) / 2
    gone = weakref.ref(next(iter(buffer.sums.values())))
    torch.autograd.backward([weighted(outs)])
    assert not {**buffer.sums, **buffer.gradients}
    gc.collect()
    assert gone() is None


def test_a_graph_that_is_dropped_drops_its_buffer() -> None:
    residual = ResidualScores()
    outs = [attend(replace(p, residual_scores=residual), "residual") for p in causal_layers()]
    gone = weakref.ref(residual.buffer)
    del residual, outs
    assert gone() is None
