"""Ragged chunks, single tokens and left padding give what each row alone gives: every score.

The file is a program too, which tries every score in a model of one kind of block: it makes
thousands of tiny calls, which the checker of shapes of `--thorough` would make ten times slower.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

import apart
from normattn.models.causal_lm import CausalLM
from normattn.models.config import CausalLMConfig
from normattn.score import ScoreSpec
from normattn.score.parts import Slot
from normattn.score.parts import base as registry

VOCABULARY, L, LENGTH = 13, 5, 12
BLOCKS: dict[str, dict[str, Any]] = {
    "gqa": {"heads": 4, "kv_heads": 2, "head_dim": 4},
    "gau": {"block": "gau", "key_size": 4},
}
COMBINED = (
    *("CosA-logn-ReRoPE(window=3)", "QKNorm2020-logn+-DynamicNTK", "KNA-logn-Packed-SelfExtend"),
    *("QKRMSNorm(gain=true)-RotateFirst-DynamicNTK", "KNA-XLNet-RoPE-Packed", "NGPT-RotateFirst"),
    *("KNA-PartialRoPE(side=last,layout=interleaved)-SelfExtend", "Baseline-ALiBi-logn+-Sink"),
    *("Baseline-NEZHA(clip=3)-Packed", "Baseline-ASScale-Entmax-Packed"),
    "Baseline-DualChunk(size=3,local=2,beyond=1)-YaRNTemperature",
    *("KNA-NoPEEvery(every=2)-ReRoPE", "Baseline-SlidingWindow(window=3)-Packed"),
    *("KNA-ValueResidual-ReRoPE(window=3)", "Baseline-ValueResidual-HWFA(window=3)"),
    "KNA-SoftCap(cap=2)-Sink-StreamingLLM(window=3,sinks=2)",
)


def _texts(block: str, every: bool) -> list[str]:
    """A score with each registered part that such a layer can have, and several combinations.

    Gated units attend by the same call as heads do: they try each sixth, unless `every`.
    """
    found = []
    for name, part in registry.parts().items():
        text = name if part.slot is Slot.VARIANT else f"KNA-{name}"
        spec = ScoreSpec.parse(text, train_length=L)
        # A gated attention unit has one head, which is no pair.
        paired = spec.difference is not None or (spec.gate is not None and spec.gate.outputs(2) < 2)
        if not spec.leaks_future and not (block == "gau" and paired):
            found.append(text)
    found += COMBINED
    return found if every or block == "gqa" else found[::6]


def _model(text: str, block: str) -> CausalLM:
    """A model of the trained parts, what it learns drawn at random, its method switched on."""
    spec = ScoreSpec.parse(text, train_length=L).resolve(L, factor=3)
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "dim": 8, "layers": 2, "train_length": L, **BLOCKS[block]}
    model = CausalLM(CausalLMConfig(**sizes, score=spec.trained)).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".score." in name:
                parameter.add_(torch.rand_like(parameter))
    model.using(spec)
    return model


@torch.no_grad()
def reads_on(text: str, block: str, room: int | None) -> None:
    """With a cache that grows, or with one of a fixed size, then with prefill."""
    model, pads = _model(text, block), (0, 2, 6)
    ids = torch.randint(0, VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(0))
    padding = torch.arange(LENGTH) < torch.tensor(pads)[:, None]
    alone = [model(ids[row : row + 1, count:]) for row, count in enumerate(pads)]
    cache, sizes = model.new_cache(room), [4, 1, 5, 1, 1]
    parts = zip(torch.split(ids, sizes, 1), torch.split(padding, sizes, 1), strict=True)
    read = torch.cat([model(part, pad, cache=cache) for part, pad in parts], 1)
    for row, count in enumerate(pads):
        torch.testing.assert_close(read[row, None, count:], alone[row], rtol=0, atol=1e-10)
    # Without padding positions are regular, which has tables of its own.
    last, _ = model.prefill(ids[:1], chunk=5)
    torch.testing.assert_close(last, alone[0][:, -1], rtol=0, atol=1e-10)


def main(block: str, every: bool) -> int:
    """Try the scores; 1 where one failed."""
    torch.set_num_threads(1)
    failures, texts = 0, _texts(block, every)
    for turn, text in enumerate(texts):
        try:
            for room in (None, LENGTH) if every else [(None, LENGTH)[turn % 2]]:
                reads_on(text, block, room)
        except Exception:
            failures += 1
            print(f"{text}, {block}:\n{traceback.format_exc()}")
    print(f"{len(texts)} scores")
    return min(1, failures)


@pytest.mark.parametrize("block", BLOCKS)
def test_every_score_reads_on(block: str, thorough: bool) -> None:
    done = apart.run(Path(__file__).read_text("utf-8"), block, *["every"] * thorough)
    assert done.code == 0, done.out[-4000:] + done.err[-2000:]
    assert int(done.out.split()[0]) > (50 if block == "gqa" or thorough else 10)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:] == ["every"]))
