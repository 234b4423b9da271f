"""Residual scores: every way of holding the sum against the sum written out, and in autograd."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from normattn import InputError
from normattn.kernels import AttentionInputs, attend, reasons, tiled
from normattn.kernels.residual_scores import ResidualScores
from thorough import half_of

from . import problems
from .problems import WAYS, assert_all_close, leaves_of, make_layers, run_layers

LEARNED = torch.zeros(21, 21, dtype=torch.float64, requires_grad=True)
every_way = pytest.mark.parametrize("way", WAYS)
pytestmark = pytest.mark.usefixtures("small_tiles")


def by_hand(layers: list[AttentionInputs], mean: bool = False) -> list[Tensor]:
    """The sum of whole matrices, then cap, bias, masks, sink and softmax."""
    outs, total = [], torch.zeros((), dtype=torch.float64)
    for number, p in enumerate(layers, 1):
        repeat = p.q.shape[1] // p.k.shape[1]
        k, v = (x.repeat_interleave(repeat, 1) for x in (p.k, p.v))
        total = total + torch.einsum("bhtd,bhsd->bhts", p.q, k)
        exps = torch.exp(problems.logits_of(p, total / number if mean else total))
        most = exps.sum(-1, keepdim=True)
        outs.append(exps[..., : v.shape[2]] / torch.where(most == 0, 1.0, most) @ v)
    return outs


def inputs_of(layers: list[AttentionInputs]) -> list[Tensor]:
    return [x for layer in layers for x in leaves_of(layer)]


def weighted(outs: list[Tensor]) -> Tensor:
    """A loss that every output of every layer matters to."""
    total = outs[0].new_zeros(())
    for turn, out in enumerate(outs):
        total = total + (out * torch.linspace(-1, 1 + turn, out.numel()).view(out.shape)).sum()
    return total


def gradients(loss: Tensor, layers: list[AttentionInputs], **more: Any) -> list[Tensor]:
    return list(torch.autograd.grad(loss, inputs_of(layers), **more))


@every_way
@pytest.mark.parametrize(("case", "mean"), half_of([*problems.RESIDUAL], [False, True]))
def test_outputs_and_gradients_of_four_layers(case: str, mean: bool, way: str) -> None:
    layers = make_layers(case, 4)
    ours, expected = run_layers(layers, way, mean), by_hand(layers, mean)
    assert_all_close(ours, expected, 1e-10)
    assert_all_close(
        gradients(weighted(ours), layers), gradients(weighted(expected), layers), 1e-10
    )


@pytest.mark.parametrize("way", ["residual", "concatenated"])
def test_dropout_is_the_same_in_the_backward(way: str) -> None:
    made = make_layers(rows=9, keys=9, batch=1, heads=2)
    layers = [replace(layer, dropout=0.4) for layer in made]
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


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_in_float32_are_within_1e_5_of_float64(causal: bool) -> None:
    shape: dict[str, Any] = {"rows": 300, "keys": 300, "batch": 1, "heads": 2, "groups": 2}
    single = make_layers(count=6, size=16, dtype=torch.float32, causal=causal, **shape)
    exact = [problems.in_float64(layer) for layer in single]
    found = gradients(weighted(run_layers(single, "residual")), single)
    for one, two in zip(found, gradients(weighted(by_hand(exact)), exact), strict=True):
        assert (one - two).norm() <= 1e-5 * two.norm()


@every_way
@pytest.mark.parametrize("exit_after", [1, 3])
def test_a_loss_at_an_early_exit(exit_after: int, way: str) -> None:
    """Without a gradient from the layers above, whose scores a buffer holds: that is refused."""
    layers = make_layers(count=4)
    read = layers[:exit_after]
    ours = weighted(run_layers(layers, way)[:exit_after])
    if way == "residual":
        with pytest.raises(InputError, match="through all layers"):
            gradients(ours, read)
        return
    assert_all_close(gradients(ours, read), gradients(weighted(by_hand(read)), read), 1e-10)


@every_way
def test_a_gradient_through_the_sum_alone(way: str) -> None:
    """Only the top layer's output counts: the others are reached by their scores."""
    layers = make_layers()
    wanted = [layers[0].q, layers[0].k, layers[1].q, layers[2].v]
    losses = (weighted(outs[2:]) for outs in (run_layers(layers, way), by_hand(layers)))
    ours, expected = (list(torch.autograd.grad(loss, wanted)) for loss in losses)
    assert_all_close(ours, expected, 1e-10)
    # Layers of which one is frozen.
    frozen = replace(layers[0], **{n: getattr(layers[0], n).detach() for n in "qkv"})
    layers = [frozen, *layers[1:]]
    losses = (weighted(outs) for outs in (run_layers(layers, way), by_hand(layers)))
    ours, expected = (gradients(loss, layers) for loss in losses)
    assert_all_close(ours, expected, 1e-10)


@every_way
def test_a_second_backward_and_a_second_derivative(way: str) -> None:
    """The buffer is emptied by a backward; the other ways keep what they made."""
    layers = make_layers()
    loss = weighted(run_layers(layers, way))
    first = gradients(loss, layers, retain_graph=True)
    if way == "residual":
        with pytest.raises(InputError, match="add the losses and call backward once"):
            gradients(loss, layers)
    else:
        assert_all_close(gradients(loss, layers), first, 1e-10)
    loss = weighted(run_layers(layers, way))
    if way == "reference":
        (once,) = torch.autograd.grad(loss, layers[0].q, create_graph=True)
        assert torch.autograd.grad(once.square().sum(), layers[1].k)[0].abs().max() > 0
    else:
        with pytest.raises(InputError, match="second derivatives"):
            torch.autograd.grad(loss, layers[0].q, create_graph=True)


@every_way
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_layer_is_refused_by_name(reentrant: bool, way: str) -> None:
    residual = ResidualScores()
    outs = []
    for p in make_layers():

        def layer(q: Tensor, k: Tensor, v: Tensor, p: AttentionInputs = p) -> Tensor:
            return attend(replace(p, q=q, k=k, v=v, residual_scores=residual), way)

        outs.append(checkpoint(layer, p.q, p.k, p.v, use_reentrant=reentrant))
    with pytest.raises(InputError, match="activation checkpointing of single layers"):
        torch.autograd.backward([weighted(outs)])


def _above(second: AttentionInputs, way: str, below: str = "residual") -> Tensor:
    """The output of a layer above a causal one that was computed `below`."""
    residual = ResidualScores()
    attend(replace(make_layers()[0], residual_scores=residual), below)
    kernel, why, _ = reasons(replace(second, residual_scores=residual))
    assert kernel == ("residual" if below == "residual" else "concatenated")
    assert "layers below were summed by it" in why
    return attend(replace(second, residual_scores=residual), way)


@pytest.mark.parametrize(
    ("case", "more", "way", "below", "said"),
    [
        ("causal", {"rows": 9, "keys": 9}, "residual", "residual", r"same shape.*\b21\b.*\b9\b"),
        ("causal", {"window": 3}, "residual", "residual", "must see the same pairs"),
        ("bidirectional", {}, "residual", "residual", "must see the same pairs"),
        ("irregular", {}, "residual", "residual", "must see the same pairs"),
        ("causal", {}, "concatenated", "residual", "summed by the residual kernel"),
        ("causal", {}, "residual", "concatenated", "summed by the concatenated kernel"),
        ("causal", {}, "reference", "residual", "summed by the residual kernel"),
        ("causal", {"attn_mask": LEARNED}, "auto", "residual", "summed by the residual kernel"),
    ],
)
def test_layers_have_one_shape_one_kernel_and_see_the_same_pairs(
    case: str, more: dict[str, Any], way: str, below: str, said: str
) -> None:
    with pytest.raises(InputError, match=said):
        _above(make_layers(case, **more)[1], way, below)


def test_other_ways_may_be_mixed_and_no_other_kernel_serves() -> None:
    second = make_layers()[1]
    torch.testing.assert_close(
        _above(second, "reference", "concatenated"), _above(second, "concatenated", "reference")
    )
    with pytest.raises(InputError, match=r"cannot serve this: .*residual scores"):
        attend(replace(second, residual_scores=ResidualScores()), "chunked")
    with pytest.raises(InputError, match="without residual scores"):
        attend(second, "residual")


def test_a_causal_buffer_holds_half_of_the_pairs_and_goes_with_the_backward() -> None:
    residual = ResidualScores()
    layers = make_layers(count=5, rows=64, keys=64, batch=1)
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
    outs = [attend(replace(p, residual_scores=residual), "residual") for p in make_layers()]
    gone = weakref.ref(residual.buffer)
    del residual, outs
    assert gone() is None
