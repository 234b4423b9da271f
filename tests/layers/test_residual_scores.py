"""Residual scores and features: by `attention`, in models, by chunks, tokens and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
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
def test_the_running_sum(recipe: Recipe, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
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
    plain = name.partition("-")[0]
    layers = [_drawn(2, 1, layer) for layer in range(LAYERS)]
    ours, expected = [], []
    for number, ((q, k, v), below) in enumerate(zip(layers, _residual(name), strict=True)):
        ours.append(attention(q, k, v, name, causal, residual=below))
        if "ValueResidual" in name:
            hand = q, k, 0.25 * layers[0][2] + 0.75 * v if number else v
        else:
            queries, keys, values = (sum(x) for x in zip(*layers[: number + 1], strict=True))
            hand = queries, keys, values if name.endswith("QKV") else v
        expected.append(attention(*hand, plain, causal, backend="reference"))
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)
    weights = [torch.linspace(-1, n, out.numel()).view(out.shape) for n, out in enumerate(ours, 1)]
    leaves = [x for qkv in layers for x in qkv]
    grads = [torch.autograd.grad(outs, leaves, weights) for outs in (ours, expected)]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-10)


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


@pytest.mark.parametrize("part", ["RealFormer", "ResidualQK", "ResidualQKV"])
def test_a_residual_serves_one_shape(part: str) -> None:
    name = f"Baseline-{part}"
    below, above, *_ = _residual(name)
    attention(*_drawn(2, 2, 0), name, residual=below)
    q, k, v = (x[:, :, :5] for x in _drawn(2, 2, 0))
    with pytest.raises(InputError, match="same shape"):
        attention(q, k, v, name, residual=above)


SHARING = ["Baseline-ValueResidual", "Baseline-ResidualQK", "KNA-logn-ResidualQKV@8"]
SHARING += ["QKRMSNorm-ResidualQK-Sink"]


class Stack(nn.Module):
    """Attention layers of a user's own."""

    def __init__(self, score: str, backend: str = "auto") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Attention(16, 2, score=score) for _ in range(3)).double()
        self.score, self.backend = score, backend

    def forward(self, x: Tensor, residual: Any = None, reentrant: bool | None = None) -> Tensor:
        """With residuals of its own, unless given; each layer checkpointed, if told how."""
        for layer, below in zip(self.layers, residual or _residual(self.score, 3), strict=True):
            call = partial(layer, residual=below, backend=self.backend)
            x = x + (call(x) if reentrant is None else checkpoint(call, x, use_reentrant=reentrant))
        return x


def _gradients(stack: Stack, read: Callable[[Tensor], Tensor]) -> list[Tensor]:
    stack.zero_grad()
    (x,) = tensors((2, 7, 16), seed=1)
    torch.autograd.backward(read(x).square().sum())
    return [leaf.grad for leaf in (x, *stack.parameters()) if leaf.grad is not None]


@pytest.mark.parametrize(
    ("score", "backend"),
    [
        *((score, "auto") for score in [*SHARING, "Baseline-RealFormer"]),
        ("Baseline-ResidualQK", "reference"),
        ("Baseline-ResidualQKV", "chunked"),
        ("Baseline-RealFormer", "concatenated"),
        ("KNA-RealFormer(running_mean=true)", "reference"),
    ],
)
def test_activation_checkpointing_leaves_gradients_as_they_are(score: str, backend: str) -> None:
    stack = Stack(score, backend)
    # A buffer of residual scores is made within the one checkpoint, and refused in one per layer.
    buffer = (score, backend) == ("Baseline-RealFormer", "auto")
    residual = None if buffer else _residual(score, 3)

    def whole(x: Tensor) -> Tensor:
        """One checkpoint around all layers."""
        out: Tensor = checkpoint(partial(stack, residual=residual), x, use_reentrant=False)
        return out

    plain = _gradients(stack, stack)
    reads: list[Any] = [whole] if buffer else [whole, partial(stack, reentrant=False)]
    for read in reads:
        torch.testing.assert_close(_gradients(stack, read), plain, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    ("score", "backend", "reentrant", "said"),
    [
        ("Baseline-RealFormer", "auto", False, "backend='concatenated'"),
        ("Baseline-ResidualQK", "auto", True, "use_reentrant=False"),
        ("Baseline-ResidualQKV", "reference", True, "use_reentrant=False"),
        ("Baseline-RealFormer", "concatenated", True, "use_reentrant=False"),
        ("Baseline-RealFormer", "reference", True, "use_reentrant=False"),
    ],
)
def test_lost_gradients_are_refused(score: str, backend: str, reentrant: bool, said: str) -> None:
    """Those of checkpoints that fill a buffer twice, or forget the layers below."""
    stack = Stack(score, backend)
    with pytest.raises(InputError, match=said):
        _gradients(stack, partial(stack, reentrant=reentrant))


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
    inputs = tensors((2, 7, 16), (2, 5, 16))
    with torch.set_grad_enabled(learning):
        outs, alone = [stack(x, residual) for x in inputs], [stack(x) for x in inputs]
    torch.testing.assert_close(outs, alone, rtol=1e-11, atol=1e-12)
    if learning:
        losses = [sum(out.square().sum() for out in each) for each in (outs, alone)]
        grads = [torch.autograd.grad(loss, inputs) for loss in losses]
        torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("score", ["Baseline-ResidualQK", "Baseline-RealFormer"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_layer_left_out_is_not_read_from_the_forward_before(score: str, backend: str) -> None:
    stack, residual = Stack(score, backend), _residual(score, 3)
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    stack(x, residual)
    stack.layers[0](x, residual=residual[0], backend=backend)
    with pytest.raises(InputError):
        stack.layers[2](x, residual=residual[2], backend=backend)
