"""Every kernel, every operand, every layout in memory: what a contiguous copy would give.

The stock flash operators, asked directly, assume a dense last axis and read out of bounds without
one; nothing may depend on how an operand lies.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from normattn.kernels import AttentionInputs, AttentionMask, attend
from normattn.kernels.dispatch import KERNELS
from score.layouts import EVERY, Layout

B, H, G, S, D, WINDOW = 2, 4, 2, 40, 8, 12
NAMES = ("q", "k", "v", "far_q", "far_k")
Change = Callable[[str, Tensor], Tensor]


def _problem(rows: int, kind: str, dtype: torch.dtype, change: Change) -> AttentionInputs:
    """A causal problem whose operands `change` has laid out."""
    seed = torch.Generator().manual_seed(rows)
    key = torch.arange(S)
    shapes = dict(zip(NAMES, [(H, rows), (G, S), (G, S), (H, rows), (G, S)], strict=True))
    made = {
        name: torch.randn((B, *shape, D), generator=seed, dtype=torch.float64).to(dtype)
        for name, shape in shapes.items()
    }
    q, k, v, far_q, far_k = (change(name, x).requires_grad_() for name, x in made.items())
    seen = AttentionMask(True, key[S - rows :], key, True)
    if kind == "far":
        return AttentionInputs(q, k, v, seen, far_q, far_k, WINDOW)
    bias = -torch.rand(H, S, generator=seed).to(torch.promote_types(dtype, torch.float32))
    return AttentionInputs(q, k, v, seen, bias=bias if kind == "bias" else None)


def _results(problem: AttentionInputs, backend: str, by_out: Tensor) -> list[Tensor]:
    out = attend(problem, backend)
    wanted = [x for x in problem.tensors if x is not None and x.requires_grad]
    return [out, *torch.autograd.grad(out, wanted, by_out)]


def _close(mine: Tensor, theirs: Tensor, where: str) -> None:
    """Equal but for the order of sums."""
    off = 1e-5 if mine.dtype == torch.float32 else 2e-2
    mine, theirs = mine.detach().double(), theirs.detach().double()
    error = (mine - theirs).abs().max() / theirs.abs().max().clamp(min=1)
    assert float(error) < off, f"{where}: {float(error)}"


def _cases(kind: str) -> list[tuple[int, tuple[str, ...]]]:
    """Numbers of queries, and what is laid out strangely: one by one where most can be missed."""
    every = (*NAMES, "gradient")
    alone = [(S, (name,)) for name in every] if kind == "far" else [(S, every)]
    return [*alone, (6, every)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["far", "plain", "bias"])
@pytest.mark.parametrize("layout", EVERY)
def test_any_layout(layout: Layout, kind: str, dtype: torch.dtype) -> None:
    for rows, strange in _cases(kind):
        by_out = torch.randn(
            (B, H, rows, D), generator=torch.Generator().manual_seed(0), dtype=torch.float64
        ).to(dtype)

        def change(name: str, x: Tensor, strange: tuple[str, ...] = strange) -> Tensor:
            return layout(x) if name in strange else x

        def copied(name: str, x: Tensor, strange: tuple[str, ...] = strange) -> Tensor:
            return change(name, x, strange).contiguous()

        problem, plain = (_problem(rows, kind, dtype, each) for each in (change, copied))
        above = change("gradient", by_out)
        for kernel in KERNELS:
            if kernel.why_not(problem) is not None:
                continue
            got = _results(problem, kernel.name, above)
            expected = _results(plain, kernel.name, above.contiguous())
            where = f"{kernel.name}, {strange}"
            for mine, theirs in zip(got, expected, strict=True):
                _close(mine, theirs, where)
