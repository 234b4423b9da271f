"""What a layer does beside its scores: its mask, and what happens to the output of attention.

Legend: B batch, H query heads, T tokens, S keys, E value size, W width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from normattn.hf.model_parts import layer_type
from normattn.hf.probe import hidden
from normattn.hf.score_fit import CLOSE, heads_of
from normattn.hf.score_names import window_part
from normattn.hf.score_record import RecordedLayer
from normattn.score.parts import Chunked, Gate, SlidingWindow

_ROUNDED = 1e-4
"""How far numbers of two texts may be apart by rounding alone, as a share of the largest."""


@dataclass(frozen=True)
class Gating:
    """The output gate's part and its logits (B, T, …); `lacks` is what is not understood."""

    part: Gate | None = None
    logits: Tensor | None = None
    lacks: str | None = None


def gating(layer: RecordedLayer) -> Gating:
    """What stands between attention's output and the last projection."""
    out = layer.out.flatten(2)
    given = [x for x, _ in layer.projections if x.shape == out.shape]
    if any(torch.equal(candidate, out) for candidate in given):
        return Gating()
    gates = (_gate(layer.out, x, logits) for x in given for logits in _logits(layer))
    lacks = "its output is changed before the last projection in a way that no part says"
    return next((gate for gate in gates if gate is not None), Gating(lacks=lacks))


def _logits(layer: RecordedLayer) -> Iterator[Tensor]:
    """What may gate the output: a projection of its own, or behind the queries of each head."""
    heads, size = layer.out.shape[2:]
    d = layer.q.shape[-1]
    for _, made in layer.projections:
        if made.shape[-1] in (heads * size, heads):
            yield made
        elif made.shape[-1] == heads * (d + size):
            yield heads_of(made, d + size)[..., d:].transpose(1, 2).flatten(2)


def _gate(out: Tensor, given: Tensor, logits: Tensor) -> Gating | None:
    """The gate that makes `given` (B, T, H·E) of the output (B, T, H, E) by these logits."""
    heads, size = out.shape[2:]
    wide = logits.shape[-1] // heads
    gate = logits.double().reshape(*logits.shape[:2], heads, wide)
    wanted = given.double().view_as(out)
    part = Gate(per="feature" if wide > 1 or size == 1 else "head")
    for act in (part, replace(part, act="softplus")):
        opened = gate.sigmoid() if act is part else F.softplus(gate)
        if float((opened * out - wanted).abs().max()) <= CLOSE * float(wanted.abs().max()):
            return Gating(act, gate.flatten(2))
    return None


@dataclass(frozen=True)
class Masking:
    """The part that says which keys are hidden, None for none, and the mask that does the rest.

    `causal`: no query sees a later key. `operand` (B, H or 1, T, S) is the layer's own mask where
    it does more than `part` says, `beside` what that is, `lacks` what cannot be said of it.
    """

    part: SlidingWindow | Chunked | None = None
    causal: bool = True
    operand: Tensor | None = None
    beside: str | None = None
    lacks: str | None = None


def masking(layer: RecordedLayer, config: Any) -> Masking:
    """What the mask does, by what was recorded of it in texts that differ."""
    causal = not bool(layer.visible[0].triu(1).any())
    mask = None if layer.mask is None else layer.mask[..., : layer.k.shape[2]]
    part, unsaid, named = None, None, _named(layer, config)
    if causal and layer.same_mask:
        part, unsaid = window_part(layer.visible[0].cpu(), named)
    elif causal and mask is not None and isinstance(named, SlidingWindow) and named.window:
        at = torch.arange(layer.k.shape[2], device=mask.device)
        beyond = at[-mask.shape[2] :, None] - at >= named.window
        part = None if (~hidden(mask) & beyond).any() else named
    if mask is None or (layer.same_mask and not layer.added and unsaid is None):
        return Masking(part, causal, lacks=_too_few(layer) if layer.indexed else unsaid)
    hides, adds = _by_text(mask)
    beside = "its mask depends on the text (attn_mask)" if hides or adds else None
    if layer.indexed and not adds:
        beside = "an indexer chooses the keys of each query (attn_mask)" if hides else None
    operand = mask.cpu() if mask.dtype == torch.bool else mask.double().cpu()
    return Masking(part, causal, operand, beside, _in_every_text(layer, hides, adds) or unsaid)


def _by_text(mask: Tensor) -> tuple[bool, bool]:
    """Whether the keys that it hides, and the numbers that it adds, differ from text to text."""
    hides = hidden(mask)
    differ = bool((hides != hides[:1]).any())
    if mask.dtype == torch.bool:
        return differ, False
    both = ~hides & ~hides[:1]
    added, apart = (torch.where(both, x, 0.0).abs().max() for x in (mask, mask - mask[:1]))
    return differ, bool(apart > _ROUNDED * added)


def _in_every_text(layer: RecordedLayer, hides: bool, adds: bool) -> str | None:
    """What a mask does in every text alike, which would be a part of the score."""
    if layer.added and not adds:
        return f"its mask adds up to {layer.added:.2g} to a score, which no part says"
    if not layer.same_mask and not hides:
        return "its mask hides other keys from other heads, which no part says"
    return _too_few(layer) if layer.indexed and not hides else None


def _too_few(layer: RecordedLayer) -> str:
    return f"its indexer leaves out none of {layer.q.shape[2]} tokens: it takes more to show it"


def _named(layer: RecordedLayer, config: Any) -> SlidingWindow | Chunked | None:
    """What hides keys by the layer's own words or the configuration's."""
    kind = layer_type(config, layer.index)
    if kind == "chunked_attention":
        return Chunked(size=config.attention_chunk_size)
    width = layer.more.get("sliding_window")
    if width is None and kind == "sliding_attention":
        width = config.sliding_window
    return None if width is None else SlidingWindow(window=int(width))
