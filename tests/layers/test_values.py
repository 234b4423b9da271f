"""XSA and VO-RoPE against their equations, in every layout, with masks, and what is refused."""

from __future__ import annotations

import cmath
from typing import Any

import pytest
import torch
from torch import Tensor

from layers.written_out import assert_agree
from normattn import InputError, Score, attention
from normattn.layers.cache import KeyValueCache
from score.cases import tensors

B, H, G, T, S, D, E = 2, 4, 2, 5, 9, 4, 6
BACKENDS = ("auto", "reference", "chunked")


def _plain(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    out: Tensor = attention(q, k, v, "KNA", backend="reference", **options)
    return out


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("queries", [T, S])
def test_what_xsa_reads_is_orthogonal_to_the_own_value(
    causal: bool, backend: str, queries: int
) -> None:
    leaves = q, k, v = tensors((B, H, queries, D), (B, G, S, D), (B, G, S, E))
    ours = attention(q, k, v, "KNA-XSA", causal, backend=backend)
    read, rows = _plain(q, k, v, causal=causal), []
    for b, h, t in torch.cartesian_prod(*map(torch.arange, (B, H, queries))).tolist():
        o, own = read[b, h, t], v[b, h // (H // G), S - queries + t]
        rows.append(o - sum(o * own) / sum(own * own) * own)
    assert_agree(ours, torch.stack(rows).view_as(ours), list(leaves))


def test_an_own_value_of_zero_leaves_what_is_read_as_it_is() -> None:
    q, k, v = tensors((1, 2, 3, D), (1, 2, 3, D), (1, 2, 3, E))
    with torch.no_grad():
        v[:, :, 1] = 0
    ours = attention(q, k, v, "KNA-XSA")
    torch.testing.assert_close(ours[:, :, 1], _plain(q, k, v)[:, :, 1])
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(ours.sum(), (q, k, v)))


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [True, False])
def test_vo_rope_reads_a_value_by_its_distance(layout: str, backend: str, causal: bool) -> None:
    """Complex numbers in place of pairs: feature pair m of v_j comes times e^(i·(j−i)·θ_m)."""
    leaves = q, k, v = tensors((B, H, T, D), (B, G, S, D), (B, G, S, E))
    ours = attention(q, k, v, f"KNA-VORoPE(base=50,layout={layout})", causal, backend=backend)
    weights = attention(
        q, k, torch.eye(S, dtype=v.dtype).expand(B, G, S, S), "KNA", causal, backend="reference"
    )
    half = E // 2
    first = v[..., :half] if layout == "half" else v[..., 0::2]
    second = v[..., half:] if layout == "half" else v[..., 1::2]
    pairs = torch.complex(first, second).repeat_interleave(H // G, 1)
    turns = torch.tensor(
        [
            [[cmath.exp(1j * (j - i) * 50 ** (-2 * m / E)) for m in range(half)] for j in range(S)]
            for i in range(S - T, S)
        ],
        dtype=torch.complex128,
    )
    read = torch.einsum("bhts,tsm,bhsm->bhtm", weights.to(turns.dtype), turns, pairs)
    parts = (read.real, read.imag)
    expected = torch.cat(parts, -1) if layout == "half" else torch.stack(parts, -1).flatten(-2)
    assert_agree(ours, expected, list(leaves))


@pytest.mark.parametrize("part", ["XSA", "VORoPE"])
@pytest.mark.parametrize("beside", ["", "-Gate", "-ReRoPE(window=2)", "-DualChunk(size=2,local=1)"])
def test_packed_documents_are_read_as_each_alone(part: str, beside: str) -> None:
    q, k, v = tensors((1, H, S, D), (1, G, S, D), (1, G, S, E))
    gate = tensors((1, S, H * E), seed=1)[0]
    numbers = torch.tensor([[0] * 4 + [1] * (S - 4)])
    name = f"KNA-{part}{beside}"
    given: dict[str, Any] = {"gate": gate} if beside == "-Gate" else {}
    packed = attention(q, k, v, f"{name}-Packed", documents=numbers, **given)
    last: dict[str, Any] = {"gate": gate[:, 4:]} if given else {}
    alone = attention(q[:, :, 4:], k[:, :, 4:], v[:, :, 4:], name, **last)
    torch.testing.assert_close(packed[:, :, 4:], alone)


@pytest.mark.parametrize("part", ["XSA", "VORoPE"])
def test_half_precision(part: str) -> None:
    q, k, v = (x.detach() for x in tensors((B, H, S, D), (B, G, S, D), (B, G, S, E)))
    score = Score(f"KNA-{part}", H, D, G)
    exact = attention(q, k, v, score)
    low = attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), score)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.double(), exact, rtol=0.05, atol=0.05)


def test_what_has_no_meaning_is_refused() -> None:
    q, k, v = tensors((1, 2, 4, D), (1, 2, 4, D), (1, 2, 4, 3))
    with pytest.raises(InputError, match="even head dimension"):
        attention(q, k, v, "KNA-VORoPE")
    with pytest.raises(InputError, match="q_positions must be those of the last keys"):
        attention(q[:, :, :2], k, v, "KNA-XSA", q_positions=torch.tensor([0, 1]))
    with pytest.raises(InputError, match="4 queries and 3 keys"):
        attention(q, k[:, :, :3], v[:, :, :3], "KNA-XSA", False)
    with pytest.raises(InputError, match="own value"):
        attention(q, k, v, "KNA-XSA", return_lse=True)
    for text in ("KNA-XSA-Differential", "KNA-VORoPE-Differential", "KNA-XSA-ValueResidual"):
        with pytest.raises(InputError, match="cannot be combined"):
            attention(q, k, v, text)


@torch.no_grad()
def test_vo_rope_turns_values_of_a_cache_and_of_more_queries_than_keys_alike() -> None:
    """By tables that are kept, whichever positions a call starts from, and by those made for it."""
    q, k, v = (x.detach() for x in tensors((B, H, S, D), (B, G, S, D), (B, G, S, E)))
    score, cache = Score("KNA-VORoPE(base=50)", H, D, G).double(), KeyValueCache()
    spans = (slice(0, 3), slice(3, 4), slice(4, S))
    parts = [attention(q[:, :, at], k[:, :, at], v[:, :, at], score, cache=cache) for at in spans]
    places = torch.arange(S)
    given = attention(q, k, v, score, q_positions=places, k_positions=places)
    torch.testing.assert_close(torch.cat(parts, 2), given)
    torch.testing.assert_close(attention(q, k, v, score), given)
    few = k[:, :, :4], v[:, :, :4]
    kept = attention(q, *few, score, False)
    made = attention(q, *few, score, False, q_positions=places, k_positions=places[:4])
    torch.testing.assert_close(kept, made)
