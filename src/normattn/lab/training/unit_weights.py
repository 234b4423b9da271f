"""nGPT's weight normalisation: vectors of length 1 along the model's width, after each step.

The vectors are the rows of embeddings, the head and input projections (W_q, W_k, W_v, W_up), and
the columns of output projections (W_out, W_down). Source: arXiv 2410.01131; github.com/NVIDIA/ngpt,
`normalize_matrices` of train.py.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from normattn.layers import CrossAttention
from normattn.layers.attention import SelfAttention
from normattn.layers.feed_forward import GELU, SwiGLU


class UnitWeights:
    """Normalises the trained matrices of a model with placement nGPT."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        outputs = {m.out for m in modules if isinstance(m, SelfAttention | CrossAttention)}
        outputs |= {m.down for m in modules if isinstance(m, SwiGLU | GELU)}
        # Keyed by parameter, so that a tied head counts once.
        self._axes = {
            module.weight: 0 if module in outputs else 1
            for module in modules
            if isinstance(module, nn.Linear | nn.Embedding) and module.weight.requires_grad
        }

    @torch.no_grad()
    def normalise(self) -> None:
        """Scale every vector to length 1; zero vectors stay zero."""
        for weight, axis in self._axes.items():
            weight.copy_(F.normalize(weight, dim=axis))
