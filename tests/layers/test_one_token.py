"""What a cached step prepares serves the calls that it was made for, and no others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from normattn.errors import InputError
from normattn.layers.attention import attention, attention_cached
from normattn.layers.cache import KeyValueCache
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
    module, cache = Score(score, H, D, G).double().eval(), KeyValueCache()
    q, k, v = _tensors(2, 7)
    k[:, :, 3] *= 1e-13
    k[:, :, 4] = 0
    q[:, :, 5] *= 1e-9
    steps = [
        attention_cached(
            q[:, :, at : at + 1], k[:, :, at : at + 1], v[:, :, at : at + 1], module, cache
        )
        for at in range(7)
    ]
    torch.testing.assert_close(
        torch.cat(steps, 2), attention(q, k, v, module), rtol=1e-9, atol=1e-9
    )


@torch.no_grad()
def test_another_number_of_rows() -> None:
    """Rows that a beam search drops are gone from the next step too."""
    module, cache = Score("KNA", H, D, G).double().eval(), KeyValueCache()
    q, k, v = _tensors(3, 5)
    for at in range(4):
        now = slice(at, at + 1)
        attention_cached(q[:, :, now], k[:, :, now], v[:, :, now], module, cache)
    rows = torch.tensor([2, 0])
    cache.reorder(rows)
    out = attention_cached(q[rows, :, 4:], k[rows, :, 4:], v[rows, :, 4:], module, cache)
    whole = attention(q[rows], k[rows], v[rows], module)
    torch.testing.assert_close(out, whole[:, :, 4:], rtol=1e-9, atol=1e-9)
    with pytest.raises(InputError, match="2 rows"):
        attention_cached(q[:, :, 4:], k[:, :, 4:], v[:, :, 4:], module, cache)


@torch.no_grad()
def test_autocast_that_begins_later_changes_nothing() -> None:
    """The tensors' own type decides, whatever was prepared before."""
    module, cache = Score("KNA", H, D, G).eval(), KeyValueCache()
    q, k, v = (x.float() for x in _tensors(1, 4))
    steps = []
    for at in range(4):
        now = slice(at, at + 1)
        with torch.autocast("cpu", torch.bfloat16, enabled=at >= 2):
            steps.append(attention_cached(q[:, :, now], k[:, :, now], v[:, :, now], module, cache))
    torch.testing.assert_close(torch.cat(steps, 2), attention(q, k, v, module))


@torch.no_grad()
def test_what_was_checked_once_is_still_refused() -> None:
    """A prepared step lets through no missing gate, no other score and no other dtype."""
    gated, cache = Score("Baseline-Gate", H, D, G).double().eval(), KeyValueCache()
    q, k, v = _tensors(1, 1)
    gate = torch.zeros(1, 1, H * D, dtype=torch.float64)
    for _ in range(2):
        attention_cached(q, k, v, gated, cache, gate=gate)
    with pytest.raises(InputError, match="needs gate"):
        attention_cached(q, k, v, gated, cache)
    plain, cache = Score("KNA", H, D, G).double().eval(), KeyValueCache()
    for _ in range(2):
        attention_cached(q, k, v, plain, cache)
    with pytest.raises(InputError, match="share a dtype"):
        attention_cached(q, k.float(), v, plain, cache)
    cache.truncate(0)
    attention_cached(q, k, v, Score("Baseline", H, D, G).double().eval(), cache, backend="fused")
    with pytest.raises(InputError, match="cannot read them"):
        attention_cached(q, k, v, plain, cache)


@torch.no_grad()
def test_a_learned_bias_is_prepared_without_its_gradient() -> None:
    """A mask that wants a gradient would take torch's slow kernel, for every token."""
    score, cache = Score("Baseline-KERPLELog", H, D, G).eval(), KeyValueCache()
    q, k, v = (x.float() for x in _tensors(1, 1))
    assert not attention_cached(q, k, v, score, cache).requires_grad
    with torch.enable_grad():
        out = attention_cached(q, k, v, score, cache)
    assert not out.requires_grad
