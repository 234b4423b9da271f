"""Linear + cross-entropy over a large vocabulary as entries: ours by chunks, torch's whole."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from normattn.bench.case import Work
from normattn.kernels import linear_cross_entropy
from normattn.lab.runs.timing import Step


@dataclass(frozen=True)
class Vocabulary:
    """mean_i −log softmax(h_i Wᵀ)[y_i] with its gradients in h and W, of `tokens` rows."""

    tokens: int
    vocabulary: int
    dtype: torch.dtype = torch.float32
    width: int = 256
    device: str = "cpu"
    chunked: bool = True

    def build(self) -> Step:
        """The loss and both gradients on fixed tensors."""
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(self.tokens, self.width, generator=generator)
        weight = torch.randn(self.vocabulary, self.width, generator=generator) * 0.02
        hidden = hidden.to(self.device, self.dtype).requires_grad_()
        weight = weight.to(self.device, self.dtype).requires_grad_()
        drawn = torch.randint(self.vocabulary, (self.tokens,), generator=generator)
        targets = drawn.to(self.device)

        def step() -> object:
            if self.chunked:
                loss = linear_cross_entropy(hidden, weight, targets).loss
            else:
                loss = F.cross_entropy(F.linear(hidden, weight), targets)
            return torch.autograd.grad(loss, (hidden, weight))

        return step

    def work(self) -> Work:
        """One product forward and two backward; hidden, weight and their gradients once."""
        entries = self.tokens * self.vocabulary
        rows = self.tokens + self.vocabulary
        moved = 2.0 * rows * self.width * self.dtype.itemsize
        return Work(6.0 * entries * self.width, moved, float(entries))

    def small(self) -> Vocabulary:
        """The same with few rows and words."""
        return dataclasses.replace(self, tokens=64, vocabulary=256)
