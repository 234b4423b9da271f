"""Frequencies against those of transformers, and rotation far out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from normattn import ScoreSpec
from normattn.score.rotary import key_tables

from .cases import tensors

D = 8


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    near = key_tables(ScoreSpec.parse("Baseline-RoPE"), D, positions, x.dtype).near
    return x if near is None else near(x)


def test_far_positions_keep_their_precision_in_float32() -> None:
    """Angles are made in float64: at position 2^20 a float32 angle would be off by 0.06."""
    (x,) = tensors((1, 1, 1, D))
    where = torch.tensor([2**20 + 1])
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 0.02)):
        low = rotated(x.to(dtype), where)
        assert low.dtype == dtype
        torch.testing.assert_close(low.double(), rotated(x, where), rtol=tolerance, atol=tolerance)


def ours(text: str, d: int, base: float = 10000.0, block: int = 0) -> tuple[Tensor, float]:
    """Frequencies and gain of λ."""
    spec = ScoreSpec.parse(f"Baseline-{text}").resolve().for_block(block)
    assert spec.rope_scaling is not None
    theta = spec.rope_scaling.inverse_frequencies(d, base, spec.train_length)
    assert theta.dtype == torch.float64
    return theta, spec.rope_scaling.gain(spec.train_length)


def theirs(kind: str, d: int, length: int, base: float, at: int, **more: Any) -> tuple[Any, float]:
    """Frequencies as transformers makes them, and its attention factor, squared."""
    config = LlamaConfig(
        hidden_size=d,
        num_attention_heads=1,
        max_position_embeddings=length,
        rope_parameters={"rope_type": kind, "rope_theta": base, **more},
    )
    theta, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=at)
    return theta.double(), float(factor) ** 2


@pytest.mark.parametrize(("d", "length"), [(16, 64), (128, 2048), (64, 32)])
@pytest.mark.parametrize("s", [1.0, 2.0, 31.7])
@pytest.mark.parametrize("base", [10000.0, 500000.0])
def test_every_scaling_of_transformers(d: int, length: int, s: float, base: float) -> None:
    factors = [1 + 0.37 * m for m in range(d // 2)]
    own_factors = ":".join(map(repr, factors))
    original = {"original_max_position_embeddings": length}
    llama3 = {"low_freq_factor": 0.5, "high_freq_factor": 20.0, **original}
    own = {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1 + 0.05 * math.log(s)}
    own |= original
    long = {"long_factor": factors, "short_factor": [1.0] * (d // 2), **original}
    cases: list[tuple[str, str, int, dict[str, Any]]] = [
        (f"PI(factor={s})", "linear", length, {}),
        (f"YaRN(factor={s})", "yarn", length, original),
        (f"YaRN(factor={s},beta_fast=16,beta_slow=2,sharpness=0.05)", "yarn", length, own),
        (f"Llama3(factor={s},low=0.5,high=20)", "llama3", length, llama3),
        (f"LongRoPE(factor={s},factors={own_factors})", "longrope", length + 1, long),
        # At a fixed n, base·(s·n/L − (s − 1))^(d/(d−2)) is NTK with that bracket as its factor.
        (f"NTK(factor={s * 1.5 - (s - 1)!r})", "dynamic", length * 3 // 2, {}),
    ]
    for text, kind, at, more in cases:
        theta, gain = theirs(kind, d, length, base, at, factor=s, **more)
        mine, own_gain = ours(f"{text}@{length}", d, base)
        torch.testing.assert_close(mine, theta, rtol=1e-6, atol=0)
        assert own_gain == pytest.approx(gain, rel=1e-12)
    # A prompt that ends with a block: its last row has the frequencies of the whole prompt.
    for block in (0, 1, 3):
        theta, _ = theirs("dynamic", d, length, base, length * (block + 1), factor=s)
        mine, _ = ours(f"DynamicNTK(factor={s})@{length}", d, base, block)
        torch.testing.assert_close(mine, theta, rtol=1e-6, atol=0)
