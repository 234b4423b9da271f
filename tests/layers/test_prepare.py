"""What is prepared for a score, its shapes and cached steps serves those, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from layers.written_out import of_program, read_on
from normattn import InputError, Score, attention
from normattn.layers.cache import KeyValueCache
from normattn.layers.checks import AttentionArguments
from normattn.layers.folded import FoldedStep, zero_or_nan
from normattn.layers.plan import prepare
from score.cases import drawn, tensors

H, G, D = 4, 2, 8
SCORES = [
    *("Baseline", "KNA-logn@8", "QKNorm2020@8", "QKRMSNorm-RoPE(layout=interleaved)"),
    *("CosA-YaRN(factor=4)-logn+@8", "Baseline-NoPE", "KNA-NoPE-logn@8", "QKLayerNorm-XPos"),
    *("KNA-SSMax(bias=true)@8", "Baseline-PartialRoPE(fraction=0.5)", "KNA-Chunked(size=4)"),
    "KNA-SlidingWindow(window=4)",
]


def _qkv(queries: int, keys: int, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (batch, H, queries, D), (batch, G, keys, D), (batch, G, keys, D)
    q, k, v = tensors(*shapes, seed=queries)
    return q, k, v


def _fixed(tokens: int, batch: int = 2, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [x.detach().to(dtype) for x in _qkv(tokens, tokens, batch)]


def _score(text: str) -> Score:
    return drawn(Score(text, H, D, G))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("text", SCORES)
def test_what_is_prepared_is_the_definition(text: str, causal: bool) -> None:
    """Values and gradients, of the first call and of those after it, one query and many."""
    score = _score(text)
    for queries, keys in ((9, 9), (1, 9), (9, 9), (9, 7) if not causal else (1, 5)):
        q, k, v = _qkv(queries, keys)
        inputs = [q, k, v, *score.parameters()]
        outs = [attention(q, k, v, score, causal, backend=way) for way in ("auto", "reference")]
        torch.testing.assert_close(*outs, rtol=1e-9, atol=1e-9)
        grads = [torch.autograd.grad(out.sin().sum(), inputs, allow_unused=True) for out in outs]
        torch.testing.assert_close(*grads, rtol=1e-8, atol=1e-9)
        with torch.no_grad():
            again = attention(q, k, v, score, causal)
        torch.testing.assert_close(again, outs[1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("which", [0, 1])
def test_what_is_not_finite_comes_out(bad: float, which: int) -> None:
    """After a call that was finite. A query that sees it gets NaN, the others do not."""
    score, (q, k, v) = _score("Baseline"), _fixed(6)
    plain = attention(q, k, v, score)
    (q, k)[which][:, :, 3, 0] = bad
    out = attention(q, k, v, score)
    torch.testing.assert_close(out[:, :, :3], plain[:, :, :3], rtol=1e-9, atol=1e-9)
    assert out[:, :, 3].isnan().all()


@pytest.mark.parametrize("name", ["QKBatchNorm", "QBatchNorm", "KBatchNorm-NoPE"])
def test_a_forward_moves_running_statistics_once(name: str) -> None:
    """Also the first one of its shape, for which whatever is prepared is made."""
    q, k, v = (torch.randn(2, 2, 7, 4) for _ in range(3))
    score = Score(name, heads=2, head_dim=4)
    expected = {}
    for kind, x in (("query_norm", q), ("key_norm", k)):
        rows = x.transpose(0, 1).reshape(2, -1, 4)
        expected[f"{kind}.running_mean"] = 0.1 * rows.mean(1)[None, :, None]
        expected[f"{kind}.running_var"] = 0.9 + 0.1 * rows.var(1)[None, :, None]
    attention(q, k, v, score, causal=False)
    found = dict(score.named_buffers())
    assert found
    for buffer, value in found.items():
        torch.testing.assert_close(value, expected[buffer])


def test_refusals_are_those_of_the_first_call() -> None:
    q, k, v = _qkv(6, 6)
    score = _score("Baseline")
    attention(q, k, v, score)
    with pytest.raises(InputError, match="built for 4 query heads"):
        attention(q[:, :2], k, v, score)
    with pytest.raises(InputError, match="share a dtype"):
        attention(q, k.float(), v, score)
    with pytest.raises(InputError, match="unknown backend"):
        attention(q, k, v, score, backend="quick")
    with pytest.raises(InputError, match="second"):
        torch.autograd.grad(attention(q, k, v, score).sum(), q, create_graph=True)


@pytest.mark.parametrize("score", ["KNA-logn@8", "QKRMSNorm", "CosA@8", "KNA-ReRoPE(window=3)"])
@torch.no_grad()
def test_small_and_vanishing_keys(score: str) -> None:
    """Normalised in fewer calls, a key of any size is what the whole forward makes of it."""
    module, (q, k, v) = Score(score, H, D, G).double(), _fixed(7)
    k[:, :, 3] *= 1e-13
    k[:, :, 4] = 0
    q[:, :, 5] *= 1e-9
    steps = read_on(module, (q, k, v), range(8))
    torch.testing.assert_close(steps, attention(q, k, v, module), rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_autocast_that_begins_later_changes_nothing() -> None:
    """The tensors' own type decides, whatever was prepared before."""
    module, cache = Score("KNA", H, D, G).eval(), KeyValueCache()
    q, k, v = _fixed(4, dtype=torch.float32)
    before = read_on(module, (q, k, v), range(3), cache)
    with torch.autocast("cpu", torch.bfloat16):
        under = read_on(module, (q, k, v), range(2, 5), cache)
    torch.testing.assert_close(torch.cat((before, under), 2), attention(q, k, v, module))


@torch.no_grad()
def test_what_was_checked_once_is_still_refused() -> None:
    """A prepared step lets through no missing gate, no other score and no other dtype."""
    gated, cache = Score("Baseline-Gate", H, D, G).double().eval(), KeyValueCache()
    q, k, v = _fixed(1, 1)
    gate = torch.zeros(1, 1, H * D, dtype=torch.float64)
    for _ in range(2):
        attention(q, k, v, gated, cache=cache, gate=gate)
    with pytest.raises(InputError, match="needs gate"):
        attention(q, k, v, gated, cache=cache)
    plain, cache = Score("KNA", H, D, G).double().eval(), KeyValueCache()
    for _ in range(2):
        attention(q, k, v, plain, cache=cache)
    with pytest.raises(InputError, match="share a dtype"):
        attention(q, k.float(), v, plain, cache=cache)
    cache.truncate(0)
    attention(q, k, v, Score("Baseline", H, D, G).double().eval(), cache=cache, backend="fused")
    with pytest.raises(InputError, match="cannot use"):
        attention(q, k, v, plain, cache=cache)


@pytest.mark.parametrize(
    "name",
    ["Baseline-KERPLELog", "Baseline-KERPLEPower", "KNA-SSMax@8", "QKNorm2020@8", "KNA-Sink"],
)
def test_what_is_learned_is_read_at_every_token(name: str) -> None:
    """A change while a cache is in use shows, and gradients arrive as by the whole forward."""
    score, cache = Score(name, H, D, G).double().eval(), KeyValueCache()
    q, k, v = _fixed(6)
    with torch.no_grad():
        read_on(score, (q, k, v), range(6), cache)
        for parameter in score.parameters():
            parameter.add_(0.25)
    step = read_on(score, (q, k, v), (5, 6), cache)
    whole = attention(q, k, v, score)[:, :, 5:]
    torch.testing.assert_close(step, whole, rtol=1e-9, atol=1e-9)
    wanted = list(score.parameters())
    grads = [torch.autograd.grad(out.sin().sum(), wanted) for out in (step, whole)]
    torch.testing.assert_close(*grads, rtol=1e-8, atol=1e-9)


HALF = (
    *("Baseline", "KNA-logn@8", "QKNorm2020@8", "CosA-YaRN(factor=4)@8", "Baseline-ALiBi"),
    *("Baseline-KERPLELog", "Baseline-Sink", "Baseline-SoftCap(cap=5)-ALiBi"),
    *("KNA-ReRoPE(window=3)", "Baseline-ReRoPE(window=7)-Sink@20", "KNA-NoPE-SSMax@8"),
    "Baseline-SlidingWindow(window=5)-Sink",
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", HALF)
@torch.no_grad()
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    """A prefill and single tokens are as near to float64 as the whole forward in the same type."""
    score = Score(name, H, D, G).eval()
    for parameter in score.parameters():
        parameter.add_(0.25)
    q, k, v = _fixed(40, 2, dtype)
    whole, cache = attention(q, k, v, score), KeyValueCache()
    parts = read_on(score, (q, k, v), [0, *range(20, 41)], cache)
    last = q[:, :, -1:], k[:, :, -1:], v[:, :, -1:]
    assert isinstance(prepare(score, *last, AttentionArguments(), cache), FoldedStep)
    wide = score.double()
    exact = attention(q.double(), k.double(), v.double(), wide, backend="reference")
    assert parts.dtype == dtype
    errors = [float((x.double() - exact).norm() / exact.norm()) for x in (parts, whole)]
    assert errors[0] < 1.5 * errors[1] < 1.5 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_precision_rounds_no_score(dtype: torch.dtype) -> None:
    """Logits of hundreds, which half precision would round to whole numbers and beyond."""
    score = Score("Baseline-ALiBi", H, D, G)
    q, k, v = _fixed(30, 1, dtype)
    q = q * 100
    step = read_on(score, (q, k, v), (0, 29, 30))[:, :, 29:]
    exact = attention(q.double(), k.double(), v.double(), score, backend="reference")[:, :, 29:]
    torch.testing.assert_close(step.double(), exact, rtol=0, atol=2 * torch.finfo(dtype).eps)


@torch.no_grad()
def test_a_key_that_rotates_out_of_float16_is_nan() -> None:
    """As by the whole forward: no infinite key is kept, whose weight would be 0."""
    q, k, v = (x[:, :1] for x in _fixed(4, 1, torch.float16))
    k[:, :, 2] = 60000.0
    out = read_on(Score("Baseline", 1, D, 1), (q, k, v), range(5))
    assert not out[:, :, :2].isnan().any()
    assert out[:, :, 2:].isnan().all()


CALLS = """
import json, sys, torch
from normattn import Attention

def calls(score, learning):
    layer, x = Attention(128, 4, score=score), torch.randn(1, 64, 128)
    count, there = [0], [False]
    def watch(frame, event, argument):
        name = getattr(argument, "__name__", "")
        there[0] |= event == "c_call" and name == "scaled_dot_product_attention"
        count[0] += event == "call" and not there[0]
    with torch.set_grad_enabled(learning):
        layer(x)
        sys.setprofile(watch)
        try:
            layer.forward(x)
        finally:
            sys.setprofile(None)
    assert there[0]
    return count[0] - 1

json.dump({text: [calls(text, on) for on in (False, True)] for text in json.load(sys.stdin)},
          sys.stdout)
"""


def test_few_python_calls_between_a_layer_and_the_kernel() -> None:
    """For every score that folds by a norm, a rotation and λ, without gradients and with."""
    scores = ["QKRMSNorm(gain=true)", "QRMSNorm(gain=false)", "QKLayerNorm(gain=true)"]
    scores += ["QKRMSNorm(across=each,gain=true)", "QKLayerNorm(across=all,gain=true)"]
    scores += ["Baseline", "KNA", "Baseline-XPos", "KNA-NoPE", "QKNorm2020@64"]
    scores += ["CosA-logn-YaRN(factor=2)@64"]
    for text, counts in of_program(CALLS, scores).items():
        assert max(counts) <= 30, (text, counts)


def test_what_a_device_shows_without_waiting() -> None:
    """Added to outputs off the CPU: 0, and NaN for rows of the batch that are not finite."""
    q, k = torch.full((3, 2, 4, 8), 3e38), torch.ones(3, 1, 4, 8)
    q[1, 0, 2, 5], k[2, 0, 0, 0] = torch.inf, -torch.inf
    shown = zero_or_nan(q, k).flatten()
    assert shown[0] == 0
    assert shown[1:].isnan().all()
