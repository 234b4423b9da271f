"""A stack of blocks, forward and backward, as an entry: with residual scores and without.

Legend: B batch, N tokens, W width, H heads.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.bench.case import Work
from normattn.kernels import Problem
from normattn.lab.runs.timing import Step
from normattn.layers.residual_scores import ResidualLayer, residual_layers
from normattn.models.config import StackConfig
from normattn.models.flops import stack_flops
from normattn.models.transformer import AttentionContext, Blocks
from normattn.score import ScoreSpec


class StoredScores(ResidualLayer):
    """Residual scores as they are usually written: a whole matrix handed from layer to layer.

    s_n = q_n k_nᵀ + s_{n−1}, softmax of the masked s_n, by plain autograd (as in arXiv 2012.11747).
    """

    def __init__(self) -> None:
        """Nothing from below."""
        self._scores: Tensor | None = None

    def join(self, problem: Problem) -> Problem:
        """No kernel of the library takes part."""
        raise NotImplementedError

    def attend(self, problem: Problem, backend: str = "auto") -> Float[Tensor, "b h t e"]:
        """softmax(s_n) · v."""
        score = problem.q @ problem.k.transpose(-1, -2)
        self._scores = score if self._scores is None else score + self._scores
        shown = self._scores
        hidden = problem.visibility.hidden(slice(None), slice(None))
        if hidden is not None:
            shown = shown.masked_fill(hidden, -torch.inf)
        return torch.softmax(shown, -1) @ problem.v


class _Bidirectional(StackConfig):
    causal: ClassVar[bool] = False


@dataclass(frozen=True)
class StackPass:
    """Forward and backward of six blocks of width 256: attention with 4 heads and SwiGLU, PreLN.

    Rows of (B, N, W) numbers go in; the gradients are those of them and of all parameters, for one
    fixed gradient of what comes out. `stored`: the residual scores are whole matrices.
    """

    score: str
    length: int
    batch: int = 1
    causal: bool = True
    stored: bool = False
    layers: int = 6
    width: int = 256
    heads: int = 4
    device: str = "cpu"

    def config(self) -> StackConfig:
        """The blocks."""
        kind = StackConfig if self.causal else _Bidirectional
        return kind(
            dim=self.width,
            layers=self.layers,
            heads=self.heads,
            train_length=self.length,
            score=ScoreSpec.parse(self.score),
        )

    def build(self) -> Step:
        """The pass on fixed numbers; weights are drawn from seed 0."""
        torch.manual_seed(0)
        config = self.config()
        blocks = Blocks(config).to(self.device)
        generator = torch.Generator().manual_seed(1)
        shape = self.batch, self.length, self.width
        x, grad = (torch.randn(shape, generator=generator).to(self.device) for _ in range(2))
        inputs = [x.requires_grad_(), *blocks.parameters()]

        def step() -> object:
            residual = self._residual(config.score)
            out = x
            for layer, block in enumerate(blocks):
                below = None if residual is None else residual[layer]
                out = block(out, AttentionContext(causal=self.causal, residual=below))
            return torch.autograd.grad(out, inputs, grad)

        return step

    def _residual(self, spec: ScoreSpec) -> tuple[ResidualLayer, ...] | None:
        return (
            (StoredScores(),) * self.layers if self.stored else residual_layers(spec, self.layers)
        )

    def work(self) -> Work:
        """FLOPs by the stack's own account; the weights and their gradients once."""
        tokens = float(self.batch * self.length)
        config = self.config()
        pairs = tokens * (self.length + 1) * self.heads * self.layers
        exps = pairs if self.causal else 2 * pairs
        weights = self.layers * (4 + 8) * self.width**2
        return Work(stack_flops(config, self.length).training * tokens, 3.0 * 4 * weights, exps)

    def small(self) -> StackPass:
        """The same at a few tokens and layers."""
        return dataclasses.replace(self, length=min(self.length, 64), layers=2)
