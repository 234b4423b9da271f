"""The starting values of every weight matrix, by the placement of norms and residuals."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from normattn.layers.attention import Attention
from normattn.layers.cross_attention import CrossAttention
from normattn.layers.feed_forward import GELU, SwiGLU
from normattn.layers.gau import GatedAttentionUnit
from normattn.models.config import StackConfig

# The standard deviation of a unit normal cut off at two, so that the result has the wanted one.
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
    - ReZero, AttnRes, nGPT and PostLN with attention, and placements without norms: none.

    γ of a gated attention unit is drawn with the deviation `gamma_std` where there is one. Biases
    start at 0; gains of norms, other γ, β and what a score learns keep the values that their
    modules gave them.
    """
    for module in model.modules():
        for weight, deviation in _deviations(module, config):
            _draw(weight, deviation)
        if isinstance(module, Attention | GatedAttentionUnit):
            for projection in (getattr(module, "qkv", None), module.gate, module.forget):
                if projection is not None and projection.bias is not None:
                    projection.bias.zero_()
    head = getattr(model, "head", None)
    if isinstance(head, nn.Linear):
        _draw(head.weight, config.init_std or config.dim**-0.5)
        if head.bias is not None:
            head.bias.zero_()


def _deviations(layer: nn.Module, config: StackConfig) -> Iterator[tuple[Tensor, float]]:
    """The weights of a layer, without its sub-modules', and the deviation of each."""
    beta, given, deep = config.deepnorm[1], config.init_std, config.placement == "DeepNorm"
    into = beta if deep else 1.0
    out = beta if deep else config.sublayers**-0.5 if config.placement == "PreLN" else 1.0

    def usual(weight: Tensor, gain: float) -> tuple[Tensor, float]:
        fan_out, fan_in = weight.shape
        own = math.sqrt(2 / (fan_in + fan_out)) if deep else 1 / math.sqrt(fan_in)
        return weight, gain * (given or own)

    def by_fan_in(weight: Tensor, gain: float = 1.0) -> tuple[Tensor, float]:
        return weight, gain * (given or weight.shape[1] ** -0.5)

    if isinstance(layer, nn.Embedding):
        yield layer.weight, config.embedding_std or given or config.dim**-0.5
    elif isinstance(layer, Attention):
        kv = layer.kv_heads * layer.head_dim
        q, k, v = torch.split(layer.qkv.weight, [layer.heads * layer.head_dim, kv, kv])
        yield from (usual(q, 1.0), usual(k, 1.0), usual(v, into), usual(layer.out.weight, out))
    elif isinstance(layer, CrossAttention):
        k, v = layer.kv.weight.chunk(2)
        yield from (usual(layer.q.weight, 1.0), usual(k, 1.0), usual(v, into))
        yield usual(layer.out.weight, out)
    elif isinstance(layer, GatedAttentionUnit):
        # Fan-in also under DeepNorm: swish and the gate already shrink what Xavier would shrink.
        calm = 1.0 if deep else config.layers ** (-1 / 3)
        u, v, *keys = torch.split(layer.expand.weight, layer.widths)
        scaled = beta if deep else calm
        yield from (by_fan_in(u, calm), by_fan_in(v, scaled), *(by_fan_in(z, calm) for z in keys))
        yield by_fan_in(layer.out.weight, scaled)
        if config.gamma_std is not None and layer.gamma is not None:
            yield layer.gamma, config.gamma_std
    elif isinstance(layer, SwiGLU | GELU):
        yield from (usual(weight, into) for weight in torch.split(layer.up.weight, layer.hidden))
        yield usual(layer.down.weight, out)
    if isinstance(layer, Attention | GatedAttentionUnit):
        yield from (by_fan_in(x.weight) for x in (layer.gate, layer.forget) if x is not None)


def _draw(weight: Tensor, deviation: float) -> None:
    scale = deviation / _TRUNCATED_STD
    nn.init.trunc_normal_(weight, std=scale, a=-2 * scale, b=2 * scale)
