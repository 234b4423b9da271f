"""Two-regime attention on a GPU in one pass, forward and backward, written in Triton.

score(i, j) = ⟨q_i, k_j⟩ where i − j < window, else ⟨far q_i, far k_j⟩

A block of pairs makes the one product that it needs; both only where the window's border crosses
it. Softmax goes along (online), in float32, so nothing of T × S is stored; the backward computes
the weights again from the log-sum-exp of each query.

Needs triton, which comes with torch for CUDA and as the extra `triton`, and is imported when
first used. With TRITON_INTERPRET=1 in the environment before that, the programs run on a CPU,
slowly, for tests.

Legend: B batch, H query heads, G key heads, T queries, S keys, D score size, E value size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.kernels.capabilities import interpreted
from normattn.kernels.derivatives import refuse_second_derivative
from normattn.kernels.problem import Problem


class TritonAttention(NamedTuple):
    """Output and, in float32, the log-sum-exp of each query's scores (without a gradient)."""

    out: Float[Tensor, "b h t e"]
    lse: Float[Tensor, "b h t"]


class _Launch:
    """The numbers that every program takes, from the tensors' shapes."""

    def __init__(self, q: Tensor, v: Tensor, near_start: int, window: int) -> None:
        self.batch, self.heads, self.queries, size = q.shape
        _, self.groups, self.keys, values = v.shape
        self.numbers = (self.heads, self.groups, self.queries, self.keys, near_start, window)
        self.block = _block(max(_padded(size), _padded(values)) * q.element_size())
        self.sizes = {
            "D": size,
            "E": values,
            "DP": _padded(size),
            "EP": _padded(values),
            "ROWS": self.block,
            "BLOCK": self.block,
            "UPCAST": interpreted(),
        }

    def by_queries(self, program: Any, *tensors: Tensor) -> None:
        """Run one of `triton_programs` for every block of queries."""
        self._run(program, tensors, self.queries, self.batch * self.heads)

    def by_keys(self, program: Any, *tensors: Tensor) -> None:
        """Run one of `triton_programs` for every block of keys."""
        self._run(program, tensors, self.keys, self.batch * self.groups)

    def _run(self, program: Any, tensors: tuple[Tensor, ...], rows: int, heads: int) -> None:
        if rows and heads:
            program[(-(-rows // self.block), heads)](*tensors, *self.numbers, **self.sizes)


def _block(row: int) -> int:
    """Query rows, and keys, of a block whose rows have so many bytes.

    With these the programs need no more than 80 KB of shared memory up to 512 bytes a row.
    """
    return 64 if row <= 128 else 32 if row <= 256 else 16


def _padded(size: int) -> int:
    """The next power of two; a product takes at least 16."""
    return int(max(16, 1 << (size - 1).bit_length()))


class _Triton(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        far_q: Tensor,
        far_k: Tensor,
        near_start: int,
        window: int,
    ) -> tuple[Tensor, Tensor]:
        from normattn.kernels import triton_programs

        tensors = [x.contiguous() for x in (q, k, v, far_q, far_k)]
        out = q.new_empty(*q.shape[:3], v.shape[-1])
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        launch = _Launch(q, v, near_start, window)
        launch.by_queries(triton_programs.forward, *tensors, out, lse)
        ctx.save_for_backward(*tensors, out, lse)
        ctx.settings = near_start, window
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from normattn.kernels import triton_programs

        refuse_second_derivative("the Triton kernel", "backend='reference'")
        q, k, v, far_q, far_k, out, lse = ctx.saved_tensors
        by_out = grads[0].contiguous()
        # delta_i = Σ_j weight_ij · ∂/∂weight_ij, in one sum over the values.
        delta = (by_out.float() * out.float()).sum(-1)
        given = q, k, v, far_q, far_k, by_out, lse, delta
        launch = _Launch(q, v, *ctx.settings)
        by_q, by_k, by_v, by_far_q, by_far_k = map(torch.empty_like, (q, k, v, far_q, far_k))
        launch.by_queries(triton_programs.backward_queries, *given, by_q, by_far_q)
        launch.by_keys(triton_programs.backward_keys, *given, by_k, by_far_k, by_v)
        return by_q, by_k, by_v, by_far_q, by_far_k, None, None


def triton_attention(problem: Problem) -> TritonAttention:
    """Output and log-sum-exp of a two-regime problem that the kernel serves (`capabilities`)."""
    p = problem
    out, lse = _Triton.apply(  # type: ignore[no-untyped-call]
        p.q, p.k, p.v, p.far_q, p.far_k, p.near_start, p.window
    )
    return TritonAttention(out, lse)


def triton_two_regime(problem: Problem) -> Float[Tensor, "b h t e"]:
    """softmax(score) · v in one pass on a GPU; keys may have fewer heads than queries."""
    return triton_attention(problem).out
