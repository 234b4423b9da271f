"""What tests of layers write out by hand."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

import apart


def rotate(x: Tensor) -> Tensor:
    """Rotary position by complex numbers, half-split layout; x (…, T, D)."""
    half = x.shape[-1] // 2
    theta = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * theta
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(
        torch.ones_like(angle), angle
    )
    return torch.cat([turned.real, turned.imag], -1)


def of_program(program: str, cases: object) -> dict[str, Any]:
    """What a Python program makes of `cases`, given as JSON, in a process of its own."""
    done = apart.run(program, told=json.dumps(cases))
    assert done.code == 0, done.err[-2000:]
    found: dict[str, Any] = json.loads(done.out)
    return found


def assert_agree(ours: Tensor, expected: Tensor, leaves: list[Tensor]) -> None:
    """Equal outputs, and equal gradients of the leaves, to about nine digits."""
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-10)
    weights = torch.linspace(-1, 1, ours.numel(), dtype=ours.dtype).view_as(ours)
    grads = (torch.autograd.grad(x, leaves, weights, retain_graph=True) for x in (ours, expected))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)
