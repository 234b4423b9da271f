"""What the mask of a layer does: the part that says it, or that it is an operand of `attention`.

Which keys a query may see, and what is added to their scores, may depend on the text: no part of a
score says that, but `attention` takes such a mask as its `attn_mask`.

Legend: B batch, H query heads, T queries, S keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor

from normattn.hf.score_naming import window_words
from normattn.hf.score_recording import Heard, hidden


@dataclass(frozen=True)
class Masking:
    """The part that says which keys are hidden, "" for none, and the mask that does the rest.

    `causal`: no query sees a later key. `operand` (B, H or 1, T, S) is the layer's own mask where
    it does more than `part` says, `beside` what that is, `lacks` what cannot be said of it.
    """

    part: str = ""
    causal: bool = True
    operand: Tensor | None = None
    beside: str | None = None
    lacks: str | None = None


def masking(heard: Heard, config: Any) -> Masking:
    """What the mask does, by what was recorded of it in texts that differ."""
    causal = not bool(heard.visible[0].triu(1).any())
    mask = None if heard.mask is None else heard.mask[..., : heard.k.shape[2]]
    part, unsaid = "", None
    if causal and heard.alike:
        part, unsaid = window_words(heard.visible[0].cpu(), _named(heard, config))
    elif causal and mask is not None:
        part = _kept_within(~hidden(mask), _named(heard, config))
    if mask is None or (heard.alike and not heard.added and unsaid is None):
        return Masking(part, causal, lacks=_too_few(heard) if heard.selects else unsaid)
    hides, adds = _by_text(mask)
    operand = mask.cpu() if mask.dtype == torch.bool else mask.double().cpu()
    lacks = _fixed(heard, hides, adds) or unsaid
    return Masking(part, causal, operand, _words(heard, hides, adds), lacks)


def _by_text(mask: Shaped[Tensor, "b h t s"]) -> tuple[bool, bool]:
    """Whether the keys that it hides, and the numbers that it adds, differ from text to text."""
    hides = hidden(mask)
    if mask.dtype == torch.bool:
        return bool((hides != hides[:1]).any()), False
    both = ~hides & ~hides[:1]
    adds = torch.where(both, mask - mask[:1], 0.0).any()
    return bool((hides != hides[:1]).any()), bool(adds)


def _words(heard: Heard, hides: bool, adds: bool) -> str | None:
    """What the operand does, in words."""
    if not (hides or adds):
        return None
    if heard.selects and not adds:
        return "an indexer chooses the keys of each query (attn_mask)"
    if hides and adds:
        return "which keys are seen and what is added to scores depend on the text (attn_mask)"
    if hides:
        return "which keys are seen depends on the text (attn_mask)"
    return "what the mask adds to the scores depends on the text (attn_mask)"


def _fixed(heard: Heard, hides: bool, adds: bool) -> str | None:
    """What a mask does in every text alike, which would be a part of the score."""
    if heard.added and not adds:
        return f"its mask adds up to {heard.added:.2g} to a score, which no part says"
    if not heard.alike and not hides:
        return "its mask hides other keys from other heads, which no part says"
    return _too_few(heard) if heard.selects and not hides else None


def _too_few(heard: Heard) -> str:
    return f"its indexer leaves out none of {heard.q.shape[2]} tokens: it takes more to show it"


def _kept_within(visible: Bool[Tensor, "b h t s"], named: str) -> str:
    """The window of the configuration where no key beyond it is seen, "" otherwise."""
    if not named.startswith("SlidingWindow"):
        return ""
    queries, keys = (torch.arange(size, device=visible.device) for size in visible.shape[-2:])
    near = queries[:, None] - keys < int(named.partition("=")[2].rstrip(")"))
    return "" if bool((visible & ~near).any()) else named


def _named(heard: Heard, config: Any) -> str:
    """What hides keys by the layer's own words or the configuration's."""
    types = getattr(config, "layer_types", None) or ()
    kind = types[heard.index] if heard.index < len(types) else ""
    if kind == "chunked_attention":
        return f"Chunked(size={config.attention_chunk_size})"
    given = heard.more.get("sliding_window")
    if given is None and kind == "sliding_attention":
        given = config.sliding_window
    return "" if given is None else f"SlidingWindow(window={int(given)})"
