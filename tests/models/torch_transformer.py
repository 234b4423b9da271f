"""torch's own Transformer with the weights of one of ours."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from normattn.models.translator import Translator


def transformer(ours: Translator, first: bool) -> nn.Transformer:
    """The same shape, with a last norm where norms come `first`; all biases but norms' are 0."""
    model: Any = ours
    config = ours.config
    shape: dict[str, Any] = {
        "d_model": config.dim,
        "nhead": config.heads,
        "dim_feedforward": config.hidden,
        "dropout": 0.0,
        "activation": "gelu",
        "layer_norm_eps": config.norm_eps,
        "batch_first": True,
        "norm_first": first,
    }

    def last() -> nn.Module | None:
        return nn.LayerNorm(config.dim, config.norm_eps) if first else None

    encoder: Any = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(**shape), config.layers, last(), enable_nested_tensor=False
    )
    decoder: Any = nn.TransformerDecoder(
        nn.TransformerDecoderLayer(**shape), config.decoder.layers, last()
    )
    theirs = nn.Transformer(
        config.dim,
        config.heads,
        custom_encoder=encoder,
        custom_decoder=decoder,
        batch_first=True,
    ).double()
    for parameter in theirs.parameters():
        if parameter.dim() == 1:
            nn.init.zeros_(parameter)
    for mine, other in zip(model.encoder, encoder.layers, strict=True):
        _copy_attention(mine.mixer, other.self_attn, other.norm1)
        _copy_feed_forward(mine.feed_forward, other, other.norm2)
    for mine, other in zip(model.decoder, decoder.layers, strict=True):
        _copy_attention(mine.mixer, other.self_attn, other.norm1)
        _copy_cross(mine.cross, other.multihead_attn, other.norm2)
        _copy_feed_forward(mine.feed_forward, other, other.norm3)
    if first:
        _copy_norm(model.encoder_norm, encoder.norm)
        _copy_norm(model.decoder_norm, decoder.norm)
    return theirs


def _copy_attention(mine: Any, theirs: Any, norm: Any) -> None:
    theirs.in_proj_weight.data = mine.sublayer.qkv.weight.detach().clone()
    theirs.out_proj.weight.data = mine.sublayer.out.weight.detach().clone()
    _copy_norm(mine.norm, norm)


def _copy_cross(mine: Any, theirs: Any, norm: Any) -> None:
    layer = mine.sublayer
    theirs.in_proj_weight.data = torch.cat([layer.q.weight, layer.kv.weight]).detach()
    theirs.out_proj.weight.data = layer.out.weight.detach().clone()
    _copy_norm(mine.norm, norm)


def _copy_feed_forward(mine: Any, theirs: Any, norm: Any) -> None:
    theirs.linear1.weight.data = mine.sublayer.up.weight.detach().clone()
    theirs.linear2.weight.data = mine.sublayer.down.weight.detach().clone()
    _copy_norm(mine.norm, norm)


def _copy_norm(mine: Any, theirs: Any) -> None:
    theirs.weight.data, theirs.bias.data = mine.gain.detach().clone(), mine.bias.detach().clone()
