"""What tests of layers write out by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close

import apart
from normattn import InputError, Score, attention
from normattn.kernels import BACKENDS
from normattn.layers.cache import KeyValueCache


def rotate(x: Tensor) -> Tensor:
    """Rotary position by complex numbers, half-split layout; x (…, T, D)."""
    half = x.shape[-1] // 2
    theta = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * theta
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * angle)
    return torch.cat([turned.real, turned.imag], -1)


def read_on(
    score: Score, qkv: Sequence[Tensor], cuts: Sequence[int], cache: KeyValueCache | None = None
) -> Tensor:
    """Attention over the spans between these cuts, one after another, with a cache."""
    cache = KeyValueCache() if cache is None else cache
    spans = [[x[:, :, a:b] for x in qkv] for a, b in pairwise(cuts)]
    return torch.cat([attention(q, k, v, score, cache=cache) for q, k, v in spans], 2)


def assert_every_kernel_agrees(
    run: Callable[..., Tensor],
    expected: Tensor,
    leaves: Sequence[Tensor],
    must: Sequence[str] = ("auto", "reference"),
    rows: Tensor | float = 1.0,
    where: str = "",
) -> None:
    """Outputs and gradients of `run` by every backend that serves it; those of `must` do.

    `rows` is 0 where a query's output has no meaning.
    """
    # A gradient need not be contiguous either.
    weights = torch.linspace(-1.0, 1.0, expected.numel(), dtype=expected.dtype)
    weights = weights.reshape(expected.shape).mT.contiguous().mT * rows
    hand = [expected * rows, *torch.autograd.grad(expected, leaves, weights)]
    for backend in BACKENDS:
        try:
            out = run(backend=backend)
        except InputError as error:
            if backend in must or "kernel cannot serve this" not in str(error):
                raise
            continue
        ours = [out * rows, *torch.autograd.grad(out, leaves, weights)]
        for mine, other in zip(ours, hand, strict=True):
            if mine.dtype != other.dtype or not torch.allclose(mine, other, 1e-9, 1e-10):
                said = f"{where} by {backend}: {{}}".format
                assert_close(mine, other, rtol=1e-9, atol=1e-10, msg=said)


def of_program(program: str, cases: object) -> dict[str, Any]:
    """What a Python program makes of `cases`, given as JSON, in a process of its own."""
    done = apart.run(program, told=json.dumps(cases))
    assert done.code == 0, done.err[-2000:]
    found: dict[str, Any] = json.loads(done.out)
    return found
