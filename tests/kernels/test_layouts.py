"""Every kernel, every operand, every layout in memory: what a contiguous copy would give.

The stock flash operators, called directly, assume a dense last axis and read out of bounds without
one; nothing may depend on how an operand lies.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from normattn.kernels import AttentionInputs, attend
from normattn.kernels.dispatch import KERNELS
from score.layouts import EVERY, Layout
from thorough import half_of

from .problems import make_inputs, outputs_and_gradients

S, NAMES = 20, ("q", "k", "v", "far_q", "far_k", "gradient")
# In such an order that each half of them has both types.
KINDS = [
    *(("two regimes", torch.float32), ("two regimes", torch.bfloat16)),
    *(("plain", torch.bfloat16), ("plain", torch.float32)),
    *(("bias", torch.float32), ("bias", torch.bfloat16)),
]


def _cases(change: str) -> list[tuple[int, tuple[str, ...]]]:
    """Numbers of queries, and what is laid out strangely: one by one where most can be missed."""
    alone = [(S, (name,)) for name in NAMES] if change == "two regimes" else [(S, NAMES)]
    return [*alone, (6, NAMES)]


@pytest.mark.parametrize(("layout", "kind"), half_of(EVERY, KINDS))
def test_any_layout(layout: Layout, kind: tuple[str, torch.dtype]) -> None:
    change, dtype = kind
    for rows, strange in _cases(change):

        def laid(name: str, x: Tensor, strange: tuple[str, ...] = strange) -> Tensor:
            return layout(x) if name in strange else x

        def copied(name: str, x: Tensor, strange: tuple[str, ...] = strange) -> Tensor:
            return laid(name, x, strange).contiguous()

        def made(how: object, rows: int = rows) -> AttentionInputs:
            return make_inputs(rows, S, change, far_from=12, dtype=dtype, layout=how)  # type: ignore[arg-type]

        inputs, plain = made(laid), made(copied)
        by_out = laid("gradient", torch.randn(inputs.q.shape, dtype=dtype))
        for kernel in KERNELS:
            if kernel.why_not(inputs) is not None:
                continue

            def run(inputs: AttentionInputs, name: str = kernel.name) -> Tensor:
                return attend(inputs, name)

            ours = outputs_and_gradients(run, inputs, by_out)
            expected = outputs_and_gradients(run, plain, by_out.contiguous())
            for mine, theirs in zip(ours, expected, strict=True):
                off = 1e-5 if mine.dtype == torch.float32 else 2e-2
                mine, theirs = mine.detach().double(), theirs.detach().double()
                error = (mine - theirs).abs().max() / theirs.abs().max().clamp(min=1)
                assert float(error) < off, f"{kernel.name}, {strange}: {float(error)}"
