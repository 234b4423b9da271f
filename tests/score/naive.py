"""The same attention as vectorised torch formulas, for its gradients by autograd.

Rotations are complex numbers and act on relative positions, over a whole (T, S, D/2) tensor. It
shares only the scalars (frequencies, λ) with the oracle, and nothing with the library.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from . import oracle
from .oracle import Recipe


def normalised(
    recipe: Recipe, side: str, x: Tensor, learned: Mapping[str, Tensor], real: Tensor | None
) -> Tensor:
    """N(x), x (B, H, T, D)."""
    kind = recipe.kind(side)
    if not kind:
        return x
    if kind == "l2":
        return x / x.square().sum(-1, keepdim=True).sqrt().clamp(min=1e-12)
    if kind in ("layer", "rms"):
        dims = (1, 3) if recipe.across == "all" else (3,)
        centre = x.mean(dims, keepdim=True) if kind == "layer" else torch.zeros_like(x)
        y = (x - centre) / ((x - centre).square().mean(dims, keepdim=True) + recipe.eps).sqrt()
    else:
        dims = (0, 2) if kind == "batch" else (2,)
        keep = torch.ones_like(x[:, :1, :, :1]) if real is None else real[:, None, :, None]
        keep = keep.to(x).expand(x.shape[0], 1, x.shape[2], 1)
        count = keep.sum(dims, keepdim=True)
        centre = (x * keep).sum(dims, keepdim=True) / count
        variance = ((x - centre).square() * keep).sum(dims, keepdim=True) / count
        y = (x - centre) / (variance + recipe.eps).sqrt()
    for word, apply in (("gain", torch.mul), ("bias", torch.add)):
        if f"{side}.{word}" in learned:
            value = learned[f"{side}.{word}"].reshape(-1, x.shape[-1])
            y = apply(y, value.expand(x.shape[1], -1)[None, :, None])
    return y


def _complex(x: Tensor, layout: str) -> Tensor:
    if layout == "half":
        a, b = x.chunk(2, -1)
    else:
        a, b = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.complex(a, b)


def attend(
    recipe: Recipe,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    mask: Tensor | None = None,
    padding: Tensor | None = None,
    learned: Mapping[str, Tensor] | None = None,
    drop: Tensor | None = None,
) -> Tensor:
    """The attention of `recipe`; `drop` (B, H, T, S) multiplies the weights."""
    learned = {} if learned is None else learned
    batch, heads, queries, d = q.shape
    keys, real = k.shape[2], None if padding is None else ~padding
    q = normalised(recipe, "Q", q, learned, real if queries == keys else None)
    k = normalised(recipe, "K", k, learned, real).repeat_interleave(heads // k.shape[1], 1)
    v = v.repeat_interleave(heads // v.shape[1], 1)
    at_q, at_k = oracle.places(
        queries, keys, batch, None if padding is None else padding.numpy(), None, None
    )
    relative = torch.from_numpy(at_q[:, :, None] - at_k[:, None, :])
    visible = relative >= 0 if causal else torch.ones_like(relative, dtype=torch.bool)
    visible = visible[:, None].expand(batch, heads, -1, -1)
    if real is not None:
        visible = visible & real[:, None, None]
    if recipe.position == "none":
        score = torch.einsum("bhid,bhjd->bhij", q, k)
    else:
        if recipe.method == "ReRoPE":
            relative = relative.clamp(max=recipe.window)
        theta = torch.tensor(oracle.frequencies(recipe, d), dtype=torch.float64)
        phase = torch.exp(1j * relative[..., None] * theta)
        left, right = _complex(q, recipe.position), _complex(k, recipe.position)
        score = torch.einsum("bhip,bhjp,bijp->bhij", left, right.conj(), phase).real
    if causal:
        counts = at_q + 1
    else:
        seen = np.full(batch, keys) if real is None else real.sum(-1).numpy()
        counts = np.broadcast_to(seen[:, None], (batch, queries))
    factor = [[oracle.scale(recipe, d, max(int(n), 1)) for n in row] for row in counts]
    score = score * torch.tensor(factor, dtype=torch.float64)[:, None, :, None]
    score = score * learned["scale"] if "scale" in learned else score
    if mask is not None and mask.dtype == torch.bool:
        visible = visible & mask
    elif mask is not None:
        score = score + mask
    top = score.detach().amax(-1, keepdim=True).clamp(min=-1e300)
    weight = torch.where(visible, (score - top).exp(), 0.0)
    total = weight.sum(-1, keepdim=True)
    weight = weight / torch.where(total > 0, total, 1.0)
    return (weight if drop is None else weight * drop) @ v
