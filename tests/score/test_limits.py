"""The limits in which a part changes nothing, or is another part."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from normattn import InputError, Score, ScoreSpec, attention
from normattn.lab.diagnostics.angles import unseen_angles

from .cases import tensors

L, D = 8, 8


def qkv(length: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shape = (2, 2, length, D)
    return tensors(shape, shape, shape, dtype=dtype)


def out(text: str, inputs: list[Tensor], **options: Any) -> Tensor:
    q, k, v = inputs
    spec = ScoreSpec.parse(text) if "@" in text else ScoreSpec.parse(text, train_length=L)
    made: Tensor = attention(q, k, v, spec, **options)
    return made


def assert_same(one: Tensor, two: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance)


TO_NOTHING = [
    *(("PI(factor=1)", "PI(factor=2)"), ("NTK(factor=1)", "NTK(factor=2)")),
    *(("NTKMixed(factor=1)", "NTKMixed(factor=2)"), ("YaRN(factor=1)", "YaRN(factor=2)")),
    *(("NTKOld(factor=1)", "NTKOld(factor=3)"), ("ABF(base=10000)", "ABF(base=20000)")),
    ("Llama3(factor=1)", "Llama3(factor=3,low=0.1,high=2)"),
    ("LongRoPE(factor=1)", "LongRoPE(factor=3)"),
    ("LongRoPE(factor=1,factors=1:1:1:1)", "LongRoPE(factor=1,factors=1:1:1:2)"),
    ("ReRoPE(window=20)", "ReRoPE(window=18)"),
    ("LeakyReRoPE(s=1)", "LeakyReRoPE(s=2)"),
    ("LeakyReRoPE(window=20,s=3)", "LeakyReRoPE(window=17,s=3)"),
    ("SelfExtend(group=1)", "SelfExtend(group=2)"),
    ("SelfExtend(window=20,group=4)", "SelfExtend(window=18,group=4)"),
    ("StreamingLLM(window=16,sinks=4)", "StreamingLLM(window=15,sinks=4)"),
    ("DualChunk(size=15,local=5)", "DualChunk(size=10,local=5)"),
    ("SlidingWindow(window=20)", "SlidingWindow(window=19)"),
    ("SoftCap(cap=1e9)", "SoftCap(cap=1)"),
    ("PartialRoPE(fraction=1)", "PartialRoPE(fraction=0.9)"),
    ("XPos(scale=1e12)", "XPos"),
    ("PRoPE(fraction=1)", "PRoPE(fraction=0.5)"),
    ("ClippedRoPE(clip=1)", "ClippedRoPE(clip=3)"),
    ("YaRN(factor=1,sharpness=0)", "YaRN(factor=1.5,sharpness=1)"),
]


@pytest.mark.parametrize(("nothing", "something"), TO_NOTHING)
def test_nothing_is_changed(nothing: str, something: str) -> None:
    inputs = qkv(20)
    for variant in ("Baseline", "CosA-logn"):
        expected = out(variant, inputs)
        assert_same(out(f"{variant}-{nothing}", inputs), expected)
        assert (out(f"{variant}-{something}", inputs) - expected).abs().max() > 1e-6


TO_ANOTHER = [
    ("LeakyReRoPE(window=3,s=1e12)", "ReRoPE(window=3)"),
    ("SelfExtend(window=3,group=100)", "ReRoPE(window=3)"),
    ("StreamingLLM(window=5,sinks=0)", "SlidingWindow(window=5)"),
    ("LongRoPE(factors=2:2:2:2,factor=1)", "PI(factor=2)"),
    ("NTKOld(factor=5)", "ABF(base=50000)"),
    ("Llama3(factor=4,low=1000,high=2000)", "PI(factor=4)"),
    *(("DynamicNTK@100", "RoPE@100"), ("RoPE-ALiBi", "ALiBi-RoPE(base=10000)")),
    *(("DroPE", "NoPE"), ("PartialRoPE-DroPE", "NoPE"), ("ClippedRoPE", "ClippedRoPE(clip=3)")),
    ("Temperature(length=21)", "Temperature(beta=0)"),
    ("RoPE(base=10000,layout=half)", "RoPE"),
    *(("RotateFirst", "RoPE"), ("YaRN(factor=3)-RotateFirst", "YaRN(factor=3)")),
]


@pytest.mark.parametrize(("one", "other"), TO_ANOTHER)
def test_one_part_is_another(one: str, other: str) -> None:
    inputs = qkv(20)
    assert_same(out(f"KNA-{one}", inputs), out(f"KNA-{other}", inputs))


@pytest.mark.parametrize("variant", ["Baseline", "KNA", "CosA"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("position", ["", "-NoPE", "-ReRoPE(window=3)", "-YaRN(factor=4)"])
def test_post_hoc_log_n_changes_no_bit_within_the_training_length(
    variant: str, dtype: torch.dtype, position: str
) -> None:
    inputs = qkv(L + 6, dtype)
    for backend in ("reference", "chunked", "auto"):
        plain = out(f"{variant}{position}", inputs, backend=backend)
        scaled = out(f"{variant}-logn+{position}", inputs, backend=backend)
        assert torch.equal(scaled[:, :, :L], plain[:, :, :L])
        if dtype != torch.bfloat16:
            assert ((scaled - plain)[:, :, L:].abs().amax((0, 1, 3)) > 0).all()


def test_variants_are_each_other_for_normalised_inputs() -> None:
    q, k, v = qkv(12)
    # ⟨q√d/‖q‖, k√d/‖k‖⟩/√d = √d·cos: what tells the two families of names apart.
    c = math.sqrt(D) / math.log(L / 2)
    assert_same(attention(q, k, v, "QKRMSNorm(gain=false,eps=0)"), out(f"CosA(c={c!r})", [q, k, v]))
    assert_same(
        attention(q, k, v, "Baseline(scale=0.3)"), out("Baseline", [q * 0.3 * D**0.5, k, v])
    )
    score = Score("QKRMSNorm", 2, D).double()
    assert torch.equal(attention(q, k, v, score), attention(q, k, v, "QKRMSNorm(gain=false)"))


def test_a_sink_starts_at_0_and_may_take_nothing_or_all() -> None:
    q, k, v = qkv(9)
    score = Score("Baseline-Sink", 2, D).double()
    assert score.sink is not None
    assert (score.sink == 0).all()
    for value, expected in ((-1e4, attention(q, k, v, "Baseline")), (1e4, torch.zeros_like(q))):
        with torch.no_grad():
            score.sink.fill_(value)
        assert_same(attention(q, k, v, score), expected)


@pytest.mark.parametrize("name", ["KERPLELog", "KERPLEPower"])
def test_what_kerple_learns_counts_as_within_its_range(name: str) -> None:
    torch.manual_seed(0)
    score = Score(f"Baseline-{name}", 64, D).double()
    assert score.bias is not None
    p, a = score.bias["p"], score.bias["a"]
    for drawn, most in zip((p, a), (2, 1) if name == "KERPLELog" else (1, 2), strict=True):
        assert 0.0099 < drawn.min() < 0.1 * most
        assert 0.9 * most < drawn.max() < most
    with torch.no_grad():
        p[0], a[0], a[1] = -3.0, -1.0, 5.0
    q, k, v = tensors((1, 64, 6, D), (1, 64, 6, D), (1, 64, 6, D))
    before = {key: value.clone() for key, value in score.state_dict().items()}
    outside = attention(q, k, v, score.train())
    assert all(torch.equal(value, before[key]) for key, value in score.state_dict().items())
    with torch.no_grad():
        p.clamp_(0.01)
        a.clamp_(0.01, math.inf if name == "KERPLELog" else 2.0)
    inside = attention(q, k, v, score)
    assert torch.equal(inside, outside)
    for grad in torch.autograd.grad(inside.square().sum(), (p, a)):
        assert (grad.isfinite() & (grad != 0)).all()


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("wanted", [3.0, -3.0])
def test_what_kerple_learns_comes_back_into_its_range(wanted: float, backend: str) -> None:
    """A step goes beyond a bound by no more than itself."""
    score = Score("Baseline-KERPLEPower", 1, D).double()
    assert score.bias is not None
    a = score.bias["a"]
    with torch.no_grad():
        score.bias["p"].fill_(1.0)
        a.fill_(-0.5 if wanted > 0 else 2.5)
    q, k, v = tensors((1, 1, 6, D), (1, 1, 6, D), (1, 1, 6, D))
    out = attention(q, k, v, score, backend=backend)
    direction = torch.autograd.grad(out.square().sum(), a, retain_graph=True)[0].sign()
    against = torch.autograd.grad(-out.square().sum(), a)[0].sign()
    # Of a gradient and its opposite the one passes whose step leads back.
    assert {float(direction), float(against)} == {0.0, -1.0 if wanted > 0 else 1.0}


def test_what_the_table_fills_in_fits_into_the_training_length() -> None:
    for length, factor in ((8, 4), (512, 8), (512, 64), (100, 7.3), (5, 2)):
        at = torch.tensor([int(length * factor) - 1.0], dtype=torch.float64)

        def distance(spec: ScoreSpec, at: Tensor = at) -> Tensor:
            assert spec.remapping is not None
            query, key = spec.remapping.far_positions(at, torch.zeros_like(at))
            return query - key

        for name in ("LeakyReRoPE", "SelfExtend"):
            spec = ScoreSpec.parse(f"KNA-{name}").resolve(length, factor)
            assert distance(spec) < length
            group = getattr(spec.remapping, "group", None)
            if group is not None:
                smaller = ScoreSpec.parse(f"KNA-{name}(group={group - 1})@{length}")
                assert distance(smaller) >= length


def test_xpos_says_where_it_ends() -> None:
    q, k, v = (x.half() for x in qkv(64))
    with pytest.raises(InputError, match=r"XPos in torch.float16 works up to position \d+"):
        attention(q, k, v, "KNA-XPos(scale=8)")


def test_dual_chunk_is_plain_within_the_training_length_and_meets_no_new_angle() -> None:
    q, k, v = qkv(40)
    whole, longer = (attention(q, k, v, f"KNA-DualChunk@{length}") for length in (40, 39))
    plain = attention(q, k, v, "KNA")
    assert_same(whole, plain)
    assert_same(longer[:, :, :39], plain[:, :, :39])
    assert not torch.allclose(longer[:, :, 39:], plain[:, :, 39:])
    for name, new in (("-DualChunk", False), ("", True)):
        found = unseen_angles(ScoreSpec.parse(f"Baseline{name}@64"), D, 512, 3)
        assert found is not None
        assert bool(found.max() > 0) == new
