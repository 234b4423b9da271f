"""What a cached step prepares serves the calls that it was made for, and no others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from layers.written_out import read_on
from normattn import attention
from normattn.errors import InputError
from normattn.layers.cache import KeyValueCache
from normattn.layers.checks import AttentionArguments
from normattn.layers.folded import FoldedStep
from normattn.layers.plan import prepare
from normattn.score import Score

H, G, D = 4, 2, 8
SCORES = ("KNA-logn@8", "CosA@8", "QKRMSNorm", "QKNorm2020@8", "KNA-ReRoPE(window=3)")


def _tensors(batch: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    seed = torch.Generator().manual_seed(tokens)
    q, k, v = (
        torch.randn((batch, heads, tokens, D), generator=seed, dtype=torch.float64)
        for heads in (H, G, G)
    )
    return q, k, v


@pytest.mark.parametrize("score", SCORES)
@torch.no_grad()
def test_small_and_vanishing_keys(score: str) -> None:
    """Normalised in fewer calls, a key of any size is what the whole forward makes of it."""
    module = Score(score, H, D, G).double().eval()
    q, k, v = _tensors(2, 7)
    k[:, :, 3] *= 1e-13
    k[:, :, 4] = 0
    q[:, :, 5] *= 1e-9
    steps = read_on(module, (q, k, v), range(8))
    torch.testing.assert_close(steps, attention(q, k, v, module), rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_another_number_of_rows() -> None:
    """Rows that a beam search drops are gone from the next step too."""
    module, cache = Score("KNA", H, D, G).double().eval(), KeyValueCache()
    q, k, v = _tensors(3, 5)
    read_on(module, (q, k, v), range(5), cache)
    rows = torch.tensor([2, 0])
    cache.reorder(rows)
    out = attention(q[rows, :, 4:], k[rows, :, 4:], v[rows, :, 4:], module, cache=cache)
    whole = attention(q[rows], k[rows], v[rows], module)
    torch.testing.assert_close(out, whole[:, :, 4:], rtol=1e-9, atol=1e-9)
    with pytest.raises(InputError, match="2 rows"):
        attention(q[:, :, 4:], k[:, :, 4:], v[:, :, 4:], module, cache=cache)


@torch.no_grad()
def test_autocast_that_begins_later_changes_nothing() -> None:
    """The tensors' own type decides, whatever was prepared before."""
    module, cache = Score("KNA", H, D, G).eval(), KeyValueCache()
    q, k, v = (x.float() for x in _tensors(1, 4))
    before = read_on(module, (q, k, v), range(3), cache)
    with torch.autocast("cpu", torch.bfloat16):
        under = read_on(module, (q, k, v), range(2, 5), cache)
    torch.testing.assert_close(torch.cat((before, under), 2), attention(q, k, v, module))


@torch.no_grad()
def test_what_was_checked_once_is_still_refused() -> None:
    """A prepared step lets through no missing gate, no other score and no other dtype."""
    gated, cache = Score("Baseline-Gate", H, D, G).double().eval(), KeyValueCache()
    q, k, v = _tensors(1, 1)
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


LEARNED = (
    *("Baseline-KERPLELog", "Baseline-KERPLEPower", "KNA-SSMax@8", "QKNorm2020@8", "Baseline-Sink"),
)


@pytest.mark.parametrize("name", LEARNED)
def test_what_is_learned_is_read_at_every_token(name: str) -> None:
    """A change while a cache is in use shows, and gradients arrive as by the whole forward."""
    score, cache = Score(name, H, D, G).double().eval(), KeyValueCache()
    q, k, v = _tensors(2, 6)
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
    q, k, v = (x.to(dtype) for x in _tensors(2, 40))
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
    q, k, v = (x.to(dtype) for x in _tensors(1, 30))
    q = q * 100
    step = read_on(score, (q, k, v), (0, 29, 30))[:, :, 29:]
    exact = attention(q.double(), k.double(), v.double(), score, backend="reference")[:, :, 29:]
    torch.testing.assert_close(step.double(), exact, rtol=0, atol=2 * torch.finfo(dtype).eps)


@torch.no_grad()
def test_a_key_that_rotates_out_of_float16_is_nan() -> None:
    """As by the whole forward: no infinite key is kept, whose weight would be 0."""
    q, k, v = (x[:, :1].half() for x in _tensors(1, 4))
    k[:, :, 2] = 60000.0
    out = read_on(Score("Baseline", 1, D, 1), (q, k, v), range(5))
    assert not out[:, :, :2].isnan().any()
    assert out[:, :, 2:].isnan().all()
