"""Prefill, token by token, in ragged chunks, and one full forward are one model: every method.

`python reading_on.py BLOCK` tries every score in a model of such blocks and names those that fail.
A program of its own, because of thousands of tiny calls that the tests' checker of shapes would
make ten times slower.
"""

from __future__ import annotations

import sys
import traceback
from typing import Any

import torch
from torch import Tensor

from normattn.models.cache import ModelCache
from normattn.models.causal_lm import CausalLM
from normattn.models.config import CausalLMConfig
from normattn.score import ScoreSpec
from normattn.score.parts import Slot
from normattn.score.parts import base as registry

VOCABULARY, L, LENGTH = 13, 5, 15
BLOCKS: dict[str, dict[str, Any]] = {
    "gqa": {"heads": 4, "kv_heads": 2, "head_dim": 4},
    "gau": {"block": "gau", "key_size": 4},
}
COMBINED = (
    "KNA-logn-YaRN",
    "CosA-logn-ReRoPE(window=3)",
    "QKRMSNorm-RotateFirst-ReRoPE(window=4)",
    "QKNorm2020-logn+-DynamicNTK",
    "QKRMSNorm(gain=true)-RotateFirst-DynamicNTK",
    "KNA-PartialRoPE-LeakyReRoPE",
    "KNA-PartialRoPE(side=last)",
    "KNA-PartialRoPE(side=last,layout=interleaved)-SelfExtend",
    "Baseline-XPos-SoftCap(cap=3)-Sink",
    "KNA-logn-Packed-SelfExtend",
    "Baseline-Packed-DynamicNTK",
    "Baseline-SlidingWindow(window=3)-Packed",
    "KNA-logn-SlidingWindow(window=4)",
    "QKRMSNorm-NTKMixed-RotateFirst",
    "Baseline-ALiBi-logn+-Sink",
    "Baseline-RoPE-KERPLELog-SlidingWindow(window=3)",
    "KNA-SoftCap(cap=2)-Sink-StreamingLLM(window=3,sinks=2)",
    "KNA-NoPEEvery(every=2)-ReRoPE",
    "Baseline-HWFA-Packed",
    "KNA-ValueResidual-ReRoPE(window=3)",
    "Baseline-ValueResidual-HWFA(window=3)",
)


def _texts(block: str) -> list[str]:
    """A score with each registered part that such a layer can have, and several combinations."""
    found = []
    for name, part in registry.parts().items():
        text = name if part.slot is Slot.VARIANT else f"KNA-{name}"
        spec = ScoreSpec.parse(text, train_length=L)
        # A gated attention unit has one head, which is no pair.
        if not spec.leaks_future and (block != "gau" or spec.difference is None):
            found.append(text)
    return [*found, *COMBINED]


def _model(text: str, block: str, dtype: torch.dtype = torch.float64, **changes: Any) -> CausalLM:
    """A model of the trained parts, what it learns drawn at random, its method switched on."""
    spec = ScoreSpec.parse(text, train_length=L).resolve(L, factor=3)
    torch.manual_seed(0)
    config = CausalLMConfig(
        vocab_size=VOCABULARY,
        dim=8,
        layers=2,
        train_length=L,
        score=spec.trained,
        **{**BLOCKS[block], **changes},
    )
    model = CausalLM(config).to(dtype).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".score." in name:
                parameter.add_(torch.rand(parameter.shape, generator=generator, dtype=dtype))
    model.using(spec)
    return model


def _ids(rows: int, length: int = LENGTH, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (rows, length), generator=generator)


def _read(
    model: CausalLM, cache: ModelCache, ids: Tensor, sizes: list[int], padding: Tensor | None = None
) -> Tensor:
    """The logits of all of `ids`, read in pieces of these sizes."""
    parts = torch.split(ids, sizes, 1)
    pads = [None] * len(sizes) if padding is None else torch.split(padding, sizes, 1)
    read = [model(part, pad, cache=cache) for part, pad in zip(parts, pads, strict=True)]
    return torch.cat(read, 1)


@torch.no_grad()
def every_way_of_reading_is_one(text: str, block: str) -> None:
    model, ids = _model(text, block), _ids(2)
    whole = model(ids)
    growing = _read(model, model.new_cache(), ids, [4, 1, 1, 1, 2, 1, 5])
    torch.testing.assert_close(growing, whole, rtol=0, atol=1e-10)
    steps = [1] * LENGTH if block == "gqa" else [LENGTH - 2, 1, 1]
    static = _read(model, model.new_cache(LENGTH), ids, steps)
    torch.testing.assert_close(static, whole, rtol=0, atol=1e-10)
    last, cache = model.prefill(ids, chunk=6)
    torch.testing.assert_close(last, whole[:, -1], rtol=0, atol=1e-10)
    assert cache.length == LENGTH


@torch.no_grad()
def left_padding_is_nothing(text: str, block: str) -> None:
    model, ids = _model(text, block), _ids(3)
    padding = torch.zeros(3, LENGTH, dtype=torch.bool)
    padding[1, :2], padding[2, :7] = True, True
    read = _read(model, model.new_cache(), ids, [4, 1, 6, 1, 1, 1, 1], padding)
    for row, pads in enumerate((0, 2, 7)):
        alone = model(ids[row : row + 1, pads:])
        torch.testing.assert_close(read[row : row + 1, pads:], alone, rtol=0, atol=1e-10)


@torch.no_grad()
def in_float32(text: str, block: str) -> None:
    model, ids = _model(text, block, torch.float32), _ids(1)
    read = _read(model, model.new_cache(), ids, [6, 3, *[1] * 6])
    torch.testing.assert_close(read, model(ids), rtol=0, atol=1e-5)


def main(block: str) -> int:
    """Try every score; the number of failures."""
    torch.set_num_threads(1)
    failures = 0
    for text in _texts(block):
        for check in (every_way_of_reading_is_one, left_padding_is_nothing, in_float32):
            try:
                check(text, block)
            except Exception:
                failures += 1
                print(f"{check.__name__}, {text}, {block}:\n{traceback.format_exc()}")
    print(f"{len(_texts(block))} scores")
    return failures


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1])))
