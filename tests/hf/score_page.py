"""Which causal family has which score: read off a tiny model of each, as `normattn score` does."""

from __future__ import annotations

import re
from collections.abc import Sequence

from normattn import InputError, score_of
from normattn.hf.score_of import TOLERANCE, LayerScore

from .tiny import build

# Few enough keys for so short a text to leave others out.
_SMALLER = {"doge": {"keep_window_size": 6}}


def row(family: str) -> tuple[str, ...]:
    """What is said of each run of layers with one score; a sentence where nothing can be read."""
    try:
        read = score_of(build(family, **_SMALLER.get(family, {})))
    except InputError as error:
        return (f"all layers: not identified: {' '.join(str(error).split())}",)
    return tuple(f"layer {layer.layer}: {_said(layer)}" for layer in read.layers)


def _said(layer: LayerScore) -> str:
    """The score; else what is missing, without the layer's name and what differs by processor."""
    note = "" if layer.mask_note is None else f" ({layer.mask_note})"
    if layer.verified:
        return f"`{layer.spec}`{note}"
    lacks = str(layer.lacks).partition("): ")[2]
    agrees = layer.difference is not None and layer.difference < TOLERANCE
    but = f"; otherwise `{layer.spec}`{note}" if agrees else ""
    return "not identified: " + re.sub(r" by \S+ of its largest output", "", lacks) + but


def line(family: str, said: Sequence[str]) -> str:
    """The family's row of the table."""
    return f"| {family} | {'<br>'.join(_short(said))} |"


def _short(said: Sequence[str]) -> list[str]:
    """One answer of all layers alone; else each answer once, with its layers."""
    layers: dict[str, list[str]] = {}
    for line in said:
        where, _, score = line.partition(": ")
        layers.setdefault(score, []).append(where.removeprefix("layer "))
    if len(layers) == 1:
        return list(layers)
    return [f"layer {', '.join(dict.fromkeys(w))}: {score}" for score, w in layers.items()]
