"""The forgetting gate against a double loop: kernels, caches, half precision and both layers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from layers.written_out import assert_agree
from normattn import attention
from normattn.kernels import BACKENDS
from score.cases import tensors

B, H, G, T, D, E = 2, 4, 2, 11, 6, 5


def _looped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    forget: Tensor,
    window: int | None = None,
    documents: Tensor | None = None,
    padding: Tensor | None = None,
) -> Tensor:
    """Softmax of ⟨q, k⟩/√d + Σ_{j<l≤i} ln σ(f_l), pair by pair, the sum term by term."""
    rows, keys, shared = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    out = []
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for t in range(rows):
                i = keys - rows + t
                scores, values = [], []
                for j in range(i + 1):
                    if window is not None and i - j >= window:
                        continue
                    if documents is not None and documents[b, i] != documents[b, j]:
                        continue
                    if padding is not None and padding[b, j]:
                        continue
                    score = q[b, h, t] @ k[b, h // shared, j] / math.sqrt(q.shape[-1])
                    for between in range(j + 1, i + 1):
                        score = score - (1 + (-forget[b, between, h]).exp()).log()
                    scores.append(score)
                    values.append(v[b, h // shared, j])
                if scores:
                    out.append(torch.softmax(torch.stack(scores), 0) @ torch.stack(values))
                else:
                    out.append(torch.zeros(v.shape[-1], dtype=v.dtype))
    return torch.stack(out).view(q.shape[0], q.shape[1], rows, -1)


@pytest.mark.parametrize("backend", ["auto", "reference", "chunked"])
def test_outputs_and_gradients(backend: str) -> None:
    assert backend in BACKENDS
    for groups, rows, window in ((1, T, None), (2, T, None), (4, 4, None), (2, T, 4)):
        leaves = tensors((B, H, rows, D), (B, groups, T, D), (B, groups, T, E), (B, T, H))
        q, k, v, forget = leaves
        text = "Baseline-FoX" + ("" if window is None else f"-SlidingWindow(window={window})")
        ours = attention(q, k, v, text, forget=forget, backend=backend)
        assert_agree(ours, _looped(q, k, v, forget, window), leaves)


def test_documents_and_padding() -> None:
    leaves = tensors((B, H, T, D), (B, G, T, D), (B, G, T, E), (B, T, H))
    q, k, v, forget = leaves
    documents = torch.tensor([[0] * 4 + [1] * 7, [0] * 9 + [1] * 2])
    ours = attention(q, k, v, "Baseline-FoX-Packed", forget=forget, documents=documents)
    assert_agree(ours, _looped(q, k, v, forget, documents=documents), leaves)
    padding = torch.arange(T)[None] < torch.tensor([[0], [3]])
    ours = attention(q, k, v, "Baseline-FoX", forget=forget, key_padding=padding)
    expected = _looped(q, k, v, forget, padding=padding)
    # What a padded query reads has no meaning.
    real = ~padding[:, None, :, None]
    assert_agree(ours * real, expected * real, leaves)


def test_half_precision_keeps_the_sum() -> None:
    """After 2000 tokens the sum is in the thousands: a rounded one is off by whole numbers."""
    shape = (1, 2, 2000, 8)
    q, k, v = (x.detach() for x in tensors(shape, shape, shape, dtype=torch.float32))
    forget = torch.linspace(-2, 1, 2000)[None, :, None].expand(1, -1, 2)
    exact = attention(q.double(), k.double(), v.double(), "KNA-FoX", forget=forget.double())
    low_q, low_k, low_v = (x.bfloat16() for x in (q, k, v))
    half = attention(low_q, low_k, low_v, "KNA-FoX", forget=forget)
    rounded = attention(
        *(low_q.double(), low_k.double(), low_v.double()), "KNA-FoX", forget=forget.double()
    )
    assert (rounded - exact).abs().max() < 0.05
    assert (half.double() - rounded).abs().max() < 0.03


def test_positions_with_gaps_and_of_documents() -> None:
    q, k, v, forget = tensors((B, H, T, D), (B, G, T, D), (B, G, T, E), (B, T, H))
    order = torch.arange(T)
    gaps = 3 * order
    same = attention(
        q, k, v, "Baseline-NoPE-FoX", forget=forget, q_positions=gaps, k_positions=gaps
    )
    torch.testing.assert_close(same, attention(q, k, v, "Baseline-NoPE-FoX", forget=forget))
    documents = torch.tensor([[0] * 4 + [1] * 7]).expand(B, -1)
    restart = torch.cat((order[:4], order[:7]))
    packed: dict[str, Any] = {"forget": forget, "documents": documents}
    again = attention(q, k, v, "Baseline-FoX-Packed", k_positions=restart, **packed)
    torch.testing.assert_close(again, attention(q, k, v, "Baseline-FoX-Packed", **packed))
