"""A bucket of shapes: problems whose kernels take about the same time, and one of them to measure.

Legend: B batch, H query heads, G key heads, T queries, S keys, D head dimension.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from normattn.kernels.problem import Problem
from normattn.kernels.visibility import Visibility

LONGEST = 2048
"""Tokens from which on a choice is that of so many: twice that, where the far part must count."""
_PAIRS, _NUMBERS = 1 << 22, 1 << 20
_TYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
}


class Bucket(NamedTuple):
    """Attention on a CPU of one kind: batch and tokens are powers of two, the rest as it is.

    `backward` says whether gradients follow, `learned` whether the bias takes one, `trimmed`
    whether near keys are there from the first that is needed on.
    """

    dtype: str
    backward: bool
    batch: int
    heads: int
    key_heads: int
    rows: int
    keys: int
    size: int
    causal: bool
    window: int | None
    trimmed: bool
    biased: bool
    learned: bool

    @staticmethod
    def of(problem: Problem) -> Bucket | None:
        """That of a problem; None for a feature that leaves no choice, or none that is measured."""
        q, k, v, seen = problem.q, problem.k, problem.v, problem.visibility
        sizes = (*q.shape, k.shape[1], v.shape[2])
        if q.device.type != "cpu" or _without_choice(problem) or q.shape[3] != v.shape[3]:
            return None
        # A compiler's and an export's sizes may have no value, and an empty tensor has no time.
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            return None
        batch, heads, rows, size, key_heads, keys = sizes
        longest = LONGEST if problem.window is None else 2 * LONGEST
        rows, keys = (min(_power(tokens), longest) for tokens in (rows, keys))
        room = min(_PAIRS // (rows * keys), _NUMBERS // (keys * size))
        room = max(torch.get_num_threads(), room)
        groups = heads // key_heads
        key_heads = max(1, min(key_heads, room // groups))
        learned = problem.bias is not None and problem.bias.requires_grad
        gradients = learned or any(x is not None and x.requires_grad for x in problem.tensors)
        return Bucket(
            str(q.dtype).removeprefix("torch."),
            gradients and torch.is_grad_enabled(),
            max(1, min(_power(batch), room // (key_heads * groups))),
            key_heads * groups,
            key_heads,
            rows,
            keys,
            size,
            seen.causal,
            None if problem.window is None else min(problem.window, keys),
            problem.near_start > 0,
            problem.bias is not None,
            learned and torch.is_grad_enabled(),
        )

    def problem(self) -> Problem:
        """One of its problems, of normal numbers; the generators of torch stay as they are."""
        generator = torch.Generator().manual_seed(0)
        dtype = _TYPES[self.dtype]

        def normal(*shape: int, learned: bool = self.backward) -> Tensor:
            made = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
            return made.to(dtype).requires_grad_(learned)

        key = torch.arange(self.keys, device="cpu")
        rows = min(self.rows, self.keys)
        seen = Visibility(self.causal, key[self.keys - rows :], key, aligned=True)
        shape = self.batch, self.key_heads, self.keys, self.size
        far_q = far_k = None
        start = 0
        if self.window is not None:
            far_q = normal(self.batch, self.heads, rows, self.size)
            far_k = normal(*shape)
            start = max(0, self.keys - rows - self.window + 1) if self.trimmed else 0
        return Problem(
            q=normal(self.batch, self.heads, rows, self.size),
            k=normal(*shape[:2], self.keys - start, self.size),
            v=normal(*shape),
            visibility=seen,
            far_q=far_q,
            far_k=far_k,
            window=self.window,
            near_start=start,
            bias=normal(self.heads, self.keys, learned=self.learned) if self.biased else None,
        )

    def __str__(self) -> str:
        heads = f"{self.heads} heads"
        if self.key_heads != self.heads:
            heads += f" on {self.key_heads}"
        parts = [
            f"{self.dtype} {'forward and backward' if self.backward else 'forward'}",
            f"{self.batch} × {heads} of {self.size}",
            f"{self.rows} × {self.keys} {'causal' if self.causal else 'in full'}",
        ]
        if self.window is not None:
            parts.append(f"window {self.window}{' trimmed' if self.trimmed else ''}")
        if self.biased:
            parts.append(f"bias{' learned' if self.learned else ''}")
        return ", ".join(parts)


def _without_choice(problem: Problem) -> bool:
    """Whether one kernel serves it, or one that no measurement here stands for."""
    seen = problem.visibility
    others = (problem.carry, problem.pairs, problem.normaliser, problem.selection)
    placed = seen.aligned or not (problem.two_regimes or problem.bias is not None)
    more = any(x is not None for x in (*others, problem.sink, problem.cap))
    return more or problem.dropout > 0 or not (seen.plain and placed)


def _power(count: int) -> int:
    """The nearest power of two."""
    return 1 << round(math.log2(count))
