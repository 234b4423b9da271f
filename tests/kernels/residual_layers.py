"""Layers with residual scores, and an oracle that writes the sum out.

The oracle adds whole matrices and leaves the gradients to autograd, without tiles or a buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from normattn.kernels import AttentionInputs, AttentionMask, attend
from normattn.kernels.residual_scores import ResidualScores

WAYS = ("residual", "concatenated", "reference")


@dataclass(frozen=True)
class Shape:
    """Of one layer; `alike` are fields of its inputs, `drawn` shapes of learned ones."""

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


Seen = Callable[[Shape], AttentionMask]


def seen_by(shape: Shape, causal: bool = True, **changes: Any) -> AttentionMask:
    key = torch.arange(shape.keys)
    return replace(AttentionMask(causal, key[shape.keys - shape.rows :], key, True), **changes)


def padding_of(shape: Shape) -> Tensor:
    return torch.arange(shape.keys) < 3 * torch.arange(shape.batch)[:, None]


def documents_of(shape: Shape) -> dict[str, Any]:
    number = (torch.arange(shape.keys) >= shape.keys // 2).long().expand(shape.batch, -1)
    return {
        "key_documents": number,
        "query_documents": number[:, shape.keys - shape.rows :],
    }


# (shape, visibility, fields of the problem, learned fields)
CASES: dict[str, tuple[Shape, Seen, dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "causal": (Shape(), seen_by, {}, {}),
    "bidirectional": (Shape(), lambda s: seen_by(s, False), {}, {}),
    "last rows": (Shape(rows=9), seen_by, {}, {}),
    "cross": (Shape(rows=9, keys=14), lambda s: seen_by(s, False), {}, {}),
    "one row": (Shape(rows=1), seen_by, {}, {}),
    "window": (Shape(rows=21, keys=33), lambda s: seen_by(s, window=5), {}, {}),
    "kept": (Shape(), lambda s: seen_by(s, window=5, kept=2), {}, {}),
    "padding": (Shape(), lambda s: seen_by(s, padding=padding_of(s)), {}, {}),
    "padded encoder": (Shape(), lambda s: seen_by(s, False, padding=padding_of(s)), {}, {}),
    "documents": (Shape(), lambda s: seen_by(s, **documents_of(s)), {}, {}),
    "mask": (Shape(), lambda s: seen_by(s, mask=torch.ones(21, 21).tril(3) > 0), {}, {}),
    "floating": (Shape(), lambda s: seen_by(s, mask=torch.eye(21, dtype=torch.float64)), {}, {}),
    "irregular": (Shape(), lambda s: seen_by(s, aligned=False), {}, {}),
    "cap": (Shape(), seen_by, {"cap": 1.5}, {}),
    "bias": (Shape(), seen_by, {}, {"bias": (4, 21)}),
    "sink": (Shape(), seen_by, {}, {"sink": (4,)}),
    "all": (Shape(repeat=1), seen_by, {"cap": 0.8}, {"bias": (2, 21), "sink": (2,)}),
}


def make_layers(
    shape: Shape,
    seen: AttentionMask,
    fields: dict[str, Any],
    learned: dict[str, tuple[int, ...]],
    count: int = 4,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> list[AttentionInputs]:
    generator = torch.Generator().manual_seed(seed)

    def leaf(*size: int) -> Tensor:
        drawn = torch.randn(size, generator=generator, dtype=torch.float64)
        return drawn.to(dtype).requires_grad_()

    s = shape
    return [
        AttentionInputs(
            leaf(s.batch, s.heads, s.rows, s.size),
            leaf(s.batch, s.groups, s.keys, s.size),
            leaf(s.batch, s.groups, s.keys, s.values),
            seen,
            **fields,
            **leaves_of(learned, leaf),
        )
        for _ in range(count)
    ]


def leaves_of(learned: dict[str, tuple[int, ...]], leaf: Callable[..., Tensor]) -> dict[str, Any]:
    return {name: leaf(*size) for name, size in learned.items()}


def inputs_of(layers: list[AttentionInputs]) -> list[Tensor]:
    return [x for layer in layers for x in layer.tensors if x is not None]


def run_layers(layers: list[AttentionInputs], way: str, mean: bool = False) -> list[Tensor]:
    residual = ResidualScores(mean)
    return [attend(replace(layer, residual_scores=residual), way) for layer in layers]


def by_hand(layers: list[AttentionInputs], mean: bool = False) -> list[Tensor]:
    """The sum of whole matrices, then cap, bias, masks, sink and softmax."""
    outs, total = [], torch.zeros((), dtype=torch.float64)
    for number, p in enumerate(layers, 1):
        repeat = p.q.shape[1] // p.k.shape[1]
        k, v = (x.repeat_interleave(repeat, 1) for x in (p.k, p.v))
        total = total + torch.einsum("bhtd,bhsd->bhts", p.q, k)
        exps = torch.exp(logits_of(p, total / number if mean else total))
        most = exps.sum(-1, keepdim=True)
        outs.append(exps[..., : v.shape[2]] / torch.where(most == 0, 1.0, most) @ v)
    return outs


def logits_of(p: AttentionInputs, product: Tensor) -> Tensor:
    """Cap, bias and mask on a product, by formula, and the sink's logit behind; −∞ where hidden."""
    logits = product if p.cap is None else p.cap * torch.tanh(product / p.cap)
    distance = p.visibility.query[:, None] - p.visibility.key
    if p.bias is not None:
        logits = logits + p.bias[:, distance.abs()]
    mask = p.visibility.mask
    if mask is not None and mask.dtype != torch.bool:
        logits = logits + mask
    logits = logits.masked_fill(hidden_by(p, distance), -torch.inf)
    if p.sink is None:
        return logits
    sink = p.sink[None, :, None, None].expand(*logits.shape[:3], 1)
    return torch.cat((logits, sink), -1)


def hidden_by(p: AttentionInputs, distance: Tensor) -> Tensor:
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


def weighted(outs: list[Tensor]) -> Tensor:
    """A loss that every output of every layer matters to."""
    total = outs[0].new_zeros(())
    for turn, out in enumerate(outs):
        total = total + (out * torch.linspace(-1, 1 + turn, out.numel()).view(out.shape)).sum()
    return total


def assert_agree(
    layers: list[AttentionInputs], way: str, mean: bool, tolerance: float = 1e-10
) -> None:
    ours, expected = run_layers(layers, way, mean), by_hand(layers, mean)
    for one, two in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, two, atol=tolerance, rtol=tolerance)
    inputs = inputs_of(layers)
    mine = torch.autograd.grad(weighted(ours), inputs)
    hand = torch.autograd.grad(weighted(expected), inputs)
    for one, two in zip(mine, hand, strict=True):
        torch.testing.assert_close(one, two, atol=tolerance, rtol=tolerance)


def causal_layers(count: int = 3) -> list[AttentionInputs]:
    shape = Shape()
    return make_layers(shape, seen_by(shape), {}, {}, count)


def assert_same(found: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two)
