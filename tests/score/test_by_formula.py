"""Scores beyond the recipes of the oracle: by formula, outputs and gradients, every kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from normattn import InputError, Score, ScoreSpec, attention
from normattn.kernels import AttentionMask
from normattn.score.parts import rope_frequencies
from normattn.score.parts.bias import T5Bias

from .cases import tensors

B, H, G, T, D = 2, 4, 2, 9, 4
SHAPES = (B, H, T, D), (B, G, T, D), (B, G, T, D)
either = pytest.mark.parametrize("causal", [True, False])


def assert_agrees(
    expected: Tensor,
    leaves: Sequence[Tensor],
    score: Score,
    causal: bool = True,
    backends: Sequence[str] = ("auto", "reference", "strips"),
) -> None:
    """Attention over q, k, v, the first leaves, gives `expected` and its gradients."""
    q, k, v = leaves[:3]
    weights = torch.linspace(-1, 1, expected.numel()).double().view_as(expected)
    by_hand = torch.autograd.grad(expected, leaves, weights)
    for backend in backends:
        out = attention(q, k, v, score, causal, backend=backend)
        torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-10)
        for ours, hand in zip(torch.autograd.grad(out, leaves, weights), by_hand, strict=True):
            torch.testing.assert_close(ours, hand, rtol=1e-9, atol=1e-10)


def attended(logits: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    """Softmax of these logits, over keys up to the query if causal, times the values."""
    if causal:
        logits = logits.masked_fill(~torch.ones_like(logits, dtype=torch.bool).tril(), -math.inf)
    out: Tensor = logits.softmax(-1) @ v.repeat_interleave(logits.shape[1] // v.shape[1], 1)
    return out


def products(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.repeat_interleave(H // G, 1).mT / math.sqrt(D)


def drawn(score: Score) -> dict[str, Tensor]:
    """The score's parameters by name, all drawn at random."""
    learned: dict[str, Tensor] = dict(score.named_parameters())
    with torch.no_grad():
        for seed, parameter in enumerate(learned.values()):
            parameter.copy_(tensors((*parameter.shape, 1), seed=seed)[0][..., 0])
    return learned


def test_distant_scores_are_spread_and_lowered() -> None:
    leaves = q, k, v = tensors(*SHAPES)
    a, m = torch.ones(T, T).double(), torch.zeros(T, T).double()
    for i in range(T):
        for j in range(i):
            square = 1 + 2 * math.log((i - j) / 3 + 1)
            a[i, j], m[i, j] = math.sqrt(square), 1 - square
    score = Score("Baseline-ScaleInvariant(tau=3)", H, D, G)
    assert_agrees(attended(a * products(q, k) + m, v), leaves, score)


def test_each_head_learns_a_power_of_the_logarithm() -> None:
    leaves = q, k, v = tensors(*SHAPES)
    torch.manual_seed(0)
    score = Score("Baseline-NoPE-ASScale(delta=0.5)", H, D, G).double()
    learned = dict(score.named_parameters())
    beta, gamma = learned["logn.beta"], learned["logn.gamma"]
    assert bool(((beta > 0.1) & (beta < 1)).all())
    grown = [
        torch.stack([0.5 + beta[h] * math.log(n + 1) ** gamma[h] for n in range(1, T + 1)])
        for h in range(H)
    ]
    logits = torch.stack(grown)[None, :, :, None] * products(q, k)
    assert_agrees(attended(logits, v), [*leaves, beta, gamma], score)


def test_the_score_of_ngpt() -> None:
    """Rotated, divided by the length, times a gain of each head's features; √d in front."""
    q, k, v = leaves = tensors(*[(B, H, T, D)] * 3)
    score = Score("NGPT-RoPE(layout=interleaved)-RotateFirst", H, D).double()
    learned = drawn(score)

    def made(x: Tensor, gain: Tensor) -> Tensor:
        assert gain.shape == (H, D)
        angle = torch.arange(T)[:, None] * rope_frequencies(D, 10000.0)
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], D // 2, 2))
        turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)
        unit: Tensor = turned / turned.norm(dim=-1, keepdim=True)
        return unit * gain[:, None]

    made_k = made(k, learned["key_norm.weight"])
    logits = math.sqrt(D) * made(q, learned["query_norm.weight"]) @ made_k.mT
    assert_agrees(attended(logits, v), [*leaves, *learned.values()], score)


@pytest.mark.parametrize("name", ["QKDyT", "QKDerf"])
def test_queries_and_keys_are_bounded_feature_by_feature(name: str) -> None:
    q, k, v = leaves = tensors((B, H, T, D), (B, 1, T, D), (B, 1, T, D))
    score = Score(f"{name}-NoPE", H, D, 1).double()
    learned = drawn(score)
    shapes = {"alpha": (), "weight": (D,), "bias": (D,)} | ({"shift": ()} if "Derf" in name else {})
    expected = {f"{side}_norm.{key}": shapes[key] for side in ("query", "key") for key in shapes}
    assert {key: tuple(parameter.shape) for key, parameter in learned.items()} == expected

    def made(x: Tensor, side: str) -> Tensor:
        own = {key: learned[f"{side}.{key}"] for key in shapes}
        stretched = own["alpha"] * x
        bounded = (
            torch.erf(stretched + own["shift"])
            if "shift" in own
            else 1 - 2 / (1 + (2 * stretched).exp())
        )
        return bounded * own["weight"] + own["bias"]

    logits = made(q, "query_norm") @ made(k, "key_norm").mT / math.sqrt(D)
    assert_agrees(attended(logits, v), [*leaves, *learned.values()], score)


@pytest.mark.parametrize(("buckets", "most"), [(32, 128), (16, 64), (8, 20), (7, 20)])
def test_buckets_are_those_of_t5(buckets: int, most: int) -> None:
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    distance = torch.arange(3000)
    expected = t5.T5Attention._relative_position_bucket(-distance, False, buckets, most)
    part = T5Bias(buckets=buckets, max_distance=most)
    assert torch.equal(part.bucket(distance.double()), expected)


def test_the_bias_of_t5() -> None:
    """softmax(q·k/√d + β[bucket]), with the gradient of β."""
    leaves = q, k, v = tensors(*SHAPES)
    score = Score("Baseline-T5Bias(buckets=4,max_distance=8)", H, D, G).double()
    bucket = [0, 1, 2, 2, 3, 3, 3, 3, 3]  # 2 + ⌊2·ln(r/2)/ln 4⌋ from r = 2 on
    table = drawn(score)["bias.table"]
    rows = [[table[:, bucket[max(i - j, 0)]] for j in range(T)] for i in range(T)]
    bias = torch.stack([torch.stack(row, -1) for row in rows], -2)
    expected = attended(products(q, k) + bias, v)
    assert_agrees(expected, [*leaves, table], score, backends=("auto", "reference"))


@pytest.mark.parametrize("parameters", ["buckets=1", "buckets=8,max_distance=4"])
def test_buckets_without_a_meaning_are_refused(parameters: str) -> None:
    with pytest.raises(InputError, match=parameters.rsplit(",")[-1].split("=")[0]):
        ScoreSpec.parse(f"Baseline-T5Bias({parameters})")


def _xlnet(text: str = "Baseline-XLNet") -> Score:
    torch.manual_seed(0)
    score = Score(text, H, D).double()
    with torch.no_grad():
        for parameter in score.parameters():
            parameter.mul_(30)
    return score


@either
def test_the_score_of_xlnet_is_that_of_transformers(causal: bool) -> None:
    xlnet = pytest.importorskip("transformers.models.xlnet.modeling_xlnet")
    from transformers import XLNetConfig

    kind = "uni" if causal else "bi"
    config = XLNetConfig(d_model=H * D, n_head=H, dropout=0.0, attn_type=kind, n_layer=0)
    theirs, model = xlnet.XLNetRelativeAttention(config).double().eval(), xlnet.XLNetModel(config)
    score, (q, k, v) = _xlnet(), tensors(*[(B, H, T, D)] * 3)
    learned = dict(score.named_parameters())
    waves = model.relative_positional_encoding(T, T, bsz=B).double()
    with torch.no_grad():
        theirs.r_w_bias.copy_(learned["bias.u"])
        theirs.r_r_bias.copy_(learned["bias.v"])
    keys = torch.einsum("rbe,hde->rbhd", waves, learned["bias.w"].view(H, D, -1))
    hidden = torch.ones(T, T).triu(1).double()[..., None, None].expand(T, T, B, H)
    expected = theirs.rel_attn_core(
        *(x.permute(2, 0, 1, 3) for x in (q, k, v)), keys, attn_mask=hidden if causal else None
    ).permute(1, 2, 0, 3)
    # Their sinusoids are of float32.
    torch.testing.assert_close(attention(q, k, v, score, causal), expected, rtol=1e-5, atol=1e-6)


def _unit(x: Tensor) -> Tensor:
    unit: Tensor = x / x.norm(dim=-1, keepdim=True)
    return unit


@pytest.mark.parametrize("variant", ["Baseline", "KNA"])
@either
def test_xlnet_pair_by_pair(variant: str, causal: bool) -> None:
    leaves = q, k, v = tensors(*[(B, H, T, D)] * 3)
    score = _xlnet(f"{variant}-XLNet")
    learned = dict(score.named_parameters())
    keys, scale = (_unit(k), 1.0) if variant == "KNA" else (k, D**-0.5)
    rows = []
    for i in range(T):
        columns = []
        for j in range(T):
            angles = [(i - j) * 10000 ** (-2 * m / (H * D)) for m in range(H * D // 2)]
            waves = [*map(math.sin, angles), *map(math.cos, angles)]
            place = (learned["bias.w"] @ torch.tensor(waves, dtype=torch.float64)).view(H, D)
            content = ((q[:, :, i] + learned["bias.u"]) * keys[:, :, j]).sum(-1)
            columns.append(scale * (content + ((q[:, :, i] + learned["bias.v"]) * place).sum(-1)))
        rows.append(torch.stack(columns, -1))
    expected = attended(torch.stack(rows, -2), v, causal)
    assert_agrees(expected, [*leaves, *learned.values()], score, causal)


CLIP = 2


def _nezha_row(i: int, j: int, size: int) -> Tensor:
    """R of query i and key j as the authors' loop fills its table."""
    position = min(max(j - i, -CLIP), CLIP) + CLIP
    row = [0.0] * size
    for m in range(size // 2):
        row[2 * m] = math.sin(position / 10000 ** (2 * m / size))
        row[2 * m + 1] = math.cos(position / 10000 ** (2 * m / size))
    return torch.tensor(row, dtype=torch.float64)


@pytest.mark.parametrize("variant", ["Baseline", "KNA"])
@either
def test_nezha_pair_by_pair(variant: str, causal: bool) -> None:
    """Its score, and its values of an odd size."""
    queries, size = 4, 5
    leaves = q, k, v = tensors((B, H, queries, D), (B, G, T, D), (B, G, T, size))
    keys, scale = (_unit(k), 1.0) if variant == "KNA" else (k, D**-0.5)
    keys, values = (x.repeat_interleave(H // G, 1) for x in (keys, v))
    rows = []
    for i in range(T - queries, T):
        seen = range(i + 1 if causal else T)
        query = q[:, :, i - T + queries]
        content = [((keys[:, :, j] + _nezha_row(i, j, D)) * query).sum(-1) for j in seen]
        weights = (scale * torch.stack(content, -1)).softmax(-1)
        read = torch.stack([values[:, :, j] + _nezha_row(i, j, size) for j in seen], -2)
        rows.append((weights[..., None] * read).sum(-2))
    score = Score(f"{variant}-NEZHA(clip={CLIP})", H, D, G)
    assert_agrees(torch.stack(rows, -2), leaves, score, causal)
    for backend in ("fused", "chunked"):
        with pytest.raises(InputError, match="both positions"):
            attention(q, k, v, score, causal, backend=backend)


@pytest.mark.parametrize("name", ["XLNet", f"NEZHA(clip={CLIP})", "ScaleInvariant"])
def test_positions_may_stand_anywhere_and_documents_apart(name: str) -> None:
    q, k, v = (x.detach() for x in tensors(*[(1, H, T, D)] * 3))
    score, packed = (_xlnet(f"Baseline-{text}") for text in (name, f"{name}-Packed"))
    whole, far = attention(q, k, v, score), torch.arange(T) + 100_000
    moved = attention(q, k, v, score, q_positions=far, k_positions=far)
    torch.testing.assert_close(moved, whole, rtol=1e-8, atol=1e-8)
    order, rows = torch.tensor([3, 0, 6, 8, 2, 5, 1, 4, 7]), torch.arange(T)
    keys, values = k[:, :, order], v[:, :, order]
    mixed = attention(q, keys, values, score, q_positions=rows, k_positions=order)
    torch.testing.assert_close(mixed, whole)
    numbers = torch.tensor([[0] * 3 + [1] * (T - 3)])
    second = attention(q[:, :, 3:], k[:, :, 3:], v[:, :, 3:], score)
    out = attention(q, k, v, packed, documents=numbers)
    torch.testing.assert_close(out[:, :, 3:], second)


def test_half_precision_rows_without_keys_and_the_log_sum_exp() -> None:
    q, k, v = (x.detach() for x in tensors(*SHAPES))
    hidden = torch.ones(1, 1, T, T, dtype=torch.bool)
    hidden[:, :, 3] = False
    score = Score(f"Baseline-NEZHA(clip={CLIP})", H, D, G)
    exact, lse = attention(q, k, v, score, attn_mask=hidden, return_lse=True)
    assert not exact[:, :, 3].any()
    assert (lse[:, :, 3] == -math.inf).all()
    low = attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), score, attn_mask=hidden)
    torch.testing.assert_close(low.double(), exact, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("alpha", [1.05, 1.5, 2.0])
@pytest.mark.parametrize("keys", [0, 1, 3, 5000])
def test_weights_of_entmax_add_up_and_leave_keys_out(alpha: float, keys: int) -> None:
    score = 4 * tensors((1, 1, 2, keys), seed=1)[0].detach()
    score[0, 0, 1] = -math.inf
    whole = 1.0 if keys else 0.0
    part: Any = ScoreSpec.parse(f"Baseline-Entmax(alpha={alpha})").normaliser
    at = torch.arange(keys)
    weight = part.weights(score, AttentionMask(False, at[-2:], at, True, None, None))
    torch.testing.assert_close(weight[0, 0].sum(-1), torch.tensor([whole, 0.0]).double())
    if keys == 5000 and alpha >= 1.5:
        assert (weight[0, 0, 0] == 0).double().mean() > 0.9


def test_pairs_without_a_whole_turn_stay() -> None:
    part: Any = ScoreSpec.parse("Baseline-HoPE@512").position
    theta = rope_frequencies(64, 10000.0)
    kept = part.adjusted(theta) != 0
    assert kept.tolist() == [2 * math.pi / each <= 512 for each in theta.tolist()]
    # Stretched afterwards, the same pairs turn.
    slower = part.adjusted(theta / 8)
    assert torch.equal(slower != 0, kept)
