"""The frequencies of every spectrum, against transformers and against the formulas by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from normattn import InputError, ScoreSpec, attention
from normattn.score.parts import rope_frequencies
from normattn.score.positions import Positions
from normattn.score.rotary import query_scale

from .cases import tensors
from .recipe import Recipe, frequencies

SIZES = [(16, 64), (128, 2048), (64, 32)]


def ours(text: str, d: int, base: float = 10000.0) -> Tensor:
    spec = ScoreSpec.parse(text).resolve()
    assert spec.rope_scaling is not None
    return spec.rope_scaling.inverse_frequencies(d, base, spec.train_length)


def theirs(
    kind: str, d: int, length: int, base: float, at: int | None = None, **more: Any
) -> tuple[Tensor, float]:
    """Frequencies and attention factor as transformers makes them."""
    config = LlamaConfig(
        hidden_size=d,
        num_attention_heads=1,
        max_position_embeddings=length,
        rope_parameters={"rope_type": kind, "rope_theta": base, **more},
    )
    theta, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=at)
    return theta.double(), float(factor)


def _close(mine: Tensor, other: Tensor) -> None:
    assert mine.dtype == torch.float64
    torch.testing.assert_close(mine, other, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("d", "length"), SIZES)
@pytest.mark.parametrize("factor", [1.0, 31.7])
@pytest.mark.parametrize("base", [10000.0, 500000.0])
def test_yarn_is_that_of_transformers(d: int, length: int, factor: float, base: float) -> None:
    more: dict[str, Any] = {"factor": factor, "original_max_position_embeddings": length}
    theta, gain = theirs("yarn", d, length, base, **more)
    text = f"Baseline-YaRN(factor={factor})@{length}"
    _close(ours(text, d, base), theta)
    spectrum = ScoreSpec.parse(text).rope_scaling
    assert spectrum is not None
    assert spectrum.gain(length) == pytest.approx(gain**2, rel=1e-12)


def test_yarn_with_other_turns() -> None:
    more: dict[str, Any] = {
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "original_max_position_embeddings": 512,
    }
    theta, _ = theirs("yarn", 64, 512, 10000.0, factor=4.0, **more)
    _close(ours("Baseline-YaRN(factor=4,beta_fast=16,beta_slow=2)@512", 64), theta)


def test_yarn_keeps_the_fast_and_divides_the_slow() -> None:
    """The way round of the ramp, told apart without any oracle."""
    theta, plain = ours("Baseline-YaRN(factor=8)@512", 64), rope_frequencies(64, 10000.0)
    turns = 512 * plain / (2 * math.pi)
    assert torch.equal(theta[turns > 40], plain[turns > 40])
    torch.testing.assert_close(theta[turns < 0.7], plain[turns < 0.7] / 8)
    assert (theta <= plain).all()
    assert (theta >= plain / 8 * (1 - 1e-12)).all()


@pytest.mark.parametrize(("d", "length"), SIZES)
def test_pi_is_linear_scaling_of_transformers(d: int, length: int) -> None:
    theta, _ = theirs("linear", d, length, 10000.0, factor=8.0)
    _close(ours("Baseline-PI(factor=8)", d), theta)


@pytest.mark.parametrize(("d", "length"), SIZES)
@pytest.mark.parametrize("factor", [1.0, 2.0, 8.0])
@pytest.mark.parametrize("times", [1.5, 4, 8])
def test_ntk_is_dynamic_ntk_of_transformers_at_one_length(
    d: int, length: int, factor: float, times: float
) -> None:
    """At a fixed n, base·(s·n/L − (s − 1))^(d/(d−2)) is NTK with that bracket as its factor."""
    at = round(length * times)
    theta, _ = theirs("dynamic", d, length, 10000.0, at=at, factor=factor)
    stretch = factor * at / length - (factor - 1)
    _close(ours(f"Baseline-NTK(factor={stretch!r})", d), theta)


@pytest.mark.parametrize(("d", "length"), SIZES)
@pytest.mark.parametrize("factor", [1.0, 2.0, 8.0])
def test_dynamic_ntk_is_that_of_transformers_at_prefill(d: int, length: int, factor: float) -> None:
    """A prompt that ends with a block: its last row has the spectrum of the whole prompt."""
    spec = ScoreSpec.parse(f"Baseline-DynamicNTK(factor={factor})@{length}")
    for block in (0, 1, 3):
        theta, _ = theirs("dynamic", d, length, 10000.0, at=length * (block + 1), factor=factor)
        spectrum = spec.for_block(block).rope_scaling
        assert spectrum is not None
        _close(spectrum.inverse_frequencies(d, 10000.0, length), theta)
    assert spec.rope_scaling is not None
    with pytest.raises(InputError, match="frequencies for each block of rows"):
        spec.rope_scaling.inverse_frequencies(d, 10000.0, length)


@pytest.mark.parametrize(("d", "length"), SIZES)
@pytest.mark.parametrize("factor", [1.0, 31.7])
@pytest.mark.parametrize("base", [10000.0, 500000.0])
def test_llama3_is_that_of_transformers(d: int, length: int, factor: float, base: float) -> None:
    for low, high in ((1.0, 4.0), (0.5, 20.0)):
        more: dict[str, Any] = {
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": length,
        }
        theta, _ = theirs("llama3", d, length, base, **more)
        _close(
            ours(f"Baseline-Llama3(factor={factor},low={low},high={high})@{length}", d, base), theta
        )


@pytest.mark.parametrize(("d", "length"), SIZES)
@pytest.mark.parametrize("factor", [1.0, 4.0, 32.0])
def test_long_rope_is_that_of_transformers(d: int, length: int, factor: float) -> None:
    factors = [1 + 0.37 * m for m in range(d // 2)]
    more: dict[str, Any] = {
        "factor": factor,
        "long_factor": factors,
        "short_factor": [1.0] * (d // 2),
        "original_max_position_embeddings": length,
    }
    theta, gain = theirs("longrope", d, length, 10000.0, at=length + 1, **more)
    written = ":".join(map(repr, factors))
    text = f"Baseline-LongRoPE(factor={factor},factors={written})@{length}"
    _close(ours(text, d), theta)
    spectrum = ScoreSpec.parse(text).rope_scaling
    assert spectrum is not None
    assert spectrum.gain(length) == pytest.approx(gain**2, rel=1e-12)


def test_ntk_divides_the_lowest_by_the_factor_and_keeps_the_highest() -> None:
    theta, plain = ours("Baseline-NTK(factor=8)", 32), rope_frequencies(32, 10000.0)
    assert theta[0] == plain[0] == 1
    assert (plain[-1] / theta[-1]).item() == pytest.approx(8, rel=1e-12)


def test_ntk_mixed_by_hand() -> None:
    """d = 4, s = 16: a = ln 16 / 2^b; the last frequency is divided by exactly s."""
    theta = ours("Baseline-NTKMixed(factor=16)", 4)
    a = math.log(16) / 2**0.625
    expected = [math.exp(-a), 0.01 * math.exp(-a * 2**0.625)]
    _close(theta, torch.tensor(expected, dtype=torch.float64))
    assert theta[-1].item() == pytest.approx(0.01 / 16, rel=1e-12)
    other = ours("Baseline-NTKMixed(factor=16,b=0.75)", 4)
    assert other[0].item() == pytest.approx(math.exp(-math.log(16) / 2**0.75), rel=1e-12)


def test_abf_is_another_base() -> None:
    _close(ours("Baseline-ABF", 16), rope_frequencies(16, 500000.0))
    _close(ours("Baseline-ABF(base=1e6)", 16), rope_frequencies(16, 1e6))


@pytest.mark.parametrize(
    "method", ["PI", "ABF", "NTK", "NTKOld", "NTKMixed", "YaRN", "Llama3", "LongRoPE"]
)
@pytest.mark.parametrize(("d", "length"), SIZES)
def test_all_against_the_oracle(method: str, d: int, length: int) -> None:
    recipe = Recipe(method=method, train_length=length, factor=5.5, base=20000.0)
    expected = torch.tensor(frequencies(recipe, d), dtype=torch.float64)
    torch.testing.assert_close(ours(recipe.text, d, 20000.0), expected, rtol=1e-12, atol=0)


def test_the_gain_of_yarn_enters_the_logit_once_as_a_square() -> None:
    """Two keys of which one scores 0: the logit can be read off the weights."""
    d, spec = 4, "Baseline-YaRN(factor=8)@16"
    q = torch.tensor([1.0, 2.0, 0.5, -1.0], dtype=torch.float64).expand(1, 1, 1, d)
    k = torch.stack((torch.zeros(d, dtype=torch.float64), q[0, 0, 0]))[None, None]
    v = torch.tensor([[0.0] * d, [1.0] * d], dtype=torch.float64)[None, None]
    weight = attention(q, k, v, spec, causal=False)[0, 0, 0, 0]
    logit = torch.log(weight / (1 - weight)).item()
    assert logit == pytest.approx(q.square().sum().item() / 2 * (0.1 * math.log(8) + 1) ** 2)


def test_lambda_of_every_kind() -> None:
    """The scales of the literature as numbers, d = 64, L = 512, at n = 1 … 1024."""
    where = Positions.of(1024, 1024, True, torch.device("cpu"))

    def at(text: str, n: int) -> float:
        scale = query_scale(ScoreSpec.parse(text, train_length=512), 64, where.n)
        return float(scale[n - 1] if isinstance(scale, Tensor) else scale)

    assert at("Baseline", 9) == 1 / 8
    assert at("QKRMSNorm", 9) == at("QKLayerNorm", 9) == at("KRMSNorm", 9) == 1 / 8
    assert at("QNA", 9) == at("KNA", 9) == 1
    assert at("CosA", 9) == pytest.approx(4 * math.log(256))
    assert at("CosA(c=3.5)", 9) == pytest.approx(3.5 * math.log(256))
    assert at("CosA-logn", 100) == pytest.approx(4 * math.log(100))
    assert at("CosA-logn", 1) == 0
    assert at("KNA-logn", 1024) == pytest.approx(10 / 9)
    assert at("Baseline-logn", 1024) == pytest.approx(10 / 72)
    assert at("KNA-logn+", 100) == at("KNA-logn+", 512) == 1
    assert at("KNA-logn+", 1024) == pytest.approx(10 / 9)
    assert at("CosA-logn+", 1024) == pytest.approx(4 * math.log(256) * 10 / 9)
    assert at("KNA-YaRN(factor=8)", 9) == pytest.approx((0.1 * math.log(8) + 1) ** 2)


@pytest.mark.parametrize(
    ("spec", "d", "reason"),
    [
        ("Baseline-NTK(factor=2)", 2, "NTK needs a head dimension of at least 4"),
        ("Baseline-LongRoPE(factor=2)@8", 2, "LongRoPE needs factors=… where the head dimension"),
        ("Baseline-LongRoPE(factor=2,factors=1:2)@8", 8, "one factor for each of the 4 pairs"),
        ("Baseline-DynamicNTK@2", 2, "NTK needs a head dimension of at least 4"),
        ("Baseline", 3, "Baseline needs an even head dimension, but it is 3"),
    ],
)
def test_dimensions_without_a_spectrum(spec: str, d: int, reason: str) -> None:
    q, k, v = tensors((1, 1, 3, d), (1, 1, 3, d), (1, 1, 3, d))
    with pytest.raises(InputError, match=reason):
        attention(q, k, v, spec)
