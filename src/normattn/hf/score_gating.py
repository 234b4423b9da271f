"""What a layer does to the output of its attention before its last projection.

Legend: B batch, H query heads, T tokens, E value size, W width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from normattn.hf.score_fitting import CLOSE, norms
from normattn.hf.score_pairing import Pairs, pairs_of
from normattn.hf.score_recording import Heard

_CHANGED = "its output is changed before the last projection in a way that no part says"


@dataclass(frozen=True)
class Gating:
    """The output gate's part and its logits (B, T, …), and what else happens to the output.

    `beside` says what the layer does that is no part of a score; `lacks` what is not understood;
    `pairs` are those of differential attention.
    """

    part: str = ""
    logits: Tensor | None = None
    beside: str | None = None
    lacks: str | None = None
    pairs: Pairs | None = None


def gating(heard: Heard, eps: Sequence[float]) -> Gating:
    """What stands between attention's output and the last projection."""
    out = heard.out.flatten(2)
    given = [
        projection.given for projection in heard.projections if projection.given.shape == out.shape
    ]
    pairs = pairs_of(heard, given, eps)
    if pairs is not None:
        order = "its pairs are key heads g and g + G/2, where attention() has neighbours"
        return Gating(pairs.part, beside=order, pairs=pairs)
    if any(torch.equal(candidate, out) for candidate in given):
        return Gating()
    for candidate in given:
        for logits in _logits(heard):
            gate = _gate(heard.out, candidate, logits)
            if gate is not None:
                return gate
    beside = _normed(heard, given, eps)
    return Gating(lacks=_CHANGED) if beside is None else Gating(beside=beside)


def _gate(out: Tensor, given: Tensor, logits: Tensor) -> Gating | None:
    """The gate that makes `given` (B, T, H·E) of the output (B, T, H, E) by these logits.

    A number for each head may be added to them first.
    """
    heads, size = out.shape[2:]
    wide = logits.shape[-1] // heads
    per = [] if wide > 1 or size == 1 else ["per=head"]
    gate = logits.double().reshape(*logits.shape[:2], heads, wide)
    wanted = given.double().view_as(out)
    tried = [(gate, []), (gate, ["act=softplus"]), (gate + _shift(out, wanted, gate), [])]
    for logits, act in tried:
        opened = F.softplus(logits) if act else logits.sigmoid()
        if _same(opened * out, wanted):
            fields = ",".join([*per, *act])
            return Gating(f"Gate({fields})" if fields else "Gate", logits.flatten(2))
    return None


def _shift(out: Tensor, wanted: Tensor, gate: Tensor) -> Tensor:
    """What is added to a head's logits besides (H, 1), by the middle of what the output tells."""
    share = (wanted / out).clamp(1e-6, 1 - 1e-6)
    return (share.logit() - gate).movedim(2, 0).flatten(1).median(-1).values[:, None]


def _same(one: Tensor, other: Tensor) -> bool:
    return float((one - other).abs().max()) <= CLOSE * float(other.abs().max())


def _logits(heard: Heard) -> Iterator[Tensor]:
    """What may gate the output: a projection of its own, or behind the queries of each head."""
    heads, size = heard.out.shape[2:]
    d = heard.q.shape[-1]
    for made in (projection.made for projection in heard.projections):
        if made.shape[-1] in (heads * size, heads):
            yield made
        elif made.shape[-1] == heads * (d + size):
            yield made.reshape(*made.shape[:2], heads, d + size)[..., d:].flatten(2)


def _normed(heard: Heard, given: Sequence[Tensor], eps: Sequence[float]) -> str | None:
    """Whether the output is normalised, in words; None where it is not."""
    words = {"rms": "an RMS norm", "layer": "a layer norm"}
    out = heard.out.transpose(1, 2).double()
    for candidate in given:
        wanted = candidate.view_as(heard.out).transpose(1, 2).double()
        for norm in norms(out, wanted, list(eps)):
            if norm.kind and _same(norm(out), wanted):
                over = "all heads" if norm.across == "all" else "each head"
                return f"{words[norm.kind]} of {over} follows, which is the layer's"
    return None
