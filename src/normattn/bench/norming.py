"""Norms of rows as entries: ours and torch's, forward and backward."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from normattn.bench.case import Work
from normattn.lab.runs.timing import Step
from normattn.layers.norms import LayerNorm, RMSNorm

Kind = Literal["LayerNorm", "RMSNorm", "nn.LayerNorm", "nn.RMSNorm"]
KINDS: dict[Kind, type[nn.Module]] = {
    "LayerNorm": LayerNorm,
    "RMSNorm": RMSNorm,
    "nn.LayerNorm": nn.LayerNorm,
    "nn.RMSNorm": nn.RMSNorm,
}
_EPS = 1e-6


@dataclass(frozen=True)
class Norming:
    """`rows` rows of `width` features normed, with the gradients of rows and parameters."""

    kind: Kind
    width: int
    rows: int
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    def build(self) -> Step:
        """The norm and its gradients on fixed tensors."""
        generator = torch.Generator().manual_seed(0)
        x, above = (
            torch.randn(self.rows, self.width, generator=generator).to(self.device, self.dtype)
            for _ in range(2)
        )
        norm = KINDS[self.kind](self.width, _EPS).to(self.device, self.dtype)
        inputs = (x.requires_grad_(), *norm.parameters())
        return lambda: torch.autograd.grad(norm(x), inputs, above)

    def work(self) -> Work:
        """Rows read and written forward; rows and gradient read, another written backward."""
        entries = float(self.rows * self.width)
        return Work(8.0 * entries, 5.0 * entries * self.dtype.itemsize)

    def small(self) -> Norming:
        """The same with few rows."""
        return dataclasses.replace(self, rows=16)
