"""The limits of parts: where one changes nothing or is another, first values, precision, NaN."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from normattn import InputError, Score, ScoreSpec, attention
from normattn.lab.diagnostics.collector import unseen_angles

from .cases import built, tensors
from .recipe import Recipe

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


# Values at which a part changes nothing of 20 tokens; what it does else the oracle knows.
NOTHING = (
    *("PI(factor=1)", "NTK(factor=1)", "NTKOld(factor=1)", "NTKMixed(factor=1)", "YaRN(factor=1)"),
    *("LongRoPE(factor=1)", "LongRoPE(factor=1,factors=1:1:1:1)"),
    *("Llama3(factor=1)", "ABF(base=10000)", "ClippedRoPE(clip=1)", "ReRoPE(window=20)"),
    *("LeakyReRoPE(s=1)", "LeakyReRoPE(window=20,s=3)", "SelfExtend(group=1)"),
    *("SelfExtend(window=20,group=4)", "StreamingLLM(window=16,sinks=4)", "SoftCap(cap=1e9)"),
    *("DualChunk(size=15,local=5)", "SlidingWindow(window=20)", "PartialRoPE(fraction=1)"),
    *("XPos(scale=1e12)", "PRoPE(fraction=1)"),
)
TO_ANOTHER = [
    *((text, "RoPE") for text in NOTHING),
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


def test_a_given_scale_takes_the_place_of_the_root() -> None:
    q, k, v = qkv(12)
    wider = [q * 0.3 * math.sqrt(D), k, v]
    assert_same(out("Baseline(scale=0.3)", [q, k, v]), out("Baseline", wider))


def test_a_sink_starts_at_0_and_may_take_nothing_or_all() -> None:
    q, k, v = qkv(9)
    score = Score("Baseline-Sink", 2, D).double()
    (sink,) = score.parameters()
    assert (sink == 0).all()
    for value, expected in ((-1e4, attention(q, k, v, "Baseline")), (1e4, torch.zeros_like(q))):
        torch.nn.init.constant_(sink, value)
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


def test_embeddings_of_cope_start_at_nothing_and_learn() -> None:
    q, k, v = tensors((2, 2, 11, D), (2, 1, 11, D), (2, 1, 11, D))
    score = Score("Baseline-CoPE", 2, D, 1).double()
    out = attention(q, k, v, score)
    torch.testing.assert_close(out, attention(q, k, v, "Baseline-NoPE"))
    (grad,) = torch.autograd.grad(out.square().sum(), list(score.parameters()))
    assert grad.shape == (64, D)
    assert (grad[:5] != 0).all()
    assert (grad[12:] == 0).all()


def test_half_precision_counts_many_keys() -> None:
    """Hundreds of gates, or shares of a stick: summed in bfloat16 they would stand still."""
    q, k, v = (x.detach() for x in tensors(*[(1, 1, 1000, 8)] * 3))
    score = Score("Baseline-CoPE(positions=700)", 1, 8)
    (embeddings,) = score.parameters()
    embeddings.data.copy_((torch.arange(700) / 4).cos()[:, None].expand(-1, 8))
    for made, first, inputs in (
        (score, 500, (q, k, v)),
        ("Baseline-NoPE-StickBreaking", 0, (3 * q - 4, k.abs(), v)),
    ):
        low_q, low_k, low_v = (x.bfloat16() for x in inputs)
        half = attention(low_q, low_k, low_v, made)
        if isinstance(made, Score):
            # Counted by what autocast makes of the product, rows were off by 0.06.
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert torch.equal(attention(low_q, low_k, low_v, made), half)
            made = made.double()
        exact = attention(low_q.double(), low_k.double(), low_v.double(), made)
        assert half.dtype == torch.bfloat16
        assert (half.double() - exact)[:, :, first:].abs().max() < 0.03


def test_a_key_that_is_no_number_spoils_the_rows_that_see_it() -> None:
    q, k, v = (x.detach() for x in tensors((2, 2, 11, D), (2, 1, 11, D), (2, 1, 11, D)))
    k[:, :, 5] = torch.nan
    score = built(Recipe("Baseline", "", "none", bias="CoPE"), 2, D, 1)
    for backend in ("strips", "reference"):
        out = attention(q, k, v, score, backend=backend)
        assert out[:, :, :5].isfinite().all()
        assert out[:, :, 5:].isnan().all()
