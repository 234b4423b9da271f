"""The limits in which a part changes nothing, or is another part."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from normattn import InputError, Score, ScoreSpec, attention

from .cases import tensors

L, D = 8, 8


def qkv(length: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shape = (2, 2, length, D)
    return tensors(shape, shape, shape, dtype=dtype)


def out(text: str, inputs: list[Tensor], **options: Any) -> Tensor:
    q, k, v = inputs
    made: Tensor = attention(q, k, v, ScoreSpec.parse(text, train_length=L), **options)
    return made


def _same(one: Tensor, two: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance)


every_backend = pytest.mark.parametrize("backend", ["reference", "chunked", "auto"])
TO_NOTHING = [
    ("NTKOld(factor=1)", "NTKOld(factor=3)"),
    ("Llama3(factor=1)", "Llama3(factor=3,low=0.1,high=2)"),
    ("LongRoPE(factor=1)", "LongRoPE(factor=3)"),
    ("LongRoPE(factor=1,factors=1:1:1:1)", "LongRoPE(factor=1,factors=1:1:1:2)"),
    ("LeakyReRoPE(s=1)", "LeakyReRoPE(s=2)"),
    ("LeakyReRoPE(window=20,s=3)", "LeakyReRoPE(window=17,s=3)"),
    ("SelfExtend(group=1)", "SelfExtend(group=2)"),
    ("SelfExtend(window=20,group=4)", "SelfExtend(window=18,group=4)"),
    ("StreamingLLM(window=20)", "StreamingLLM(window=15)"),
    ("StreamingLLM(window=16,sinks=4)", "StreamingLLM(window=15,sinks=4)"),
    ("SlidingWindow(window=20)", "SlidingWindow(window=19)"),
    ("SoftCap(cap=1e9)", "SoftCap(cap=1)"),
    ("PartialRoPE(fraction=1)", "PartialRoPE(fraction=0.9)"),
    ("XPos(scale=1e12)", "XPos"),
    ("PRoPE(fraction=1)", "PRoPE(fraction=0.5)"),
    ("ClippedRoPE(clip=1)", "ClippedRoPE(clip=3)"),
    ("YaRN(factor=1,sharpness=0)", "YaRN(factor=1.5,sharpness=1)"),
]


@pytest.mark.parametrize(("nothing", "something"), TO_NOTHING)
@every_backend
def test_nothing_is_changed(nothing: str, something: str, backend: str) -> None:
    inputs = qkv(20)
    for variant in ("Baseline", "CosA-logn"):
        expected = out(variant, inputs, backend=backend)
        _same(out(f"{variant}-{nothing}", inputs, backend=backend), expected, 1e-9)
        changed = out(f"{variant}-{something}", inputs, backend=backend)
        assert (changed - expected).abs().max() > 1e-5


TO_ANOTHER = [
    ("LeakyReRoPE(window=3,s=1e12)", "ReRoPE(window=3)"),
    ("SelfExtend(window=3,group=100)", "ReRoPE(window=3)"),
    ("StreamingLLM(window=5,sinks=0)", "SlidingWindow(window=5)"),
    ("LongRoPE(factors=2:2:2:2,factor=1)", "PI(factor=2)"),
    ("NTKOld(factor=5)", "ABF(base=50000)"),
    ("Llama3(factor=4,low=1000,high=2000)", "PI(factor=4)"),
    ("DynamicNTK@100", "RoPE@100"),
    ("RoPE-ALiBi", "ALiBi-RoPE(base=10000)"),
    ("DroPE", "NoPE"),
    ("PartialRoPE-DroPE", "NoPE"),
    ("ClippedRoPE", "ClippedRoPE(clip=3)"),
    ("Temperature(length=21)", "Temperature(beta=0)"),
]


@pytest.mark.parametrize(("one", "other"), TO_ANOTHER)
def test_one_part_is_another(one: str, other: str) -> None:
    q, k, v = qkv(20)
    texts = [text if "@" in text else f"{text}@{L}" for text in (one, other)]
    first, second = (attention(q, k, v, f"KNA-{text}") for text in texts)
    _same(first, second, 1e-9)


def test_ssmax_starts_as_ordinary_softmax_on_average_and_log_n_is_one_of_it() -> None:
    q, k, v = qkv(20)
    score = Score(f"Baseline-SSMax(bias=true)@{L}", 2, D).double()
    assert score.logn is not None
    n = torch.arange(1, L + 1, dtype=torch.float64)
    torch.testing.assert_close((score.logn["s"][0] * n.log()).mean(), torch.ones(()).double())
    with torch.no_grad():
        score.logn["s"].fill_(1 / n[-1].log())
    _same(attention(q, k, v, score), attention(q, k, v, f"Baseline-logn@{L}"), 1e-9)
    with torch.no_grad():
        score.logn["s"].fill_(0.0)
        score.logn["b"].fill_(1.0)
    _same(attention(q, k, v, score), attention(q, k, v, "Baseline"), 1e-9)


def test_a_step_of_temperature_is_where_llama_4_and_ministral_have_it() -> None:
    """transformers: floor(i/L₀) in ministral3, floor((i + 1)/L₀) in llama4."""
    n = torch.arange(1, 20, dtype=torch.float64)
    for shift, first in ((0, 8), (1, 7)):
        logn = ScoreSpec.parse(f"Baseline-Temperature(length=8,shift={shift})").logn
        assert logn is not None
        factor = logn.factor(n, None)
        assert (factor[:first] == 1).all()
        assert (factor[first : first + 8] == 1 + 0.1 * torch.tensor(2.0).double().log()).all()


def test_a_scale_of_its_own() -> None:
    q, k, v = qkv(9)
    for name in ("Baseline", "QKRMSNorm(gain=false)"):
        own = name.replace(")", ",scale=0.3)") if "(" in name else f"{name}(scale=0.3)"
        normed = [q, k]
        if name != "Baseline":
            normed = [x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k)]
        larger = normed[0] * 0.3 * D**0.5
        _same(attention(q, k, v, own), attention(larger, normed[1], v, "Baseline"))


def test_long_rope_without_factors_is_ntk_with_a_gain() -> None:
    q, k, v = qkv(20)
    gain = 1 + torch.tensor(3.0).double().log() / torch.tensor(8.0).double().log()
    ours = attention(q, k, v, "KNA-LongRoPE(factor=3)@8")
    _same(ours, attention(q * gain, k, v, "KNA-NTK(factor=3)@8"), 1e-10)


@every_backend
def test_dynamic_ntk_is_rope_within_and_ntk_in_every_block(backend: str) -> None:
    """Rows of block b are those of NTK(factor = 1 + s·b): constant within a block."""
    inputs = qkv(3 * L + 2)
    for s in (1.0, 2.5):
        moving = out(f"KNA-DynamicNTK(factor={s})", inputs, backend=backend)
        within = out("KNA", inputs, backend=backend)
        _same(moving[:, :, :L], within[:, :, :L])
        for block in range(4):
            rows = slice(block * L, (block + 1) * L)
            fixed = out(f"KNA-NTK(factor={1 + s * block})", inputs, backend="reference")
            _same(moving[:, :, rows], fixed[:, :, rows], 1e-10)


def test_a_sink_that_takes_nothing_and_one_that_takes_all() -> None:
    q, k, v = qkv(9)
    score = Score("Baseline-Sink", 2, D).double()
    assert score.sink is not None
    assert (score.sink == 0).all()
    plain = attention(q, k, v, "Baseline")
    weights = {}
    for value in (-1e4, 0.0, 1e4):
        with torch.no_grad():
            score.sink.fill_(value)
        weights[value] = attention(q, k, v, score)
    _same(weights[-1e4], plain)
    assert weights[1e4].abs().max() < 1e-12
    ones = attention(torch.zeros_like(q), k, torch.ones_like(v), _zeroed(score))
    rows = torch.arange(1, 10, dtype=torch.float64)[:, None]
    _same(ones, (rows / (rows + 1)).expand_as(ones))


def _zeroed(score: Score) -> Score:
    assert score.sink is not None
    with torch.no_grad():
        score.sink.zero_()
    return score


def test_one_document_is_no_document() -> None:
    q, k, v = qkv(20)
    one = torch.full((2, 20), 3)
    for text in ("KNA-logn", "Baseline-ALiBi", "KNA-DynamicNTK", "KNA-SelfExtend(group=2)"):
        _same(out(f"{text}-Packed", [q, k, v], documents=one), out(text, [q, k, v]))
    both = out("KNA-logn-Packed", [q, k, v], documents=one, causal=False)
    _same(both, out("KNA-logn", [q, k, v], causal=False))


@pytest.mark.parametrize("text", ["KNA-logn", "CosA-logn+-SelfExtend(group=2)", "KNA-DynamicNTK"])
@pytest.mark.parametrize("causal", [True, False])
def test_a_packed_row_is_its_documents_one_by_one(text: str, causal: bool) -> None:
    if not causal and text != "KNA-logn":
        return
    inputs = qkv(20)
    documents = torch.tensor([0] * 3 + [1] * 12 + [2] * 5).expand(2, -1)
    packed = out(f"{text}-Packed", inputs, documents=documents, causal=causal)
    for rows in (slice(0, 3), slice(3, 15), slice(15, 20)):
        alone = out(text, [x[:, :, rows] for x in inputs], causal=causal)
        _same(packed[:, :, rows], alone, 1e-10)


def test_without_a_gain_the_order_does_not_matter() -> None:
    inputs = qkv(12)
    for variant in ("KNA", "QNA-logn", "CosA", "QKRMSNorm(gain=false)", "KNA-YaRN(factor=3)"):
        _same(out(f"{variant}-RotateFirst", inputs), out(variant, inputs))
    q, k, v = inputs
    score = {order: Score(f"QKRMSNorm{order}", 2, D).double() for order in ("", "-RotateFirst")}
    _same(attention(q, k, v, score[""]), attention(q, k, v, score["-RotateFirst"]))
    with torch.no_grad():
        for each in score.values():
            for gain in each.parameters():
                gain.copy_(torch.linspace(0.5, 2, gain.numel()).view_as(gain))
    first, last = (attention(q, k, v, each) for each in score.values())
    assert (first - last).abs().max() > 1e-3


def test_alibi_slopes_of_the_paper() -> None:
    def slopes(heads: int) -> list[float]:
        bias = ScoreSpec.parse("Baseline-ALiBi").bias
        assert bias is not None
        values = bias.values(torch.arange(3, dtype=torch.float64), heads, {})
        assert values.shape == (heads, 3)
        _same(values[:, 2], 2 * values[:, 1])
        return (-values[:, 1]).tolist()

    assert slopes(8) == [2.0**-h for h in range(1, 9)]
    assert slopes(2) == [2.0**-4, 2.0**-8]
    assert slopes(1) == [2.0**-8]
    assert slopes(3) == [2.0**-4, 2.0**-8, 2.0**-2]
    assert slopes(12) == slopes(8) + [2.0 ** -(h + 0.5) for h in range(4)]


@pytest.mark.parametrize("name", ["KERPLELog", "KERPLEPower"])
def test_what_kerple_learns_stays_in_range(name: str) -> None:
    torch.manual_seed(0)
    score = Score(f"Baseline-{name}", 64, D).double()
    assert score.bias is not None
    p, a = score.bias["p"], score.bias["a"]
    for drawn, most in zip((p, a), (2, 1) if name == "KERPLELog" else (1, 2), strict=True):
        assert 0.0099 < drawn.min() < 0.1 * most
        assert 0.9 * most < drawn.max() < most
    torch.manual_seed(0)
    again = Score(f"Baseline-{name}", 64, D)
    assert again.bias is not None
    assert torch.equal(again.bias["p"].double(), p)
    with torch.no_grad():
        p[0], a[0], a[1] = -3.0, -1.0, 5.0
    q, k, v = tensors((1, 64, 6, D), (1, 64, 6, D), (1, 64, 6, D))
    before = {key: value.clone() for key, value in score.state_dict().items()}
    outside = attention(q, k, v, score.train())
    assert all(torch.equal(value, before[key]) for key, value in score.state_dict().items())
    assert torch.equal(outside, attention(q, k, v, score.eval()))
    with torch.no_grad():
        p.clamp_(0.01)
        a.clamp_(0.01, math.inf if name == "KERPLELog" else 2.0)
    inside = attention(q, k, v, score)
    assert torch.equal(inside, outside)
    for grad in torch.autograd.grad(inside.square().sum(), (p, a)):
        assert grad.isfinite().all()
        assert (grad != 0).all()


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("wanted", [3.0, -3.0])
def test_what_kerple_learns_comes_back_into_its_range(wanted: float, backend: str) -> None:
    """A plain loop, which projects nothing, goes beyond a bound by no more than one step."""
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


def test_batch_norm_counts_a_batch_once_where_a_backward_computes_it_again() -> None:
    """Activation checkpointing moves running statistics as a training without it does."""
    found = []
    for reentrant in (None, False, True):
        torch.manual_seed(0)
        score = Score("QKBatchNorm", 2, D).double()
        q, k, v = qkv(7)

        def run(q: Tensor, k: Tensor, v: Tensor, score: Score = score) -> Tensor:
            return attention(q, k, v, score, causal=False)

        if reentrant is None:
            out = run(q, k, v)
        else:
            out = checkpoint(run, q, k, v, use_reentrant=reentrant)
        torch.autograd.backward(out.square().sum())
        assert q.grad is not None
        assert k.grad is not None
        found.append((score.state_dict(), q.grad, k.grad))
    assert found[0][0]["query_norm.running_mean"].abs().max() > 0
    for state, *grads in found[1:]:
        assert all(torch.equal(state[name], value) for name, value in found[0][0].items())
        assert all(map(torch.equal, grads, found[0][1:]))


def test_kerple_power_with_a_of_1_is_alibi() -> None:
    q, k, v = qkv(9)
    score = Score("Baseline-KERPLEPower", 2, D).double()
    assert score.bias is not None
    with torch.no_grad():
        score.bias["a"].fill_(1)
        score.bias["p"].copy_(torch.tensor([2.0**-4, 0.01]))
    expected = attention(q, k, v, "Baseline-ALiBi")
    _same(attention(q, k, v, score)[:, :1], expected[:, :1])


def test_streaming_uses_no_position_past_its_cache() -> None:
    """Shifting everything after the sinks changes nothing once the window has passed."""
    spec = ScoreSpec.parse("Baseline-StreamingLLM", train_length=L)
    assert str(spec) == "Baseline-StreamingLLM(window=4)@8"
    assert spec.remapping is not None
    place = torch.arange(50, dtype=torch.float64)
    query, key = spec.remapping.far_positions(place, place)
    assert query.max() == L - 1
    assert torch.equal(key, place)
    q, k, v = qkv(30)
    whole = out("Baseline-StreamingLLM", [q, k, v])
    kept = [0, 1, 2, 3, 26, 27, 28, 29]
    cache = attention(q[:, :, -1:], k[:, :, kept], v[:, :, kept], "Baseline")
    _same(whole[:, :, -1:], cache, 1e-10)


def test_what_the_table_fills_in_fits_into_the_training_length() -> None:
    for length, factor in ((8, 4), (512, 8), (512, 64), (100, 7.3), (5, 2)):
        longest = int(length * factor)
        for name in ("LeakyReRoPE", "SelfExtend"):
            regime = ScoreSpec.parse(f"KNA-{name}").resolve(length, factor).remapping
            assert regime is not None
            at = torch.tensor([longest - 1.0], dtype=torch.float64)
            query, key = regime.far_positions(at, torch.zeros_like(at))
            assert query - key < length
            if name == "SelfExtend":
                smaller = ScoreSpec.parse(f"KNA-{name}(group={regime.group - 1})@{length}")  # type: ignore[attr-defined]
                assert smaller.remapping is not None
                query, key = smaller.remapping.far_positions(at, torch.zeros_like(at))
                assert query - key >= length


def test_xpos_decays_by_distance_alone_and_says_where_it_ends() -> None:
    q, k, v = qkv(6)
    at = torch.arange(6)
    moved = attention(q, k, v, "KNA-XPos", q_positions=at + 900, k_positions=at + 900)
    _same(moved, attention(q, k, v, "KNA-XPos"), 1e-9)
    q, k, v = (x.half() for x in qkv(64))
    with pytest.raises(InputError, match=r"XPos in torch.float16 reads up to position \d+"):
        attention(q, k, v, "KNA-XPos(scale=8)")
