"""Which rotation makes one tensor of another: where the rotated features stand, and how.

Legend: B batch, H heads, T tokens, D head dimension, P pairs of features that turn.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.hf.rotation_tables import HeadRotation
from normattn.score.rotary import Rotator


def rotated_by(head: HeadRotation, x: Float[Tensor, "b h t d"], gain: Tensor | None) -> Tensor:
    """x as it stands at positions 0 … T − 1: its features arranged, rotated, and put back."""
    places = torch.arange(x.shape[2], dtype=torch.float64, device=x.device)
    turn = Rotator(head.frequencies, head.interleaved).at(places, torch.float64)
    size = head.amplitude
    first = head.arranged(x.double())
    if gain is not None:
        first = first * gain.to(first.device)
    rotated = replace(turn, cos=turn.cos * size, sin=turn.sin * size)(first)
    if gain is not None:
        rotated = rotated / gain.to(rotated.device)
    rest = rotated.shape[-1] - head.start
    return torch.cat((rotated[..., rest:], rotated[..., :rest]), -1) if head.start else rotated


def _fits(head: HeadRotation, x: Tensor, rotated: Tensor, gain: Tensor | None = None) -> bool:
    """Whether this rotation makes `rotated` of x, up to the rounding of x's type."""
    close = 1e-3 if x.dtype in (torch.float32, torch.float64) else 5e-2
    off = (rotated_by(head, x, gain) - rotated).abs().max()
    return bool(off <= close * rotated.abs().max())


def fit_rotation(
    like: HeadRotation, q: Tensor, q_rotated: Tensor, k: Tensor, k_rotated: Tensor
) -> HeadRotation | None:
    """The rotation by `like`'s frequencies that makes the rotated queries and keys, or None.

    Tried: the first features turn, or the last; pairs apart or side by side; either direction; and,
    where norms with a gain follow the rotation, queries and keys that the gain has made uneven.
    """
    pairs = 2 * like.frequencies.numel()
    if pairs > q.shape[-1] or q.shape[-1] != k.shape[-1]:
        return None
    for start in sorted({0, q.shape[-1] - pairs}):
        for interleaved in (False, True):
            for sign in (1, -1):
                tried = replace(
                    like, start=start, interleaved=interleaved, frequencies=sign * like.frequencies
                )
                if like.normed:
                    gains = (_gain(tried, q, q_rotated), _gain(tried, k, k_rotated))
                    tried = replace(tried, gains=gains)
                one, other = tried.gains or (None, None)
                if _fits(tried, q, q_rotated, one) and _fits(tried, k, k_rotated, other):
                    return tried
    return None


def _gain(head: HeadRotation, x: Tensor, rotated: Tensor) -> Float[Tensor, " d"]:
    """What to multiply features with so that they turn evenly: g_a/g_b on the second of a pair.

    A gain g after the rotation makes x = g ⊙ y of y, and a' = a·cos − (g_a/g_b)·b·sin of the pair
    (a, b): its ratio by least squares over tokens and heads.
    """
    places = torch.arange(x.shape[2], dtype=torch.float64)[:, None]
    angle = places * head.frequencies
    a, b = _pair(head, head.arranged(x.double().cpu()))
    to, _ = _pair(head, head.arranged(rotated.double().cpu()))
    known, rest = b * angle.sin(), a * angle.cos() - to
    below = known.square().sum((0, 1, 2))
    ratio = torch.where(below > 0, (known * rest).sum((0, 1, 2)) / below.clamp(min=1e-30), 1.0)
    gain = torch.ones(x.shape[-1], dtype=torch.float64)
    _pair(head, gain)[1].copy_(ratio)
    return gain


def _pair(head: HeadRotation, x: Tensor) -> tuple[Tensor, Tensor]:
    count = head.frequencies.numel()
    if head.interleaved:
        return x[..., 0 : 2 * count : 2], x[..., 1 : 2 * count : 2]
    return x[..., :count], x[..., count : 2 * count]
