"""Residual scores and features: by `attention`, in models, by chunks, tokens and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from normattn import Attention, InputError, Score, ScoreSpec, attention
from normattn.kernels import tiled
from normattn.layers.residual_scores import ResidualLayer, residual_layers
from score import oracle
from score.cases import built, learned, tensors
from score.recipe import Recipe

LAYERS, T, D = 4, 9, 8
RECIPES = [
    Recipe("Baseline"),
    Recipe("KNA", "logn", "interleaved"),
    Recipe("CosA", "logn+", "half", "YaRN", train_length=4),
    Recipe("QKRMSNorm", "", "none", bias="ALiBi"),
    Recipe("QKNorm2020", "", cap=0.7, sink=True),
    Recipe("Baseline", "logn", near=3),
    Recipe("QNA", "", "half", bias="KERPLELog"),
]
both = pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])


def _residual(name: str, layers: int = LAYERS) -> tuple[ResidualLayer, ...]:
    residual = residual_layers(ScoreSpec.parse(name), layers)
    assert residual is not None
    return residual


def _drawn(heads: int, groups: int, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = tensors((2, heads, T, D), (2, groups, T, D), (2, groups, T, 3), seed=layer)
    return q, k, v


@both
@pytest.mark.parametrize("recipe", RECIPES, ids=[r.text for r in RECIPES])
def test_every_layer_reads_the_running_sum(
    recipe: Recipe, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and gradients of every kernel against the oracle."""
    monkeypatch.setattr(tiled, "ROWS", 4)
    turn = RECIPES.index(recipe)
    heads, groups, mean = 2, 1 + turn % 2, turn % 3 == 1
    padding = torch.arange(T) < torch.tensor([[0], [2]]) if turn % 2 else None
    text, length = recipe.text.split("@")
    part = "RealFormer(running_mean=true)" if mean else "RealFormer"
    spec = ScoreSpec.parse(f"{text}-{part}@{length}")
    score = Score(spec, heads, D, groups).double()
    score.load_state_dict(built(recipe, heads, D, groups).state_dict())
    layers = [_drawn(heads, groups, layer) for layer in range(LAYERS)]
    leaves = [*(x for qkv in layers for x in qkv), *score.parameters()]
    below: list[Tensor] = []
    expected = [
        oracle.attend(
            *(recipe, q, k, v),
            causal=causal,
            padding=padding,
            learned=learned(score),
            below=below,
            layers=number if mean else 1,
        )
        for number, (q, k, v) in enumerate(layers, 1)
    ]
    weights = [torch.linspace(-1, n, out.numel()).view(out.shape) for n, out in enumerate(expected)]
    by_hand = torch.autograd.grad(expected, leaves, weights)
    for backend in ("auto", "reference", "concatenated"):
        outs = [
            attention(q, k, v, score, causal, key_padding=padding, backend=backend, residual=one)
            for (q, k, v), one in zip(layers, _residual(str(spec)), strict=True)
        ]
        ours = [*outs, *torch.autograd.grad(outs, leaves, weights)]
        torch.testing.assert_close(ours, [*expected, *by_hand], rtol=1e-9, atol=1e-10)


@both
@pytest.mark.parametrize(
    "name", ["Baseline-ResidualQK", "Baseline-ResidualQKV", "KNA-ValueResidual(share=0.25)"]
)
def test_residual_features_by_hand(name: str, causal: bool) -> None:
    """Rotation is linear: the sum of rotated queries is the rotated sum. Gradients, too."""
    residual, plain = _residual(name), name.partition("-")[0]
    layers = [_drawn(2, 1, layer) for layer in range(LAYERS)]
    totals = [torch.zeros(()), torch.zeros(())]
    for number, (q, k, v) in enumerate(layers):
        ours = attention(q, k, v, name, causal, residual=residual[number])
        if "ValueResidual" in name:
            hand = q, k, 0.25 * layers[0][2] + 0.75 * v if number else v
        else:
            queries, keys, values = (
                torch.stack(x).sum(0) for x in zip(*layers[: number + 1], strict=True)
            )
            hand = queries, keys, values if name.endswith("QKV") else v
        expected = attention(*hand, plain, causal, backend="reference")
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)
        weight = torch.linspace(-1, number + 1, ours.numel()).view(ours.shape)
        totals = [
            total + (out * weight).sum()
            for total, out in zip(totals, (ours, expected), strict=True)
        ]
    leaves = [x for qkv in layers for x in qkv]
    both_gradients = [torch.autograd.grad(total, leaves) for total in totals]
    torch.testing.assert_close(*both_gradients, rtol=1e-9, atol=1e-10)


def test_what_is_hidden_in_a_layer_is_not_lost_to_the_sum() -> None:
    """Summed before masks: a pair hidden below by a mask of its own still counts above."""
    spec, every = ScoreSpec.parse("Baseline-NoPE-RealFormer"), torch.ones(T, T, dtype=torch.bool)
    first, second = _drawn(2, 2, 0), _drawn(2, 2, 1)
    for backend in ("auto", "reference", "concatenated"):
        outs = []
        for mask in (every, torch.eye(T, dtype=torch.bool)):
            below, above, *_ = _residual(str(spec))
            attention(*first, spec, attn_mask=mask, backend=backend, residual=below)
            outs.append(attention(*second, spec, attn_mask=every, backend=backend, residual=above))
        torch.testing.assert_close(*outs)


@pytest.mark.parametrize(
    "name", ["Baseline-RealFormer", "Baseline-ResidualQK", "Baseline-ResidualQKV"]
)
def test_a_residual_serves_one_shape(name: str) -> None:
    below, above, *_ = _residual(name)
    attention(*_drawn(2, 2, 0), name, residual=below)
    q, k, v = (x[:, :, :5] for x in _drawn(2, 2, 0))
    with pytest.raises(InputError, match="same shape"):
        attention(q, k, v, name, residual=above)


SHARING = ["Baseline-ValueResidual", "Baseline-ResidualQK", "KNA-logn-ResidualQKV@8"]
SHARING += ["QKRMSNorm-ResidualQK-Sink"]


class Stack(nn.Module):
    """Attention layers of a user's own, each checkpointed if `every`, or all of them if `whole`."""

    def __init__(self, score: str, backend: str = "auto") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Attention(16, 2, score=score) for _ in range(3)).double()
        self.score, self.backend = score, backend

    def forward(self, x: Tensor, every: bool = False, reentrant: bool = False) -> Tensor:
        return self.read(x, _residual(self.score, 3), every, reentrant)

    def read(
        self, x: Tensor, residual: Sequence[Any], every: bool = False, reentrant: bool = False
    ) -> Tensor:
        for layer, below in zip(self.layers, residual, strict=True):
            call = partial(layer, residual=below, backend=self.backend)
            x = x + (checkpoint(call, x, use_reentrant=reentrant) if every else call(x))
        return x

    def whole(self, x: Tensor) -> Tensor:
        """One checkpoint around all layers, with residuals made outside of it."""
        residual = _residual(self.score, 3)
        out: Tensor = checkpoint(lambda y: self.read(y, residual), x, use_reentrant=False)
        return out


def _gradients(stack: Stack, read: Callable[[Tensor], Tensor]) -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.randn(2, 7, 16, dtype=torch.float64, requires_grad=True)
    loss = read(x).square().sum()
    return list(torch.autograd.grad(loss, [x, *stack.parameters()]))


@pytest.mark.parametrize(
    ("score", "backend"),
    [
        *((score, "auto") for score in SHARING),
        ("Baseline-ResidualQK", "reference"),
        ("Baseline-ResidualQKV", "chunked"),
        ("Baseline-RealFormer", "concatenated"),
        ("KNA-RealFormer(running_mean=true)", "reference"),
    ],
)
def test_activation_checkpointing_leaves_gradients_as_they_are(score: str, backend: str) -> None:
    stack = Stack(score, backend)
    plain = _gradients(stack, stack)
    for read in (partial(stack, every=True), stack.whole):
        torch.testing.assert_close(_gradients(stack, read), plain, rtol=1e-11, atol=1e-12)


def test_a_buffer_is_not_filled_once_more() -> None:
    stack = Stack("Baseline-RealFormer")
    with pytest.raises(InputError, match="backend='concatenated'"):
        _gradients(stack, partial(stack, every=True))


@pytest.mark.parametrize(
    ("score", "backend"),
    [
        ("Baseline-ResidualQK", "auto"),
        ("Baseline-ResidualQKV", "reference"),
        ("Baseline-RealFormer", "concatenated"),
        ("Baseline-RealFormer", "reference"),
    ],
)
def test_reentrant_checkpoints_are_refused(score: str, backend: str) -> None:
    """Their forward runs without gradients, so that those of the layers below would be lost."""
    stack, x = Stack(score, backend), torch.randn(2, 7, 16, dtype=torch.float64, requires_grad=True)
    loss = stack(x, every=True, reentrant=True).square().sum()
    with pytest.raises(InputError, match="use_reentrant=False"):
        loss.backward()


@pytest.mark.parametrize(
    ("score", "backend"),
    [
        *((f"Baseline-{name}", "auto") for name in ("ResidualQK", "ResidualQKV", "ValueResidual")),
        *(("Baseline-RealFormer", backend) for backend in ("auto", "concatenated")),
        ("KNA-RealFormer(running_mean=true)", "reference"),
    ],
)
@pytest.mark.parametrize("learning", [True, False])
def test_a_second_forward_begins_anew(score: str, backend: str, learning: bool) -> None:
    """With the residuals of the first, whose gradients stay right, and with another length."""
    stack, residual = Stack(score, backend), _residual(score, 3)
    torch.manual_seed(2)
    first, second = (
        torch.randn(2, n, 16, dtype=torch.float64, requires_grad=learning) for n in (7, 5)
    )
    with torch.set_grad_enabled(learning):
        outs = [stack.read(x, residual) for x in (first, second)]
        alone = [stack(x) for x in (first, second)]
    for one, other, x in zip(outs, alone, (first, second), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)
        if learning:
            grads = (torch.autograd.grad(y.square().sum(), x)[0] for y in (one, other))
            torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("score", ["Baseline-ResidualQK", "Baseline-RealFormer"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_layer_left_out_is_not_read_from_the_forward_before(score: str, backend: str) -> None:
    stack, residual = Stack(score, backend), _residual(score, 3)
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    stack.read(x, residual)
    stack.layers[0](x, residual=residual[0], backend=backend)
    with pytest.raises(InputError):
        stack.layers[2](x, residual=residual[2], backend=backend)
