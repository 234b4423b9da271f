"""Normalisation of queries and keys: names mean what they say, and agree with torch's own."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normattn import InputError, Score, ScoreSpec
from normattn.kernels import AttentionMask
from normattn.score.norms import Normalisation
from normattn.score.positions import Positions

from .cases import tensors

B, H, T, D = 2, 3, 5, 8


def norm(kind: str, **options: object) -> nn.Module:
    built: nn.Module = Normalisation(kind, **options).build(H, D)  # type: ignore[arg-type]
    return built


def prepared(text: str, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """q and k as a kernel gets them, at position 0 (so not rotated)."""
    score = Score(ScoreSpec.parse(text), q.shape[1], q.shape[-1], k.shape[1]).to(q.dtype)
    where = torch.zeros(q.shape[2], dtype=torch.int64)
    positions = Positions.of(q.shape[2], k.shape[2], True, q.device, None, where, where)
    seen = AttentionMask(True, where, where, aligned=False)
    ready = score(q, k, k, positions, seen)
    return ready.q, ready.k


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_l2_gives_a_length_of_1_not_of_the_root_of_d(dtype: torch.dtype) -> None:
    (x,) = tensors((B, H, T, D), dtype=dtype)
    y = norm("l2")(x * 7)
    assert y.dtype == dtype
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(
        y.double().norm(dim=-1), torch.ones(B, H, T).double(), rtol=tolerance, atol=tolerance
    )
    torch.testing.assert_close(y, F.normalize(x, dim=-1), rtol=tolerance, atol=tolerance)


def test_l2_of_zero_is_zero() -> None:
    x = torch.zeros(1, 1, 2, D, requires_grad=True)
    y = norm("l2")(x)
    assert (y == 0).all()
    assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()


def test_who_is_normalised() -> None:
    q, k = (x.detach() for x in tensors((B, H, T, D), (B, 1, T, D)))
    for text, left, right in (("QNA", True, False), ("KNA", False, True), ("CosA@6", True, True)):
        mine_q, mine_k = prepared(text, q, k)
        base = 4 * math.log(3) if text == "CosA@6" else 1.0
        torch.testing.assert_close(mine_q, base * (F.normalize(q, dim=-1) if left else q))
        torch.testing.assert_close(mine_k, F.normalize(k, dim=-1) if right else k)
    mine_q, mine_k = prepared("Baseline", q, k)
    torch.testing.assert_close(mine_q, q / math.sqrt(D))
    assert torch.equal(mine_k, k)


@pytest.mark.parametrize("sides", ["QK", "Q", "K"])
@pytest.mark.parametrize("gain", [True, False])
def test_feature_norms_of_each_head(sides: str, gain: bool) -> None:
    q, k = (x.detach() for x in tensors((B, H, T, D), (B, 1, T, D)))
    options = f"(gain={str(gain).lower()},eps=0.01)"
    layer = [F.layer_norm(x, (D,), eps=0.01) for x in (q, k)]
    rms = [F.rms_norm(x, (D,), eps=0.01) for x in (q, k)]
    for title, normal in (("LayerNorm", layer), ("RMSNorm", rms)):
        mine_q, mine_k = prepared(f"{sides}{title}{options}", q, k)
        torch.testing.assert_close(mine_q * math.sqrt(D), normal[0] if "Q" in sides else q)
        torch.testing.assert_close(mine_k, normal[1] if "K" in sides else k)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_feature_norms_over_all_heads(kind: str) -> None:
    (x,) = tensors((B, H, T, D))
    flat = x.transpose(1, 2).flatten(2)
    whole = F.layer_norm(flat, (H * D,)) if kind == "layer" else F.rms_norm(flat, (H * D,), eps=0.0)
    expected = whole.unflatten(2, (H, D)).transpose(1, 2)  # type: ignore[no-untyped-call]
    y = norm(kind, across="all", eps=1e-5 if kind == "layer" else 0.0)(x)
    torch.testing.assert_close(y, expected)
    apart = norm(kind, across="head", eps=0.0)(x)
    assert (apart - y).abs().max() > 0.01


@pytest.mark.parametrize("kind", ["layer", "rms", "batch", "instance"])
def test_no_gain_is_a_gain_of_ones(kind: str) -> None:
    (x,) = tensors((B, H, T, D), dtype=torch.float32)
    assert torch.equal(norm(kind, gain=True)(x), norm(kind, gain=False)(x))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("Baseline", {}),
        ("KNA-logn@8", {}),
        ("CosA@8", {}),
        ("QKNorm2020@8", {"scale": ()}),
        ("QKRMSNorm", {"query_norm.weight": (D,), "key_norm.weight": (D,)}),
        ("QKRMSNorm(gain=false)", {}),
        ("KRMSNorm(across=all)", {"key_norm.weight": (1, D)}),
        ("QLayerNorm(across=all)", {"query_norm.weight": (H, D), "query_norm.bias": (H, D)}),
        ("QBatchNorm", {"query_norm.weight": (1, H, 1, D), "query_norm.bias": (1, H, 1, D)}),
        ("KInstanceNorm(gain=false)", {}),
    ],
)
def test_what_is_learned(text: str, names: dict[str, tuple[int, ...]]) -> None:
    score = Score(text, H, D, 1)
    assert {name: tuple(p.shape) for name, p in score.named_parameters()} == names


@pytest.mark.parametrize(("length", "first"), [(2, 1.0), (64, math.log2(64 * 63))])
def test_the_learned_scale_of_2020_starts_at_its_formula(length: int, first: float) -> None:
    for text in (f"QKNorm2020@{length}", f"QKNorm2020(length={length})"):
        scale = Score(text, H, D).scale
        assert scale is not None
        assert scale.item() == pytest.approx(first)
    scale = Score("QKNorm2020(length=16)@512", H, D).scale
    assert scale is not None
    assert scale.item() == pytest.approx(math.log2(16 * 15))


@pytest.mark.parametrize("kind", ["layer", "rms", "batch", "instance"])
def test_statistics_in_float32_under_half_precision(kind: str) -> None:
    """Values around 300 have squares that bfloat16 sums would lose."""
    (noise,) = tensors((B, H, T, 256), dtype=torch.float32)
    x = (noise.detach() + 300).bfloat16()
    module = Normalisation(kind, gain=True).build(H, 256)  # type: ignore[arg-type]
    for wrapped in (module, module.bfloat16()):
        y = wrapped(x)
        assert y.dtype == torch.bfloat16
        exact = Normalisation(kind, gain=False).build(H, 256)(x.double())  # type: ignore[arg-type]
        torch.testing.assert_close(y.double(), exact, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("text", ["QKNorm2020@64", "KNA-NoPE-logn@6", "CosA-NoPE-logn@6"])
def test_a_scale_is_not_rounded_to_half_precision(text: str) -> None:
    """A scale that is itself rounded to bfloat16 is off by up to 0.4 % for a whole row of q."""
    (q,) = tensors((1, 1, 30, 256), dtype=torch.bfloat16)
    score = Score(text, 1, 256)
    if score.scale is not None:
        with torch.no_grad():
            score.scale.fill_(1.7069)
    where = Positions.of(30, 30, True, q.device)
    seen = AttentionMask(True, where.query, where.key, aligned=True)
    low, wide = (score(x, x, x, where, seen).q for x in (q, q.double()))
    ratio = (low.double() * wide).sum(-1) / wide.square().sum(-1)
    assert (ratio[:, :, 1:] - 1).abs().mean() < 5e-4


@pytest.mark.parametrize(
    ("heads", "d", "kv_heads", "reason"),
    [
        (0, 4, None, "must be at least 1, not 0 and 4"),
        (2, 0, None, "must be at least 1, not 2 and 0"),
        (4, 4, 3, "4 query heads cannot share 3 key heads"),
        (4, 4, 0, "4 query heads cannot share 0 key heads"),
        (4, 5, None, "Baseline needs an even head dimension, but it is 5"),
    ],
)
def test_sizes_that_cannot_be(heads: int, d: int, kv_heads: int | None, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        Score("Baseline", heads, d, kv_heads)
    assert Score("Baseline-NoPE", 1, 5).head_dim == 5
