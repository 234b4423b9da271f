"""Normalisers beside softmax and CoPE: limits, order of keys, caches, half precision, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.memory import largest
from normattn import InputError, Score, ScoreSpec, attention, explain
from normattn.kernels import reference, tiled
from normattn.layers.cache import KeyValueCache

from .cases import built, normalised, tensors

B, H, T, D, P = 2, 2, 11, 8, 6
SHAPES = (B, H, T, D), (B, 1, T, D), (B, 1, T, D)


def _weights(q: Tensor, k: Tensor, score: Score | str) -> Tensor:
    values = torch.eye(T, dtype=q.dtype).expand(q.shape[0], k.shape[1], T, T)
    return attention(q, k, values, score)


def _cope(text: str = f"Baseline-CoPE(positions={P})") -> tuple[Score, Tensor]:
    """The score with random embeddings, and these."""
    score = Score(text, H, D, 1).double()
    assert score.bias is not None
    with torch.no_grad():
        score.bias["e"].copy_(tensors(tuple(score.bias["e"].shape), seed=1)[0])
    return score, score.bias["e"]


def test_a_stick_is_never_used_up_and_the_current_token_breaks_first() -> None:
    q, k, _ = tensors(*SHAPES)
    weight = _weights(q, k, "Baseline-NoPE-StickBreaking")
    assert (weight.sum(-1) < 1).all()
    assert (weight[:, :, 0] == 0).all()
    assert (weight.diagonal(dim1=-2, dim2=-1) == 0).all()
    own = _weights(q, k, "Baseline-NoPE-StickBreaking(current=true)").diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(own, ((q * k).sum(-1) / D**0.5).sigmoid())


def test_sigmoids_of_nothing_add_up_to_one_at_the_training_length() -> None:
    q = torch.zeros(1, 1, T, D, dtype=torch.float64)
    weight = _weights(q, q, f"Baseline-Sigmoid@{T}")
    torch.testing.assert_close(weight[0, 0, -1].sum(), torch.tensor(T / (T + 1)).double())


def test_where_every_gate_is_open_positions_of_cope_are_distances() -> None:
    """p = i − j + 1 up to P − 1: relative positions, as the paper has it."""
    q, k, _ = (x.detach() for x in tensors(*SHAPES))
    q[..., 0], k[..., 0] = 1, 300
    score, e = _cope()
    table, bare = q @ e.t() / D**0.5, q @ k.mT / D**0.5
    i, j = torch.tril_indices(T, T)
    expected = torch.full_like(bare, -torch.inf)
    expected[..., i, j] = bare[..., i, j] + table[..., i, (i - j + 1).clamp(max=P - 1)]
    torch.testing.assert_close(_weights(q, k, score), expected.softmax(-1))


def test_half_open_gates_of_cope_count_halves_of_what_is_seen() -> None:
    """All scores 0: gates of ½; keys that a window hides are not counted."""
    q, k, _ = (x.detach() for x in tensors(*SHAPES))
    score, e = _cope(f"Baseline-CoPE(positions={P})-SlidingWindow(window=4)")
    table = (q @ e.t() / D**0.5)[..., 9, :]
    row = [table[..., :2].mean(-1), table[..., 1], table[..., 1:3].mean(-1), table[..., 2]]
    expected = torch.stack(row[::-1], -1).softmax(-1)
    torch.testing.assert_close(_weights(q, 0 * k, score)[..., 9, 6:10], expected)


def test_embeddings_of_cope_start_at_nothing_and_learn() -> None:
    q, k, v = tensors(*SHAPES)
    score = Score("Baseline-CoPE", H, D, 1).double()
    out = attention(q, k, v, score)
    torch.testing.assert_close(out, attention(q, k, v, "Baseline-NoPE"))
    assert score.bias is not None
    (grad,) = torch.autograd.grad(out.square().sum(), score.bias["e"])
    assert grad.shape == (64, D)
    assert (grad[:5] != 0).all()
    assert (grad[T + 1 :] == 0).all()


@pytest.mark.parametrize("text", ["KNA-StickBreaking", f"Baseline-CoPE(positions={P})"])
def test_keys_in_any_order_are_counted_by_position(text: str) -> None:
    q, k, v = tensors(*SHAPES)
    score = _cope(text)[0] if "CoPE" in text else text
    order = torch.randperm(T, generator=torch.Generator().manual_seed(3))
    own = [x[:, :, order] for x in (q, k, v)]
    mixed = attention(own[0], own[1], own[2], score, q_positions=order, k_positions=order)
    torch.testing.assert_close(mixed, attention(q, k, v, score)[:, :, order])


@torch.no_grad()
@pytest.mark.parametrize("recipe", list(normalised()), ids=lambda recipe: recipe.text)
def test_a_cache_reads_as_the_whole(recipe: Any) -> None:
    q, k, v = tensors(*SHAPES)
    score, cache, pieces, first = built(recipe, H, D, 1), KeyValueCache(), [], 0
    for size in (1, 3, 1, 5, 1):
        new = slice(first, first + size)
        pieces.append(attention(q[:, :, new], k[:, :, new], v[:, :, new], score, cache=cache))
        first += size
    torch.testing.assert_close(torch.cat(pieces, 2), attention(q, k, v, score))


def test_half_precision_counts_many_keys() -> None:
    """Hundreds of gates, or shares of a stick: summed in bfloat16 they would stand still."""
    q, k, v = (x.detach() for x in tensors((1, 1, 1000, 8), (1, 1, 1000, 8), (1, 1, 1000, 8)))
    score = Score("Baseline-CoPE(positions=700)", 1, 8)
    assert score.bias is not None
    with torch.no_grad():
        score.bias["e"].copy_((torch.arange(700) / 4).cos()[:, None].expand(-1, 8))
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
    q, k, v = (x.detach() for x in tensors(*SHAPES))
    k[:, :, 5] = torch.nan
    for backend in ("strips", "reference"):
        out = attention(q, k, v, _cope()[0], backend=backend)
        assert out[:, :, :5].isfinite().all()
        assert out[:, :, 5:].isnan().all()


def test_no_tensor_holds_every_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a forward nor a backward; the reference shows that one would be noticed."""
    monkeypatch.setattr(reference, "STRIP_BYTES", 8 * 96 * B * H * 9 * 4)
    monkeypatch.setattr(tiled, "ROWS", 16)
    for made, tokens, pairs in (
        (_cope()[0], 96, 96**2),
        ("KNA-DualChunk(size=192,local=8)", 512, 192 * 512),
    ):
        q, k, v = tensors((B, H, tokens, D), (B, 1, tokens, D), (B, 1, tokens, D))
        learned = made.parameters() if isinstance(made, Score) else ()
        for backend in ("auto", "reference"):
            with largest() as seen:
                out = attention(q, k, v, made, backend=backend)
                torch.autograd.grad(out.sum(), [q, k, v, *learned])
            assert (seen.numel < B * H * pairs // 4) == (backend == "auto"), backend


@pytest.mark.parametrize(
    ("text", "needs", "kernel", "left"),
    [
        ("Baseline-Sigmoid", "tokens", "strips", "Sigmoid"),
        ("Baseline-CoPE", None, "strips", "CoPE"),
        ("KNA-DualChunk", "size", "chunked", "query rows in blocks of 384: DualChunk"),
    ],
)
def test_what_is_refused_and_what_explain_says(
    text: str, needs: str | None, kernel: str, left: str
) -> None:
    q, k, v = tensors(*SHAPES)
    if needs is not None:
        with pytest.raises(InputError, match=f"needs {needs}="):
            attention(q, k, v, text)
    spec = ScoreSpec.parse(text, train_length=512)
    if spec.needs_causal:
        with pytest.raises(InputError, match="causal"):
            attention(q, k, v, Score(spec, H, D, 1).double(), causal=False)
    if kernel == "strips":
        with pytest.raises(InputError, match="fused"):
            attention(q, k, v, Score(spec, H, D, 1).double(), backend="fused")
    told = explain(spec, (1, 8, 2048, 64))
    assert told.kernel == kernel
    assert any(left in line for line in told.left)
