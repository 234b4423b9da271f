"""Degenerate cases in which a method must change nothing, exactly or to rounding."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from normattn import Score, ScoreSpec, attention
from normattn.score.parts import rope_frequencies

from .cases import tensors

L = 8
VARIANTS = ("Baseline", "KNA", "CosA")
every_variant = pytest.mark.parametrize("variant", VARIANTS)
every_backend = pytest.mark.parametrize("backend", ["reference", "chunked", "auto"])
every_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])


def qkv(length: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shape = (2, 2, length, 8)
    return tensors(shape, shape, shape, dtype=dtype)


def out(text: str, inputs: list[Tensor], backend: str = "auto") -> Tensor:
    q, k, v = inputs
    spec = ScoreSpec.parse(text, train_length=L)
    return attention(q, k, v, spec, backend=backend)


@pytest.mark.parametrize("method", ["PI", "NTK", "NTKMixed", "YaRN"])
@every_variant
@every_backend
def test_a_factor_of_1(method: str, variant: str, backend: str) -> None:
    inputs = qkv(20)
    expected = out(variant, inputs, backend)
    torch.testing.assert_close(
        out(f"{variant}-{method}(factor=1)", inputs, backend), expected, rtol=1e-12, atol=1e-12
    )
    assert (out(f"{variant}-{method}(factor=2)", inputs, backend) - expected).abs().max() > 1e-3


def test_the_same_base() -> None:
    inputs = qkv(20)
    assert torch.equal(out("KNA-ABF(base=10000)", inputs), out("KNA", inputs))


@pytest.mark.parametrize("window", [20, 21, 1000])
@every_variant
@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_a_window_of_the_whole_length(window: int, variant: str, backend: str) -> None:
    inputs = qkv(20)
    expected = out(variant, inputs, backend)
    whole = out(f"{variant}-ReRoPE(window={window})", inputs, backend)
    torch.testing.assert_close(whole, expected, rtol=1e-12, atol=1e-12)
    less = out(f"{variant}-ReRoPE(window=18)", inputs, backend)
    torch.testing.assert_close(less[:, :, :19], whole[:, :, :19], rtol=1e-12, atol=1e-12)
    assert (less[:, :, 19:] - whole[:, :, 19:]).abs().max() > 1e-6


@every_variant
@every_backend
@every_dtype
@pytest.mark.parametrize("place", ["", "-NoPE", "-ReRoPE(window=3)", "-YaRN(factor=4)"])
def test_post_hoc_log_n_changes_no_bit_within_the_training_length(
    variant: str, backend: str, dtype: torch.dtype, place: str
) -> None:
    inputs = qkv(L + 6, dtype)
    plain = out(f"{variant}{place}", inputs, backend)
    scaled = out(f"{variant}-logn+{place}", inputs, backend)
    assert torch.equal(scaled[:, :, :L], plain[:, :, :L])
    if dtype != torch.bfloat16:
        assert ((scaled - plain)[:, :, L:].abs().amax((0, 1, 3)) > 0).all()
    short = [x[:, :, :L] for x in inputs]
    assert torch.equal(
        out(f"{variant}-logn+{place}", short, backend), out(f"{variant}{place}", short, backend)
    )


@pytest.mark.parametrize("length", [2, 3, 10, 64, 100, 512, 1000, 4096, 12345])
def test_post_hoc_log_n_is_exactly_1_at_the_training_length(length: int) -> None:
    logn = ScoreSpec.parse("KNA-logn+", train_length=length).logn
    assert logn is not None
    factor = logn.factor(torch.arange(1, length + 2, dtype=torch.float64), length)
    assert (factor[:length] == 1).all()
    assert factor[length] > 1


@pytest.mark.parametrize("variant", ["Baseline", "KNA", "QNA"])
def test_log_n_at_the_training_length(variant: str) -> None:
    """The row with n = L is that of the score without log-n; bidirectional, every row is."""
    inputs = qkv(L)
    plain, scaled = out(variant, inputs), out(f"{variant}-logn", inputs)
    torch.testing.assert_close(scaled[:, :, -1], plain[:, :, -1], rtol=1e-12, atol=1e-12)
    assert (scaled[:, :, :-1] - plain[:, :, :-1]).abs().amax((0, 1, 3))[1:].min() > 1e-6
    q, k, v = inputs
    both = [
        attention(q, k, v, ScoreSpec.parse(name, train_length=L), causal=False)
        for name in (variant, f"{variant}-logn")
    ]
    torch.testing.assert_close(both[0], both[1], rtol=1e-12, atol=1e-12)


def test_cosa_log_n_where_n_is_half_the_training_length() -> None:
    inputs = qkv(2 * L)
    plain, scaled = out("CosA", inputs), out("CosA-logn", inputs)
    at = L // 2 - 1
    torch.testing.assert_close(scaled[:, :, at], plain[:, :, at], rtol=1e-12, atol=1e-12)


def test_the_norm_of_what_is_normalised_does_not_matter() -> None:
    q, k, v = (x.detach() for x in qkv(12))
    sizes = torch.linspace(0.1, 50, 12, dtype=torch.float64)[:, None]
    for text, left, right in (("KNA", 1.0, sizes), ("QNA", sizes, 1.0), ("CosA", sizes, sizes)):
        torch.testing.assert_close(out(text, [q * left, k * right, v]), out(text, [q, k, v]))


def test_cosa_is_kna_and_qna_at_once() -> None:
    q, k, v = (x.detach() for x in qkv(12))
    unit_q, unit_k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
    base = 4 * math.log(L / 2)
    torch.testing.assert_close(out("CosA", [q, k, v]), out("KNA", [unit_q * base, k, v]))
    torch.testing.assert_close(out("CosA", [q, k, v]), out("QNA", [q, unit_k * base, v]))


def test_a_gain_of_ones_is_no_gain() -> None:
    q, k, v = qkv(12)
    for title in ("QKRMSNorm", "QKLayerNorm", "KRMSNorm"):
        ours = attention(q, k, v, Score(title, 2, 8).double())
        assert torch.equal(ours, attention(q, k, v, f"{title}(gain=false)"))


def test_rms_norm_of_both_is_cosine_attention_with_root_d() -> None:
    """⟨q√d/‖q‖, k√d/‖k‖⟩/√d = √d·cos: what tells the two families of names apart."""
    q, k, v = (x.detach() for x in qkv(12))
    rms = attention(q, k, v, "QKRMSNorm(gain=false,eps=0)")
    c = math.sqrt(8) / math.log(L / 2)
    torch.testing.assert_close(rms, out(f"CosA(c={c!r})", [q, k, v]))


def test_one_token_attends_to_itself() -> None:
    for text in ("KNA", "KNA-logn", "CosA-logn", "Baseline-ReRoPE(window=1)", "QNA-NoPE"):
        q, k, v = qkv(1)
        for backend in ("reference", "chunked", "auto"):
            torch.testing.assert_close(out(text, [q, k, v], backend), v)


def test_the_default_position_is_rope_with_base_10000() -> None:
    inputs = qkv(12)
    named = out("KNA-RoPE(base=10000,layout=half)", inputs)
    assert torch.equal(named, out("KNA", inputs))
    expected = [1.0, 0.1, 0.01, 0.001]
    assert rope_frequencies(8, 10000.0).tolist() == pytest.approx(expected)
