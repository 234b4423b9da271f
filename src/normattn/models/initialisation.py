"""How the weights of a model start."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from normattn.layers.attention import Attention
from normattn.layers.cross_attention import CrossAttention
from normattn.layers.feed_forward import GELU, SwiGLU
from normattn.layers.gau import GatedAttentionUnit
from normattn.models.config import StackConfig

# The standard deviation of a unit normal cut off at two, so that the result has the asked one.
_TRUNCATED_STD = 0.8796256610342398


@torch.no_grad()
def initialise(model: nn.Module, config: StackConfig) -> None:
    """Draw every weight matrix of `model` from a normal cut off at two deviations.

    The deviation is `init_std`, or 1/√fan-in where it is None (embedding: `embedding_std` where
    given; else 1/√dim, so that tied logits of a normalised stream have unit variance), times a
    gain that keeps a deep stack calm:

    - PreLN: the output weights of the M sub-layers by M^−½ (GPT-2);
    - DeepNorm: β of the stack on the value, output and feed-forward weights; with `init_std`
      None their deviation, and that of q and k, is Xavier's √(2/(fan-in + fan-out));
    - a gated attention unit under any placement but DeepNorm: every weight by N^−⅓, because three
      factors (u, v, W_out) multiply (GAU-α, kexue 9052); under DeepNorm β on v and W_out
      replaces it;
    - ReZero and PostLN with attention, and placements without norms: none.

    γ of a gated attention unit is drawn with the deviation `gamma_std` where there is one. Gains of
    norms, other γ, β and what a score learns keep the values that their modules gave them.
    """
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            deviation = config.embedding_std or config.init_std or config.dim**-0.5
            _draw(module.weight, deviation)
        elif isinstance(module, Attention):
            _attention(module, config)
        elif isinstance(module, CrossAttention):
            _cross_attention(module, config)
        elif isinstance(module, GatedAttentionUnit):
            _gated_attention_unit(module, config)
        elif isinstance(module, SwiGLU | GELU):
            _feed_forward(module, config)
    head = getattr(model, "head", None)
    if isinstance(head, nn.Linear):
        _draw(head.weight, config.init_std or config.dim**-0.5)


def _attention(layer: Attention, config: StackConfig) -> None:
    into, out = _branch_gains(config)
    kv = layer.kv_heads * layer.head_dim
    q, k, v = torch.split(layer.qkv.weight, [layer.heads * layer.head_dim, kv, kv])
    for weight, gain in ((q, 1.0), (k, 1.0), (v, into), (layer.out.weight, out)):
        _draw(weight, gain * _deviation(weight, config))
    if layer.qkv.bias is not None:
        layer.qkv.bias.zero_()
    _gates(layer, config)


def _cross_attention(layer: CrossAttention, config: StackConfig) -> None:
    into, out = _branch_gains(config)
    k, v = layer.kv.weight.chunk(2)
    for weight, gain in ((layer.q.weight, 1.0), (k, 1.0), (v, into), (layer.out.weight, out)):
        _draw(weight, gain * _deviation(weight, config))


def _feed_forward(layer: SwiGLU | GELU, config: StackConfig) -> None:
    into, out = _branch_gains(config)
    for weight in torch.split(layer.up.weight, layer.hidden):
        _draw(weight, into * _deviation(weight, config))
    _draw(layer.down.weight, out * _deviation(layer.down.weight, config))


def _gated_attention_unit(layer: GatedAttentionUnit, config: StackConfig) -> None:
    if config.placement == "DeepNorm":
        _, beta = config.deepnorm
        gate, value, key, out = 1.0, beta, 1.0, beta
    else:
        gate = value = key = out = config.layers ** (-1 / 3)
    u, v, *keys = torch.split(layer.expand.weight, layer.widths)
    weights = [(u, gate), (v, value), *((z, key) for z in keys), (layer.out.weight, out)]
    for weight, gain in weights:
        # Fan-in also under DeepNorm: swish and the gate already shrink what Xavier would shrink.
        _draw(weight, gain * (config.init_std or weight.shape[1] ** -0.5))
    if config.gamma_std is not None and layer.gamma is not None:
        _draw(layer.gamma, config.gamma_std)
    _gates(layer, config)


def _gates(layer: Attention | GatedAttentionUnit, config: StackConfig) -> None:
    """The projections that an output gate or a forgetting gate has, without a gain."""
    for gate in (layer.gate, layer.forget):
        if gate is not None:
            _draw(gate.weight, config.init_std or gate.in_features**-0.5)
            if gate.bias is not None:
                gate.bias.zero_()


def _branch_gains(config: StackConfig) -> tuple[float, float]:
    """The gains of a branch's first (value, up) and last (output, down) weights."""
    if config.placement == "DeepNorm":
        _, beta = config.deepnorm
        return beta, beta
    if config.placement == "PreLN":
        return 1.0, config.sublayers**-0.5
    return 1.0, 1.0


def _deviation(weight: Tensor, config: StackConfig) -> float:
    if config.init_std is not None:
        return config.init_std
    fan_out, fan_in = weight.shape
    if config.placement == "DeepNorm":
        return math.sqrt(2 / (fan_in + fan_out))
    return 1 / math.sqrt(fan_in)


def _draw(weight: Tensor, deviation: float) -> None:
    scale = deviation / _TRUNCATED_STD
    nn.init.trunc_normal_(weight, std=scale, a=-2 * scale, b=2 * scale)
