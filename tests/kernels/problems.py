"""Inputs of attention kernels for tests: one builder for all, and named masks and changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from normattn.kernels import AttentionInputs, AttentionMask

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
    layout: Callable[[str, Tensor], Tensor] = lambda name, x: x,
    **mask: Any,
) -> AttentionInputs:
    """Normal q (times `scale`), k and v, always the same; `mask` are fields of the mask.

    `change` adds a bias by distance, a sink, a cap of 2, far queries and keys from distance
    `far_from` on, or all of them. `layout` lays an operand out in memory.
    """
    seed, at = torch.Generator().manual_seed(rows), torch.arange(keys)

    def leaf(name: str, *shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=seed, dtype=torch.float64)
        drawn = drawn * (scale if name in ("q", "far_q") else 1)
        return layout(name, drawn.to(dtype)).requires_grad_(learned)

    seen = AttentionMask(
        **{"causal": True, "aligned": True, **mask}, query=at[keys - rows :], key=at
    )
    q, k = leaf("q", batch, heads, rows, size), leaf("k", batch, groups, keys, size)
    inputs = AttentionInputs(q, k, leaf("v", batch, groups, keys, values or size), seen)
    if change in ("two regimes", "all"):
        far_q = leaf("far_q", batch, heads, rows, size)
        far_k = leaf("far_k", batch, groups, keys, size)
        inputs = replace(inputs, far_q=far_q, far_k=far_k, window=far_from)
    if change in ("bias", "all"):
        inputs = replace(inputs, bias=leaf("bias", heads, keys))
    if change in ("sink", "all"):
        inputs = replace(inputs, sink=leaf("sink", heads))
    return replace(inputs, cap=2.0) if change in ("cap", "all") else inputs


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
