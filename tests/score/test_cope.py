"""CoPE: what is counted, positions in any order, memory, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.memory import largest
from normattn import InputError, Score, attention, explain
from normattn.kernels import reference
from score.cases import tensors

B, H, T, D, P = 2, 2, 11, 8, 6
SHAPES = (B, H, T, D), (B, 1, T, D), (B, 1, T, D)


def _score(text: str = f"Baseline-CoPE(positions={P})") -> Score:
    torch.manual_seed(0)
    score = Score(text, H, D, 1).double()
    assert score.bias is not None
    torch.nn.init.normal_(score.bias["e"])
    return score


def _logits(q: Tensor, k: Tensor, score: Score) -> Tensor:
    """Logarithms of the weights."""
    values = torch.eye(T, dtype=q.dtype).expand(q.shape[0], k.shape[1], T, T)
    return attention(q, k, values, score).log()


def test_where_every_gate_is_open_positions_are_distances() -> None:
    """p = i − j + 1 up to P − 1: relative positions, as the paper has it."""
    q, k, _ = (x.detach() for x in tensors(*SHAPES))
    q[..., 0], k[..., 0] = 1, 300
    score = _score()
    logits = _logits(q, k, score)
    table = q @ score.bias["e"].t() / D**0.5  # type: ignore[index]
    bare = q @ k.mT / D**0.5
    i, j = torch.tril_indices(T, T)
    whole = (bare + 0)[..., i, j] + table[..., i, (i - j + 1).clamp(max=P - 1)]
    expected = torch.full_like(bare, -torch.inf)
    expected[..., i, j] = whole
    torch.testing.assert_close(logits, expected.log_softmax(-1))


def test_half_open_gates_count_halves_of_what_is_seen() -> None:
    """All scores 0: gates of ½; keys that a window hides are not counted."""
    q, k, _ = (x.detach() for x in tensors(*SHAPES))
    k = 0 * k
    score = _score(f"Baseline-CoPE(positions={P})-SlidingWindow(window=4)")
    table = q @ score.bias["e"].t() / D**0.5  # type: ignore[index]
    row = [(table[..., 9, 0] + table[..., 9, 1]) / 2, table[..., 9, 1]]
    row += [(table[..., 9, 1] + table[..., 9, 2]) / 2, table[..., 9, 2]]
    expected = torch.stack(row[::-1], -1).log_softmax(-1)
    torch.testing.assert_close(_logits(q, k, score)[..., 9, 6:10], expected)


def test_embeddings_start_at_nothing_and_learn() -> None:
    q, k, v = tensors(*SHAPES)
    score = Score("Baseline-CoPE", H, D, 1).double()
    out = attention(q, k, v, score)
    torch.testing.assert_close(out, attention(q, k, v, "Baseline-NoPE"))
    assert score.bias is not None
    assert score.bias["e"].shape == (64, D)
    (grad,) = torch.autograd.grad(out.square().sum(), score.bias["e"])
    assert (grad[:5] != 0).all()
    assert (grad[T + 1 :] == 0).all()


def test_keys_in_any_order_are_counted_by_position() -> None:
    q, k, v = tensors(*SHAPES)
    order = torch.randperm(T, generator=torch.Generator().manual_seed(3))
    score = _score()
    mixed = attention(
        q[:, :, order],
        k[:, :, order],
        v[:, :, order],
        score,
        q_positions=order,
        k_positions=order,
    )
    torch.testing.assert_close(mixed, attention(q, k, v, score)[:, :, order])


def test_a_key_that_is_no_number_spoils_the_rows_that_see_it() -> None:
    q, k, v = (x.detach() for x in tensors(*SHAPES))
    k[:, :, 5] = torch.nan
    for backend in ("strips", "reference"):
        out = attention(q, k, v, _score(), backend=backend)
        assert out[:, :, :5].isfinite().all()
        assert out[:, :, 5:].isnan().all()


def test_no_tensor_holds_every_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a forward nor a backward; the reference shows that one would be noticed."""
    tokens = 96
    monkeypatch.setattr(reference, "STRIP_BYTES", 8 * tokens * B * H * 9 * 4)
    q, k, v = tensors((B, H, tokens, D), (B, 1, tokens, D), (B, 1, tokens, D))
    score = _score()
    for backend in ("auto", "reference"):
        with largest() as seen:
            out = attention(q, k, v, score, backend=backend)
            torch.autograd.grad(out.sum(), [q, k, v, *score.parameters()])
        assert (seen.numel < B * H * tokens**2 // 4) == (backend == "auto"), backend


def test_half_precision_counts_many_keys() -> None:
    """Hundreds of gates: counted in bfloat16, past 256 by twos, rows were off by 0.05."""
    tokens = 1000
    q, k, v = (x.detach().bfloat16() for x in tensors(*[(1, 1, tokens, 8)] * 3))
    score = Score("Baseline-CoPE(positions=700)", 1, 8)
    assert score.bias is not None
    with torch.no_grad():
        score.bias["e"].copy_((torch.arange(700) / 4).cos()[:, None].expand(-1, 8))
    half = attention(q, k, v, score)
    exact = attention(q.double(), k.double(), v.double(), score.double())
    assert half.dtype == torch.bfloat16
    assert (half.double() - exact)[:, :, 500:].abs().max() < 0.03


def test_bfloat16_autocast_counts_in_float32() -> None:
    """Counted by what autocast makes of the product, rows were off by 0.06."""
    q, k, v = (x.detach().bfloat16() for x in tensors(*[(1, 2, 300, 8)] * 3))
    score = Score("Baseline-CoPE(positions=200)", 2, 8)
    assert score.bias is not None
    with torch.no_grad():
        score.bias["e"].copy_((torch.arange(200) / 4).cos()[:, None].expand(-1, 8))
    plain = attention(q, k, v, score)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attention(q, k, v, score), plain)


def test_what_cannot_be_asked_and_what_explain_says() -> None:
    q, k, v = tensors(*SHAPES)
    with pytest.raises(InputError, match="CoPE is defined for causal attention only"):
        attention(q, k, v, _score(), causal=False)
    with pytest.raises(InputError, match=r"fused kernel cannot serve this: .*both positions"):
        attention(q, k, v, _score(), backend="fused")
    told = explain("Baseline-CoPE", (1, 8, 4096, 64))
    assert told.kernel == "strips"
    assert told.working_bytes < 2**24
    assert any("CoPE" in line for line in told.left)
