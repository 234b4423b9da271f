"""One new token over a filled cache, compared with hand-written RoPE and torch's kernel.

Legend: H heads, T tokens in the cache, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch.nn import functional as F

import normattn
from benchmarks.attention import Rotation, Shape
from benchmarks.harness import DTYPES, Case, Options
from normattn.lab.runs.timing import Step
from normattn.layers.cache import KeyValueCache

SCORES = (
    *("Baseline", "KNA", "Baseline-logn@512", "Baseline-YaRN(factor=8)@512", "Baseline-ALiBi"),
    *("Baseline-KERPLELog", "Baseline-ReRoPE(window=512)@2048"),
)


def cached(shape: Shape, score: str) -> Step:
    """One token attends to itself and the T cached ones, and is then removed from the cache."""
    spec = normattn.ScoreSpec.parse(score)
    module = normattn.Score(spec, shape.heads, shape.size).to(shape.device)
    cache = KeyValueCache(shape.length + 1)
    token = replace(shape, length=1).tensors()

    @torch.inference_mode()
    def step() -> object:
        out = normattn.attention(*token, module, cache=cache)
        cache.truncate(shape.length)
        return out

    with torch.inference_mode():
        normattn.attention(*shape.tensors(), module, cache=cache)
    return step


def by_hand(shape: Shape) -> Step:
    """Rotate the new query and key, write key and value into their place, run torch's kernel."""
    _, k, v = shape.tensors()
    turned = Rotation(torch.arange(shape.length), shape)(k)
    keys, values = (F.pad(x, (0, 0, 0, 1)) for x in (turned, v))
    turn = Rotation(torch.tensor([shape.length]), shape)
    q, k, v = replace(shape, length=1).tensors()

    @torch.inference_mode()
    def step() -> object:
        keys[:, :, shape.length :] = turn(k)
        values[:, :, shape.length :] = v
        return F.scaled_dot_product_attention(turn(q), keys, values)

    return step


def decode(options: Options) -> list[Case]:
    """A decoding step of every score after the longest length."""
    cases = []
    length = 128 if options.quick else options.lengths[-1]
    for precision in options.dtypes:
        shape = Shape(length, DTYPES[precision], False, options.device)
        entries: dict[str, Callable[[], Step]] = {"RoPE + SDPA": partial(by_hand, shape)}
        for score in SCORES:
            entries[score] = partial(cached, shape, score)
        cases.append(Case(f"decode {precision}, T {length}", entries, "RoPE + SDPA"))
    return cases
