"""Initial values of weight matrices, by the placement of norms and residuals."""

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

# The standard deviation of a unit normal truncated at ±2; dividing by it restores the wanted one.
_TRUNCATED_STD = 0.8796256610342398


@torch.no_grad()
def initialise(model: nn.Module, config: StackConfig) -> None:
    """Draw every weight matrix of `model` from a normal truncated at two deviations.

    The deviation is `init_std` (None: 1/√fan-in). The embedding's is `embedding_std`, else
    `init_std`, else 1/√dim, which gives tied logits of a normalised stream unit variance. A gain
    that depends on the depth multiplies the deviation:

    - PreLN: M^−½ on the output weights of the M sub-layers (GPT-2).
    - DeepNorm: the stack's β on the value, output and feed-forward weights; with `init_std` None
      their deviation, and that of q and k, is Xavier's √(2/(fan-in + fan-out)).
    - A gated attention unit: N^−⅓ on every weight, since three factors (u, v, W_out) multiply
      (GAU-α, kexue 9052); under DeepNorm instead β on v and W_out.
    - ReZero, AttnRes, nGPT and PostLN with attention, and placements without norms: 1.

    `gamma_std` is the deviation of γ of a gated attention unit, where given. Biases are 0. Gains of
    norms, other γ and β, and parameters of scores keep the initial values of their modules.
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
    """Each weight of a layer itself, not of its sub-modules, with its deviation."""
    beta, init_std, deepnorm = config.deepnorm[1], config.init_std, config.placement == "DeepNorm"
    value_gain = beta if deepnorm else 1.0
    out_gain = config.sublayers**-0.5 if config.placement == "PreLN" else value_gain

    def standard(weight: Tensor, gain: float = 1.0) -> tuple[Tensor, float]:
        fan_out, fan_in = weight.shape
        std = math.sqrt(2 / (fan_in + fan_out)) if deepnorm else 1 / math.sqrt(fan_in)
        return weight, gain * (init_std or std)

    def by_fan_in(weight: Tensor, gain: float = 1.0) -> tuple[Tensor, float]:
        return weight, gain * (init_std or weight.shape[1] ** -0.5)

    if isinstance(layer, nn.Embedding):
        yield layer.weight, config.embedding_std or init_std or config.dim**-0.5
    elif isinstance(layer, Attention):
        kv = layer.kv_heads * layer.head_dim
        q, k, v = torch.split(layer.qkv.weight, [layer.heads * layer.head_dim, kv, kv])
        yield from (standard(q), standard(k), standard(v, value_gain))
        yield standard(layer.out.weight, out_gain)
    elif isinstance(layer, CrossAttention):
        k, v = layer.kv.weight.chunk(2)
        yield from (standard(layer.q.weight), standard(k), standard(v, value_gain))
        yield standard(layer.out.weight, out_gain)
    elif isinstance(layer, GatedAttentionUnit):
        # By fan-in also under DeepNorm: swish and the gate shrink outputs already.
        gain = 1.0 if deepnorm else config.layers ** (-1 / 3)
        u, v, *qk = torch.split(layer.expand.weight, layer.widths)
        v_gain = beta if deepnorm else gain
        yield from (by_fan_in(u, gain), by_fan_in(v, v_gain), *(by_fan_in(z, gain) for z in qk))
        yield by_fan_in(layer.out.weight, v_gain)
        if config.gamma_std is not None and layer.gamma is not None:
            yield layer.gamma, config.gamma_std
    elif isinstance(layer, SwiGLU | GELU):
        for weight in torch.split(layer.up.weight, layer.hidden):
            yield standard(weight, value_gain)
        yield standard(layer.down.weight, out_gain)
    if isinstance(layer, Attention | GatedAttentionUnit):
        yield from (by_fan_in(x.weight) for x in (layer.gate, layer.forget) if x is not None)


def _draw(weight: Tensor, deviation: float) -> None:
    scale = deviation / _TRUNCATED_STD
    nn.init.trunc_normal_(weight, std=scale, a=-2 * scale, b=2 * scale)
