"""Queries and keys as a layer's projections may hold them, before anything is done to them.

Legend: B batch, H query heads, G key heads, T tokens, D head dimension, E value size, W width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.hf.score_recording import Heard


@dataclass(frozen=True)
class Raw:
    """Queries and keys that projections made; the `last` features of a key are those of all heads.

    `last` is None where keys are of one projection. `beside` says what the layer did to them that
    is no part of a score.
    """

    q: Float[Tensor, "b h t d"]
    k: Float[Tensor, "b g t d"]
    last: int | None = None
    beside: str | None = None


def candidates(heard: Heard) -> Iterator[Raw]:
    """Queries and keys apart, joined, side by side, with a gate, clipped, of latent vectors.

    Last those that several projections together have made, in a module of the layer.
    """
    own = [projection.made for projection in heard.projections]
    lent = [projection.made for projection in heard.lent]
    yield from _apart(own, own + lent, heard)
    yield from _joined(own, heard)
    yield from _latent(own, heard)
    clip = _clip(own, heard)
    if clip is not None:
        clipped = [made.clamp(-clip, clip) for made in own]
        for raw in (*_joined(clipped, heard), *_apart(clipped, clipped, heard)):
            yield replace(raw, beside=f"what its projections make is clipped to ±{clip:g} first")
    composed = [part for part in heard.inside if part.projects]
    for name in dict.fromkeys(part.name for part in composed):
        made = [part.made for part in composed if part.name == name]
        for raw in _apart(made, made, heard):
            yield replace(raw, beside=f"its queries and keys are those of {name}")


def heads_of(x: Float[Tensor, "b t w"], size: int) -> Float[Tensor, "b h t d"]:
    """Heads of this size, side by side in x."""
    return x.reshape(*x.shape[:2], -1, size).transpose(1, 2)


def _queries(made: Sequence[Tensor], heard: Heard) -> Iterator[tuple[Tensor, Tensor]]:
    """Projections that may hold queries, alone or each before the gate of its head, and these."""
    (_, heads, _, d), e = heard.q.shape, heard.v.shape[-1]
    for one in made:
        if one.shape[-1] == heads * d:
            yield one, heads_of(one, d)
        elif one.shape[-1] == heads * (d + e):
            yield one, heads_of(one, d + e)[..., :d]


def _apart(own: Sequence[Tensor], keys: Sequence[Tensor], heard: Heard) -> Iterator[Raw]:
    """Keys of a projection of their own, or before the values in one."""
    (_, groups, _, d), e = heard.k.shape, heard.v.shape[-1]
    for one, q in _queries(own, heard):
        for other in keys:
            if one is not other and other.shape[-1] == groups * d:
                yield Raw(q, heads_of(other, d))
        for other in keys:
            if one is not other and other.shape[-1] == groups * (d + e):
                yield Raw(q, heads_of(other[..., : groups * d], d))


def _joined(made: Sequence[Tensor], heard: Heard) -> Iterator[Raw]:
    """Queries, keys and values in one projection: all heads of each, or each head with its own."""
    heads, groups, d = heard.q.shape[1], heard.k.shape[1], heard.q.shape[-1]
    for one in made:
        if one.shape[-1] == (heads + 2 * groups) * d:
            parts = heads_of(one, d)
            yield Raw(parts[:, :heads], parts[:, heads : heads + groups])
            if heads == groups:
                joined = heads_of(one, 3 * d)
                yield Raw(joined[..., :d], joined[..., d : 2 * d])


def _latent(own: Sequence[Tensor], heard: Heard) -> Iterator[Raw]:
    """Keys as multi-head latent attention has them (arXiv 2405.04434).

    Each head's first features stand before its values in one projection; the last ones, the same
    for all heads, are the last of another.
    """
    (_, groups, _, d), e = heard.k.shape, heard.v.shape[-1]
    for other in own:
        size, rest = divmod(other.shape[-1], groups)
        last = d + e - size
        if rest or not 0 < last < d:
            continue
        kept = heads_of(other, size)
        if not _close(kept[..., size - e :], heard.v):
            continue
        for shared, beside in _shared(other, last, own, heard):
            turning = heads_of(shared, last).expand(-1, groups, -1, -1)
            k = torch.cat((kept[..., : size - e], turning), -1)
            for one, q in _queries(own, heard):
                if one is not other:
                    yield Raw(q, k, last, beside)


def _shared(
    other: Tensor, last: int, own: Sequence[Tensor], heard: Heard
) -> Iterator[tuple[Float[Tensor, "b t last"], str | None]]:
    """What all heads may share: the last of a projection, or what a module has made of it."""
    for shared in own:
        if shared is not other and shared.shape[-1] >= last:
            yield shared[..., -last:], None
    for part in heard.inside:
        if part.made.shape[-1] == last and not part.projects:
            yield part.made, f"the features of its keys that all heads share pass {part.name} first"


def _clip(own: Sequence[Tensor], heard: Heard) -> float | None:
    """What projections may be clipped to: the largest number that is known to be left of them."""
    known = (heard.v, heard.q[:, :, 0], heard.k[:, :, 0])
    bound = max(float(x.abs().max()) for x in known)
    return bound if any(float(made.abs().max()) > bound for made in own) else None


def _close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-3, atol=1e-5)
