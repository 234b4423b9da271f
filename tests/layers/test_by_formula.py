"""Scores beyond the recipes of the oracle, by their equations: outputs, gradients, every kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from layers.written_out import assert_every_kernel_agrees, rotate
from normattn import InputError, Score, ScoreSpec, attention
from normattn.kernels import AttentionMask
from normattn.score.parts.bias import T5Bias
from score.cases import drawn, tensors

B, H, G, T, D, E = 2, 4, 2, 9, 4, 6
SHAPES = (B, H, T, D), (B, G, T, D), (B, G, T, D)
BACKENDS = ("auto", "reference", "chunked")
either = pytest.mark.parametrize("causal", [True, False])


def assert_agrees(
    expected: Tensor,
    leaves: Sequence[Tensor],
    score: Score | str,
    causal: bool = True,
    must: Sequence[str] = ("auto", "reference", "strips"),
    rows: Tensor | float = 1.0,
    **given: Any,
) -> None:
    """Attention over q, k, v, the first leaves, gives `expected` and its gradients."""
    run = partial(attention, *leaves[:3], score, causal, **given)
    assert_every_kernel_agrees(run, expected, leaves, must, rows)


def attended(logits: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    """Softmax of these logits, over keys up to the query if causal, times the values."""
    if causal:
        logits = logits.masked_fill(~torch.ones_like(logits, dtype=torch.bool).tril(), -math.inf)
    out: Tensor = logits.softmax(-1) @ v.repeat_interleave(logits.shape[1] // v.shape[1], 1)
    return out


def products(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.repeat_interleave(H // G, 1).mT / math.sqrt(D)


def made(text: str, groups: int = G) -> tuple[Score, dict[str, Tensor]]:
    """The score, and its parameters by name, all drawn at random."""
    score = drawn(Score(text, H, D, groups))
    return score, dict(score.named_parameters())


def _unit(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)


def test_distant_scores_are_spread_and_lowered() -> None:
    leaves = q, k, v = tensors(*SHAPES)
    distance = (torch.arange(T)[:, None] - torch.arange(T)).clamp(min=0).double()
    square = 1 + 2 * (distance / 3 + 1).log()
    logits = square.sqrt() * products(q, k) + 1 - square
    assert_agrees(attended(logits, v), leaves, "Baseline-ScaleInvariant(tau=3)")


def test_each_head_learns_a_power_of_the_logarithm() -> None:
    leaves = q, k, v = tensors(*SHAPES)
    torch.manual_seed(0)
    score = Score("Baseline-NoPE-ASScale(delta=0.5)", H, D, G).double()
    learned = dict(score.named_parameters())
    beta, gamma = learned["logn.beta"], learned["logn.gamma"]
    assert bool(((beta > 0.1) & (beta < 1)).all())
    grown = 0.5 + beta[:, None] * torch.arange(2, T + 2).double().log() ** gamma[:, None]
    expected = attended(grown[..., None] * products(q, k), v)
    assert_agrees(expected, [*leaves, beta, gamma], score)


def test_the_score_of_ngpt() -> None:
    """Rotated, divided by the length, times a gain of each head's features; √d in front."""
    q, k, v = leaves = tensors(*[(B, H, T, D)] * 3)
    score, learned = made("NGPT-RotateFirst", H)
    gains = [learned[f"{side}_norm.weight"][:, None] for side in ("query", "key")]
    one, other = (_unit(rotate(x)) * gain for x, gain in zip((q, k), gains, strict=True))
    expected = attended(math.sqrt(D) * one @ other.mT, v)
    assert_agrees(expected, [*leaves, *learned.values()], score)


@pytest.mark.parametrize("name", ["QKDyT", "QKDerf"])
def test_queries_and_keys_are_bounded_feature_by_feature(name: str) -> None:
    q, k, v = leaves = tensors((B, H, T, D), (B, 1, T, D), (B, 1, T, D))
    score, learned = made(f"{name}-NoPE", 1)
    shapes = {"alpha": (), "weight": (D,), "bias": (D,)} | ({"shift": ()} if "Derf" in name else {})
    expected = {f"{side}_norm.{key}": shapes[key] for side in ("query", "key") for key in shapes}
    assert {key: tuple(parameter.shape) for key, parameter in learned.items()} == expected

    def bounded(x: Tensor, side: str) -> Tensor:
        own = {key: learned[f"{side}.{key}"] for key in shapes}
        inner = own["alpha"] * x
        inner = torch.erf(inner + own["shift"]) if "shift" in own else inner.tanh()
        return inner * own["weight"] + own["bias"]

    logits = bounded(q, "query_norm") @ bounded(k, "key_norm").mT / math.sqrt(D)
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
    score, learned = made("Baseline-T5Bias(buckets=4,max_distance=8)")
    bucket = torch.tensor([0, 1, 2, 2, 3, 3, 3, 3, 3])  # 2 + ⌊2·ln(r/2)/ln 4⌋ from r = 2 on
    distance = (torch.arange(T)[:, None] - torch.arange(T)).clamp(min=0)
    expected = attended(products(q, k) + learned["bias.table"][:, bucket[distance]], v)
    assert_agrees(expected, [*leaves, *learned.values()], score, must=("auto", "reference"))


@pytest.mark.parametrize("variant", ["Baseline", "KNA"])
@either
def test_the_score_of_xlnet(variant: str, causal: bool) -> None:
    leaves = q, k, v = tensors(*[(B, H, T, D)] * 3)
    score, learned = made(f"{variant}-XLNet", H)
    keys, scale = (_unit(k), 1.0) if variant == "KNA" else (k, D**-0.5)
    distance = torch.arange(T)[:, None, None] - torch.arange(T)[:, None]
    angle = distance * 10000 ** (-2 * torch.arange(H * D // 2).double() / (H * D))
    waves = torch.cat((angle.sin(), angle.cos()), -1)
    place = (waves @ learned["bias.w"].T).view(T, T, H, D)
    content = (q + learned["bias.u"][:, None]) @ keys.mT
    where = torch.einsum("bhtd,tshd->bhts", q + learned["bias.v"][:, None], place)
    expected = attended(scale * (content + where), v, causal)
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
def test_the_score_and_the_values_of_nezha(variant: str, causal: bool) -> None:
    """With values of an odd size."""
    queries, size = 4, 5
    leaves = q, k, v = tensors((B, H, queries, D), (B, G, T, D), (B, G, T, size))
    keys, scale = (_unit(k), 1.0) if variant == "KNA" else (k, D**-0.5)
    keys, values = (x.repeat_interleave(H // G, 1) for x in (keys, v))
    of_keys, of_values = (
        torch.stack([_nezha_row(i, j, n) for i in range(T - queries, T) for j in range(T)])
        for n in (D, size)
    )
    place = torch.einsum("bhtd,tsd->bhts", q, of_keys.view(queries, T, D))
    seen = torch.ones(queries, T).tril(T - queries) > 0 if causal else torch.tensor(True)
    weights = (scale * (q @ keys.mT + place)).masked_fill(~seen, -math.inf).softmax(-1)
    read = torch.einsum("bhts,tse->bhte", weights, of_values.view(queries, T, size))
    score = Score(f"{variant}-NEZHA(clip={CLIP})", H, D, G)
    assert_agrees(weights @ values + read, leaves, score, causal)
    for backend in ("fused", "chunked"):
        with pytest.raises(InputError, match="both positions"):
            attention(q, k, v, score, causal, backend=backend)


@either
@pytest.mark.parametrize("queries", [5, T])
def test_what_xsa_reads_is_orthogonal_to_the_own_value(causal: bool, queries: int) -> None:
    leaves = q, k, v = tensors((B, H, queries, D), (B, G, T, D), (B, G, T, E))
    read = attention(q, k, v, "KNA", causal, backend="reference")
    own = v.repeat_interleave(H // G, 1)[:, :, T - queries :]
    along = (read * own).sum(-1, keepdim=True) / (own * own).sum(-1, keepdim=True)
    assert_agrees(read - along * own, leaves, "KNA-XSA", causal, BACKENDS)


def test_an_own_value_of_zero_leaves_what_is_read_as_it_is() -> None:
    q, k, v = tensors((1, 2, 3, D), (1, 2, 3, D), (1, 2, 3, E))
    with torch.no_grad():
        v[:, :, 1] = 0
    ours = attention(q, k, v, "KNA-XSA")
    torch.testing.assert_close(ours[:, :, 1], attention(q, k, v, "KNA")[:, :, 1])
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(ours.sum(), (q, k, v)))


@either
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_vo_rope_reads_a_value_by_its_distance(layout: str, causal: bool) -> None:
    """Complex numbers in place of pairs: feature pair m of v_j comes times e^(i·(j−i)·θ_m)."""
    queries = 5
    leaves = q, k, v = tensors((B, H, queries, D), (B, G, T, D), (B, G, T, E))
    unit = torch.eye(T, dtype=v.dtype).expand(B, G, T, T)
    weights = attention(q, k, unit, "KNA", causal, backend="reference")
    first, second = v.chunk(2, -1) if layout == "half" else (v[..., 0::2], v[..., 1::2])
    pairs = torch.complex(first, second).repeat_interleave(H // G, 1)
    distance = torch.arange(T)[None] - torch.arange(T - queries, T)[:, None]
    theta = 50 ** (-2 * torch.arange(E // 2, dtype=torch.float64) / E)
    turns = torch.exp(1j * distance[..., None] * theta)
    read = torch.einsum("bhts,tsm,bhsm->bhtm", weights.to(turns.dtype), turns, pairs)
    parts = (read.real, read.imag)
    expected = torch.cat(parts, -1) if layout == "half" else torch.stack(parts, -1).flatten(-2)
    score = f"KNA-VORoPE(base=50,layout={layout})"
    assert_agrees(expected, leaves, score, causal, BACKENDS)


NUMBERS = torch.tensor([[0] * 4 + [1] * (T - 4), [0] * 7 + [1] * (T - 7)])
PADDED = torch.arange(T)[None] < torch.tensor([[0], [3]])


@pytest.mark.parametrize(
    ("groups", "queries", "part", "given"),
    [
        (1, T, "", {}),
        (2, T, "", {}),
        (4, 4, "", {}),
        (2, T, "-SlidingWindow(window=4)", {}),
        (2, T, "-Packed", {"documents": NUMBERS}),
        (2, T, "", {"key_padding": PADDED}),
    ],
)
def test_the_forgetting_gate(groups: int, queries: int, part: str, given: dict[str, Any]) -> None:
    """Softmax of ⟨q, k⟩/√d + Σ_{j<l≤i} ln σ(f_l)."""
    shapes = (B, H, queries, D), (B, groups, T, D), (B, groups, T, E), (B, T, H)
    leaves = q, k, v, forget = tensors(*shapes)
    total = F.logsigmoid(forget).cumsum(1).mT
    passed = total[..., T - queries :, None] - total[..., None, :]
    more: dict[str, Any] = {"attn_mask": passed, "backend": "reference", **given}
    expected = attention(q, k, v, f"Baseline-NoPE{part}", **more)
    real = ~PADDED[:, None, :, None] if "key_padding" in given else torch.ones(B, 1, T, 1)
    real, text = real[:, :, T - queries :], f"Baseline-FoX{part}"
    assert_agrees(expected, leaves, text, True, BACKENDS, real, forget=forget, **given)


def test_the_forgetting_gate_by_position_and_in_half_precision() -> None:
    q, k, v, forget = tensors((B, H, T, D), (B, G, T, D), (B, G, T, E), (B, T, H))
    gaps = 3 * torch.arange(T)
    read = partial(attention, q, k, v, "Baseline-NoPE-FoX", forget=forget)
    same = read(q_positions=gaps, k_positions=gaps)
    torch.testing.assert_close(same, read())
    packed: dict[str, Any] = {"forget": forget, "documents": NUMBERS[:1].expand(B, -1)}
    restart = torch.cat((torch.arange(4), torch.arange(T - 4)))
    again = attention(q, k, v, "Baseline-FoX-Packed", k_positions=restart, **packed)
    torch.testing.assert_close(again, attention(q, k, v, "Baseline-FoX-Packed", **packed))
    # After 2000 tokens the sum is in the thousands: a rounded one is off by whole numbers.
    q, k, v = (x.detach().bfloat16() for x in tensors(*[(1, 2, 2000, 8)] * 3))
    forget = torch.linspace(-2, 1, 2000)[None, :, None].expand(1, -1, 2)
    exact = attention(q.double(), k.double(), v.double(), "KNA-FoX", forget=forget.double())
    half = attention(q, k, v, "KNA-FoX", forget=forget)
    assert (half.double() - exact).abs().max() < 0.03


@either
@pytest.mark.parametrize("per", ["head", "feature"])
@pytest.mark.parametrize("act", ["sigmoid", "softplus"])
def test_the_output_gate(per: str, causal: bool, act: str) -> None:
    """σ(g) o or ln(1 + eᵍ) o."""
    wide = 1 if per == "head" else E
    shapes = (B, H, T, D), (B, G, T, D), (B, G, T, E), (B, T, H * wide)
    leaves = q, k, v, gate = tensors(*shapes)
    mine = gate.reshape(B, T, H, wide).transpose(1, 2)
    size = 1 / (1 + (-mine).exp()) if act == "sigmoid" else (1 + mine.exp()).log()
    expected = attention(q, k, v, "KNA", causal, backend="reference") * size
    assert_agrees(expected, leaves, f"KNA-Gate(per={per},act={act})", causal, BACKENDS, gate=gate)


def test_two_heads_of_a_key_head_make_one_output() -> None:
    """o_p = softmax(s_2p)·v − σ(λ_p)·softmax(s_2p+1)·v, where both read one key head's values."""
    leaves = q, k, v, shares = tensors((B, H, T, D), (B, 1, T, D), (B, 1, T, E), (B, T, H // 2))
    read = attended(q @ _unit(k).mT, v)
    share = 1 / (1 + (-shares).exp()).mT[..., None]
    score = Score("KNA-NoPE-DifferentialV2", H, D, 1)
    expected = read[:, 0::2] - share * read[:, 1::2]
    assert_agrees(expected, leaves, score, True, BACKENDS, gate=shares)


@pytest.mark.parametrize(
    "name",
    ["XLNet", f"NEZHA(clip={CLIP})", "ScaleInvariant", "StickBreaking", "CoPE(positions=6)"],
)
def test_positions_may_be_anywhere_in_any_order(name: str) -> None:
    q, k, v = (x.detach() for x in tensors(*[(1, H, T, D)] * 3))
    score, _ = made(f"Baseline-{name}", H)
    whole, far = attention(q, k, v, score), torch.arange(T) + 100_000
    moved = attention(q, k, v, score, q_positions=far, k_positions=far)
    torch.testing.assert_close(moved, whole, rtol=1e-8, atol=1e-8)
    order, rows = torch.tensor([3, 0, 6, 8, 2, 5, 1, 4, 7]), torch.arange(T)
    keys, values = k[:, :, order], v[:, :, order]
    for at, query, expected in ((rows, q, whole), (order, q[:, :, order], whole[:, :, order])):
        mixed = attention(query, keys, values, score, q_positions=at, k_positions=order)
        torch.testing.assert_close(mixed, expected)


WINDOWS = ("", "-Gate", "-ReRoPE(window=2)", "-DualChunk(size=2,local=1)")
APART = [f"{part}{beside}" for part in ("XSA", "VORoPE") for beside in WINDOWS]


@pytest.mark.parametrize("parts", [*APART, "XLNet", f"NEZHA(clip={CLIP})", "ScaleInvariant"])
def test_packed_documents_are_read_as_each_alone(parts: str) -> None:
    q, k, v = tensors(*[(1, H, T, D)] * 3)
    score, packed = (made(f"KNA-{parts}{more}", H)[0] for more in ("", "-Packed"))
    gate = tensors((1, T, H * D), seed=1)[0]
    given: dict[str, Any] = {"gate": gate} if "Gate" in parts else {}
    whole = attention(q, k, v, packed, documents=NUMBERS[:1], **given)
    last: dict[str, Any] = {"gate": gate[:, 4:]} if given else {}
    alone = attention(q[:, :, 4:], k[:, :, 4:], v[:, :, 4:], score, **last)
    torch.testing.assert_close(whole[:, :, 4:], alone)


@pytest.mark.parametrize("name", ["Baseline-NEZHA(clip=2)", "KNA-XSA", "KNA-VORoPE"])
def test_half_precision_and_rows_without_keys(name: str) -> None:
    q, k, v = (x.detach() for x in tensors(*SHAPES))
    hidden = torch.ones(1, 1, T, T, dtype=torch.bool)
    hidden[:, :, 3] = False
    score = Score(name, H, D, G)
    exact = attention(q, k, v, score, attn_mask=hidden)
    if "NEZHA" in name:
        exact, sums = attention(q, k, v, score, attn_mask=hidden, return_lse=True)
        assert (sums[:, :, 3] == -math.inf).all()
    assert not exact[:, :, 3].any()
    low = attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), score, attn_mask=hidden)
    assert low.dtype == torch.bfloat16
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
