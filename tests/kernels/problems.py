"""Inputs of attention kernels for tests: one builder for all, and named masks and changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from normattn.kernels import AttentionInputs, AttentionMask, attend
from normattn.kernels.residual_scores import ResidualScores

CHANGES = ("plain", "bias", "sink", "cap", "two regimes", "all")


def make_inputs(
    rows: int = 11,
    keys: int = 17,
    change: str = "plain",
    *,
    batch: int = 2,
    heads: int = 4,
    groups: int = 2,
    size: int = 8,
    values: int | None = None,
    far_from: int = 5,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float64,
    learned: bool = True,
    seed: int | None = None,
    layout: Callable[[str, Tensor], Tensor] = lambda name, x: x,
    **mask: Any,
) -> AttentionInputs:
    """Normal q (times `scale`), k and v, the same for a seed; `mask` are fields of the mask.

    `change` adds a bias by distance, a sink, a cap of 2, these three ("one regime"), far queries
    and keys from distance `far_from` on, or all of them. `layout` lays an operand out in memory.
    """
    generator = torch.Generator().manual_seed(rows if seed is None else seed)
    at = torch.arange(keys)

    def leaf(name: str, *shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        drawn = drawn * (scale if name in ("q", "far_q") else 1)
        return layout(name, drawn.to(dtype)).requires_grad_(learned)

    mask = {"causal": True, "aligned": True, **mask}
    attention_mask = AttentionMask(query=at[keys - rows :], key=at, **mask)
    q, k = leaf("q", batch, heads, rows, size), leaf("k", batch, groups, keys, size)
    inputs = AttentionInputs(q, k, leaf("v", batch, groups, keys, values or size), attention_mask)
    if change in ("two regimes", "all"):
        far_q = leaf("far_q", batch, heads, rows, size)
        far_k = leaf("far_k", batch, groups, keys, size)
        inputs = replace(inputs, far_q=far_q, far_k=far_k, far_from=far_from)
    if change in ("bias", "one regime", "all"):
        inputs = replace(inputs, bias=leaf("bias", heads, keys))
    if change in ("sink", "one regime", "all"):
        inputs = replace(inputs, sink=leaf("sink", heads))
    return replace(inputs, cap=2.0) if change in ("cap", "one regime", "all") else inputs


def leaves_of(inputs: AttentionInputs) -> list[Tensor]:
    """The tensors that learn."""
    return [x for x in inputs.tensors if x is not None and x.requires_grad]


def in_float64(inputs: AttentionInputs) -> AttentionInputs:
    """The same numbers as new leaves in float64."""
    wide = [None if x is None else x.detach().double().requires_grad_() for x in inputs.tensors]
    return AttentionInputs.of(inputs.settings, wide)


def outputs_and_gradients(
    run: Callable[[AttentionInputs], Tensor], inputs: AttentionInputs, along: Tensor | None = None
) -> list[Tensor]:
    """The output, and the gradients of its sum (or of its product with `along`), 0 where none."""
    out = run(inputs)
    grads = torch.autograd.grad(
        out, leaves_of(inputs), torch.ones_like(out) if along is None else along, allow_unused=True
    )
    pairs = zip(leaves_of(inputs), grads, strict=True)
    return [out, *(torch.zeros_like(x) if g is None else g for x, g in pairs)]


def assert_all_close(
    ours: list[Tensor], expected: list[Tensor], error: float = 1e-11, where: str = ""
) -> None:
    """Equal in shape, and in value up to `error`, absolute and relative."""
    for one, two in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, two, atol=error, rtol=error, msg=lambda m: f"{where}: {m}")


def logits_of(p: AttentionInputs, product: Tensor) -> Tensor:
    """Cap, bias and mask on a product, by formula, and the sink's logit behind; −∞ where hidden."""
    logits = product if p.cap is None else p.cap * torch.tanh(product / p.cap)
    mask, distance = p.mask, p.mask.query[:, None] - p.mask.key
    if p.bias is not None:
        logits = logits + p.bias[:, distance.abs()]
    hidden = torch.zeros(p.q.shape[0], 1, *distance.shape, dtype=torch.bool)
    if mask.causal:
        hidden = hidden | (distance < 0)
    if mask.window is not None:
        hidden = hidden | ((distance.abs() >= mask.window) & (mask.key >= mask.sink_tokens))
    if mask.padding is not None:
        hidden = hidden | mask.padding[:, None, None]
    if mask.key_documents is not None and mask.query_documents is not None:
        other = mask.query_documents[:, :, None] != mask.key_documents[:, None]
        hidden = hidden | other[:, None]
    if mask.attn_mask is not None and mask.attn_mask.dtype == torch.bool:
        hidden = hidden | ~mask.attn_mask
    elif mask.attn_mask is not None:
        logits = logits + mask.attn_mask
    logits = logits.masked_fill(hidden, -torch.inf)
    if p.sink is None:
        return logits
    sink = p.sink[None, :, None, None].expand(*logits.shape[:3], 1)
    return torch.cat((logits, sink), -1)


# How T = 11 queries of 17 keys may be masked, in two rows of four heads.
T, S = 11, 17
ADDED = torch.randn(2, 4, T, S, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
ADDED[0, :, 3] = ADDED[1, 1, :, ::2] = -torch.inf
_OF = (torch.arange(S) // 5).expand(2, -1)
MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "not causal": {"causal": False},
    "window": {"window": 5},
    "window both ways": {"window": 5, "causal": False},
    "window and first keys": {"window": 4, "sink_tokens": 3},
    "padding": {"padding": torch.arange(S).expand(2, -1) < torch.tensor([[2], [13]])},
    "documents": {"query_documents": _OF[:, S - T :], "key_documents": _OF},
    "mask of every pair": {"attn_mask": torch.arange(2 * T * S).view(2, 1, T, S) % 3 > 0},
    "mask of every head": {"attn_mask": torch.arange(4 * S).view(1, 4, 1, S) % 5 > 1},
    "added": {"attn_mask": ADDED},
    "irregular": {"aligned": False},
}
R = 21
_PADDING = torch.arange(R) < torch.tensor([[0], [3]])
_NUMBERS = (torch.arange(R) >= R // 2).long().expand(2, -1)
# Layers of residual scores: what each is beside R queries and keys.
RESIDUAL: dict[str, dict[str, Any]] = {
    "causal": {},
    "bidirectional": {"causal": False},
    "last rows": {"rows": 9},
    "cross": {"rows": 9, "keys": 14, "causal": False},
    "one row": {"rows": 1},
    "window": {"keys": 33, "window": 5},
    "kept": {"window": 5, "sink_tokens": 2},
    "padding": {"padding": _PADDING},
    "padded encoder": {"padding": _PADDING, "causal": False},
    "documents": {"query_documents": _NUMBERS, "key_documents": _NUMBERS},
    "mask": {"attn_mask": torch.ones(R, R).tril(3) > 0},
    "floating": {"attn_mask": torch.eye(R, dtype=torch.float64)},
    "irregular": {"aligned": False},
    **{change: {"change": change} for change in ("cap", "bias", "sink", "one regime")},
}
WAYS = ("residual", "concatenated", "reference")


def make_layers(case: str = "causal", count: int = 3, **more: Any) -> list[AttentionInputs]:
    """Inputs of `count` layers, each with numbers of its own."""
    given = {"rows": R, "keys": R, "size": 4, "values": 6, **RESIDUAL[case], **more}
    return [make_inputs(**given, seed=layer) for layer in range(count)]


def run_layers(layers: list[AttentionInputs], way: str, mean: bool = False) -> list[Tensor]:
    """Each layer's output, its softmax over the sum (or the mean) of the scores so far."""
    residual = ResidualScores(mean)
    return [attend(replace(layer, residual_scores=residual), way) for layer in layers]
