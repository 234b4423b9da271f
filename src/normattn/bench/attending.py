"""Our attention as entries: through `normattn.attention`, and by a kernel alone.

Legend: B batch, H heads, N tokens, D head dimension.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.bench.case import Work
from normattn.kernels import Problem, Visibility, attend, choose
from normattn.lab.runs.timing import Step
from normattn.layers.attend import attention, regular_positions
from normattn.score import Score, ScoreSpec

_SMALL = 128
Call = Callable[[], Tensor]
Kind = Literal["plain", "two-regime", "fixed bias", "learned bias"]


@dataclass(frozen=True)
class Causal:
    """Shape, precision and pass of one causal attention."""

    length: int
    dtype: torch.dtype
    backward: bool
    device: str = "cpu"
    batch: int = 1
    heads: int = 4
    size: int = 64

    def tensors(self, count: int) -> list[Tensor]:
        """`count` normal tensors (B, H, N, D), differentiated if the backward is measured."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.batch, self.heads, self.length, self.size)
        made = [torch.randn(shape, generator=generator) for _ in range(count)]
        return [x.to(self.device, self.dtype).requires_grad_(self.backward) for x in made]

    def step(self, call: Call, inputs: Sequence[Tensor]) -> Step:
        """Call it without gradients, or with those of `inputs` for one fixed gradient of out."""
        if not self.backward:
            return torch.no_grad()(call)
        grad = dataclasses.replace(self, backward=False).tensors(1)[0]
        inputs = [x for x in inputs if x.requires_grad]

        def step() -> object:
            return torch.autograd.grad(call(), inputs, grad)

        return step

    def work(self) -> Work:
        """Two products forward and five backward over the causal pairs; each tensor once."""
        heads = self.batch * self.heads
        pairs = heads * self.length * (self.length + 1) / 2
        tensor = float(heads * self.length * self.size * self.dtype.itemsize)
        if self.backward:
            return Work(14 * pairs * self.size, 12 * tensor, 2 * pairs)
        return Work(4 * pairs * self.size, 4 * tensor, pairs)

    def small(self) -> Causal:
        """The same at a few tokens."""
        return dataclasses.replace(self, length=min(self.length, _SMALL))


@dataclass(frozen=True)
class OfCausal(ABC):
    """An entry whose work is that of a causal attention."""

    call: Causal

    @abstractmethod
    def build(self) -> Step:
        """Make the tensors, and return the step that is timed."""

    def work(self) -> Work:
        """The least work of causal attention."""
        return self.call.work()

    def small(self) -> OfCausal:
        """The same at a few tokens."""
        return dataclasses.replace(self, call=self.call.small())


@dataclass(frozen=True)
class Scored(OfCausal):
    """`normattn.attention` with a score: what a user calls, dispatcher and all."""

    spec: str

    def build(self) -> Step:
        """The call on fixed queries, keys and values."""
        q, k, v = self.call.tensors(3)
        score = self._score()
        inputs = [q, k, v, *score.parameters()]

        def attended() -> Tensor:
            return attention(q, k, v, score)

        return self.call.step(attended, inputs)

    def kernel(self) -> str:
        """The kernel that the dispatcher takes."""
        q, k, v = self.call.tensors(3)
        at = regular_positions(self.call.length, self.call.length, q.device)
        seen = Visibility(True, at.query, at.key, at.regular)
        with torch.set_grad_enabled(self.call.backward):
            return choose(self._score()(q, k, v, at, seen)).name

    def _score(self) -> Score:
        spec = ScoreSpec.parse(self.spec)
        return Score(spec, self.call.heads, self.call.size).to(self.call.device)


@dataclass(frozen=True)
class KernelAlone(OfCausal):
    """A kernel on a prepared problem: no normalisation and no rotation is measured with it."""

    kind: Kind
    backend: str = "auto"
    window: int = 512

    def build(self) -> Step:
        """The kernel's call on fixed tensors."""
        problem = self.problem()
        inputs = [problem.q, problem.k, problem.v, problem.far_q, problem.far_k, problem.bias]
        kept = [x for x in inputs if x is not None]
        return self.call.step(lambda: attend(problem, self.backend), kept)

    def kernel(self) -> str:
        """The kernel that is taken."""
        return choose(self.problem(), self.backend).name

    def problem(self) -> Problem:
        """The problem of this kind; queries carry the scale 1/√D."""
        q, k, v, far_q, far_k = self.call.tensors(5)
        with torch.no_grad():
            q /= self.call.size**0.5
            far_q /= self.call.size**0.5
        positions = torch.arange(self.call.length, device=self.call.device)
        problem = Problem(q, k, v, Visibility(True, positions, positions, aligned=True))
        if self.kind == "two-regime":
            return dataclasses.replace(problem, far_q=far_q, far_k=far_k, window=self.window)
        if self.kind == "plain":
            return problem
        slopes = slopes_of(self.call.heads).to(self.call.device)
        bias = -slopes[:, None] * positions
        learned = self.kind == "learned bias" and self.call.backward
        return dataclasses.replace(problem, bias=bias.requires_grad_(learned))


def slopes_of(heads: int) -> Float[Tensor, " h"]:
    """ALiBi's slopes 2^(−8(h + 1)/H), H a power of two (arXiv 2108.12409)."""
    return 2.0 ** (-8 * torch.arange(1, heads + 1) / heads)
