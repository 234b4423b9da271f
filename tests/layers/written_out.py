"""What tests of layers write out by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import apart
from normattn import Score, attention
from normattn.layers.cache import KeyValueCache


def rotate(x: Tensor) -> Tensor:
    """Rotary position by complex numbers, half-split layout; x (…, T, D)."""
    half = x.shape[-1] // 2
    theta = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * theta
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(
        torch.ones_like(angle), angle
    )
    return torch.cat([turned.real, turned.imag], -1)


def read_on(
    score: Score, qkv: Sequence[Tensor], cuts: Sequence[int], cache: KeyValueCache | None = None
) -> Tensor:
    """Attention over the spans between these cuts, one after another, with a cache."""
    cache = KeyValueCache() if cache is None else cache
    spans = [[x[:, :, a:b] for x in qkv] for a, b in pairwise(cuts)]
    return torch.cat([attention(q, k, v, score, cache=cache) for q, k, v in spans], 2)


def of_program(program: str, cases: object) -> dict[str, Any]:
    """What a Python program makes of `cases`, given as JSON, in a process of its own."""
    done = apart.run(program, told=json.dumps(cases))
    assert done.code == 0, done.err[-2000:]
    found: dict[str, Any] = json.loads(done.out)
    return found
