"""Layers: attention, gated attention unit, feed-forward, norms, residual connections.

Sizes in shapes: B batch, H query heads, G key heads, r = H/G, T queries, S keys, D head dimension,
E value size. With a cache T counts new tokens and S all of them.
"""

from normattn.layers.attention import Attention
from normattn.layers.cross_attention import CrossAttention
from normattn.layers.documents import documents_from_lengths, documents_from_positions
from normattn.layers.feed_forward import GELU, SwiGLU, swiglu_hidden
from normattn.layers.gau import GatedAttentionUnit
from normattn.layers.norms import Derf, DyT, LayerNorm, RMSNorm
from normattn.layers.residual import (
    NGPT,
    AttnRes,
    DeepNorm,
    PostLN,
    PreLN,
    ReZero,
    deepnorm_factors,
)
from normattn.layers.residual_scores import residual_layers

__all__ = [
    "AttnRes",
    "Attention",
    "CrossAttention",
    "DeepNorm",
    "Derf",
    "DyT",
    "GELU",
    "GatedAttentionUnit",
    "LayerNorm",
    "NGPT",
    "PostLN",
    "PreLN",
    "RMSNorm",
    "ReZero",
    "SwiGLU",
    "deepnorm_factors",
    "documents_from_lengths",
    "documents_from_positions",
    "residual_layers",
    "swiglu_hidden",
]
