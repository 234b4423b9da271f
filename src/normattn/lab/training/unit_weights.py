"""nGPT's weights: after each step each matrix consists of vectors of length 1, along the width.

These are the rows of embeddings, of the head and of what reads the stream (W_q, W_k, W_v, W_up),
and the columns of what writes to it (W_out, W_down). Source: arXiv 2410.01131;
github.com/NVIDIA/ngpt, `normalize_matrices` of train.py.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from normattn.errors import InputError
from normattn.layers import NGPT, CrossAttention
from normattn.layers.attention import SelfAttention
from normattn.layers.feed_forward import GELU, SwiGLU


class UnitWeights:
    """Normalises the trained matrices of a model; `InputError` where nGPT places no sub-layer."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        if not any(isinstance(module, NGPT) for module in modules):
            raise InputError(
                "unit_weights is true, but weight norms may only be fixed with placement nGPT"
            )
        writing = {m.out for m in modules if isinstance(m, SelfAttention | CrossAttention)}
        writing |= {m.down for m in modules if isinstance(m, SwiGLU | GELU)}
        # A tied head shares the embedding's parameter, which is here once.
        self._axes = {
            module.weight: 0 if module in writing else 1
            for module in modules
            if isinstance(module, nn.Linear | nn.Embedding) and module.weight.requires_grad
        }

    @torch.no_grad()
    def normalise(self) -> None:
        """Bring every vector to length 1; one of zeros stays."""
        for weight, axis in self._axes.items():
            weight.copy_(F.normalize(weight, dim=axis))
