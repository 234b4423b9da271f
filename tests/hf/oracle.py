"""A Llama by hand in float64 with any relative position: every pair's logit, one by one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _rms(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gain.double()


def _turned(x: Tensor, angles: Tensor) -> Tensor:
    """Pairs (m, m + d/2) of x (d,) turned by angles (d/2,)."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def llama(
    model: Any,
    ids: Tensor,
    relative: Callable[[int, int], float],
    factor: Callable[[int], float],
    theta: Tensor,
) -> Tensor:
    """Logits (T, V) of one row of tokens.

    The logit of row i and column j is ⟨R^relative(i, j) q_i, k_j⟩ · factor(i + 1) / √d.
    """
    config, state = model.config, {k: v.double() for k, v in model.state_dict().items()}
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    size, eps, count = config.hidden_size // heads, config.rms_norm_eps, ids.numel()
    x = state["model.embed_tokens.weight"][ids]
    for number in range(config.num_hidden_layers):
        name = f"model.layers.{number}."
        y = _rms(x, state[name + "input_layernorm.weight"], eps)
        q, k, v = (
            (y @ state[f"{name}self_attn.{each}_proj.weight"].T).view(count, -1, size)
            for each in "qkv"
        )
        out = torch.zeros(count, heads, size, dtype=torch.float64)
        for head in range(heads):
            group = head * groups // heads
            for i in range(count):
                turned = (_turned(q[i, head], relative(i, j) * theta) for j in range(i + 1))
                scores = torch.stack([x @ k[j, group] for j, x in enumerate(turned)])
                weights = (scores * factor(i + 1) / math.sqrt(size)).softmax(0)
                out[i, head] = weights @ v[: i + 1, group]
        x = x + out.flatten(1) @ state[name + "self_attn.o_proj.weight"].T
        y = _rms(x, state[name + "post_attention_layernorm.weight"], eps)
        gate = torch.nn.functional.silu(y @ state[name + "mlp.gate_proj.weight"].T)
        up = y @ state[name + "mlp.up_proj.weight"].T
        x = x + (gate * up) @ state[name + "mlp.down_proj.weight"].T
    found: Tensor = _rms(x, state["model.norm.weight"], eps) @ state["lm_head.weight"].T
    return found
