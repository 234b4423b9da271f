"""Scores beyond the recipes of the oracle, by their equations: outputs, gradients, every kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from normattn import Attention, InputError, Score, ScoreSpec, attention
from normattn.kernels import AttentionMask
from normattn.score.parts import rope_frequencies
from normattn.score.parts.bias import T5Bias
from score.cases import tensors

B, H, G, T, D, E = 2, 4, 2, 9, 4, 6
SHAPES = (B, H, T, D), (B, G, T, D), (B, G, T, D)
BACKENDS = ("auto", "reference", "chunked")
either = pytest.mark.parametrize("causal", [True, False])


def assert_agrees(
    expected: Tensor,
    leaves: Sequence[Tensor],
    score: Score | str,
    causal: bool = True,
    backends: Sequence[str] = ("auto", "reference", "strips"),
    rows: Tensor | None = None,
    **given: Any,
) -> None:
    """Attention over q, k, v, the first leaves, gives `expected` and its gradients.

    `rows` is 0 where a query's output has no meaning.
    """
    q, k, v = leaves[:3]
    weights = torch.linspace(-1, 1, expected.numel()).double().view_as(expected)
    weights = weights if rows is None else weights * rows
    by_hand = torch.autograd.grad(expected, leaves, weights)
    for backend in backends:
        out = attention(q, k, v, score, causal, backend=backend, **given)
        torch.testing.assert_close(
            *(x if rows is None else x * rows for x in (out, expected)), rtol=1e-9, atol=1e-10
        )
        torch.testing.assert_close(
            torch.autograd.grad(out, leaves, weights), by_hand, rtol=1e-8, atol=1e-10
        )


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
    keys = k.repeat_interleave(H // groups, 1)
    query, key = torch.arange(T - queries, T)[:, None], torch.arange(T)
    hidden = (key > query)[None] | (query - key >= (4 if "Window" in part else T))
    if "Packed" in part:
        hidden = hidden | (NUMBERS[:, T - queries :, None] != NUMBERS[:, None])
    real = torch.ones(B, 1, T, 1)
    if "key_padding" in given:
        hidden, real = hidden | PADDED[:, None], ~PADDED[:, None, :, None]
    logits = (q @ keys.mT / D**0.5 + passed).masked_fill(hidden[:, None], -torch.inf)
    weights = logits.masked_fill((logits == -torch.inf).all(-1, keepdim=True), 0.0).softmax(-1)
    expected = weights @ v.repeat_interleave(H // groups, 1)
    text = f"Baseline-FoX{part}"
    assert_agrees(
        expected, leaves, text, True, BACKENDS, real[:, :, T - queries :], forget=forget, **given
    )


def test_the_forgetting_gate_by_position_and_in_half_precision() -> None:
    q, k, v, forget = tensors((B, H, T, D), (B, G, T, D), (B, G, T, E), (B, T, H))
    gaps = 3 * torch.arange(T)
    plain = attention(q, k, v, "Baseline-NoPE-FoX", forget=forget)
    same = attention(
        q, k, v, "Baseline-NoPE-FoX", forget=forget, q_positions=gaps, k_positions=gaps
    )
    torch.testing.assert_close(same, plain)
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
    torch.manual_seed(0)
    layer = Attention(12, 4, 2, score="Baseline-DifferentialV2", head_dim=6)
    assert layer.out.weight.shape == (12, 2 * 6)
    assert layer.gate is not None
    assert layer.gate.weight.shape == (2, 12)
    out = layer(torch.randn(1, 5, 12))
    grads = torch.autograd.grad(out.square().sum(), list(layer.parameters()))
    assert all(grad.abs().sum() > 0 for grad in grads)


def test_selective_attention_is_shift_sum_and_subtract() -> None:
    """A whole matrix of what head 0 selects: shifted by a row, summed, subtracted."""
    leaves = q, k, v = tensors(*[(B, H, T, D)] * 3)
    logits = (q @ k.mT / D**0.5).masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
    chosen = logits[:, 0].relu() * (1 - torch.eye(T))
    chosen = torch.cat((torch.zeros(B, T, 1), chosen[:, :, 1:]), 2)
    taken = torch.cat((torch.zeros(B, 1, T), chosen[:, :-1]), 1).cumsum(1)
    expected = attended(logits - taken[:, None], v)
    assert_agrees(expected, leaves, "Baseline-NoPE-Selective")


@pytest.mark.parametrize("name", ["XLNet", f"NEZHA(clip={CLIP})", "ScaleInvariant"])
def test_positions_may_be_anywhere(name: str) -> None:
    q, k, v = (x.detach() for x in tensors(*[(1, H, T, D)] * 3))
    score = _xlnet(f"Baseline-{name}")
    whole, far = attention(q, k, v, score), torch.arange(T) + 100_000
    moved = attention(q, k, v, score, q_positions=far, k_positions=far)
    torch.testing.assert_close(moved, whole, rtol=1e-8, atol=1e-8)
    order, rows = torch.tensor([3, 0, 6, 8, 2, 5, 1, 4, 7]), torch.arange(T)
    keys, values = k[:, :, order], v[:, :, order]
    mixed = attention(q, keys, values, score, q_positions=rows, k_positions=order)
    torch.testing.assert_close(mixed, whole)


WINDOWS = ("", "-Gate", "-ReRoPE(window=2)", "-DualChunk(size=2,local=1)")
APART = [f"{part}{beside}" for part in ("XSA", "VORoPE") for beside in WINDOWS]


@pytest.mark.parametrize("parts", [*APART, "XLNet", f"NEZHA(clip={CLIP})", "ScaleInvariant"])
def test_packed_documents_are_read_as_each_alone(parts: str) -> None:
    q, k, v = tensors(*[(1, H, T, D)] * 3)
    score, packed = (_xlnet(f"KNA-{parts}{more}") for more in ("", "-Packed"))
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
    score, lse = Score(name, H, D, G), "NEZHA" in name
    exact = attention(q, k, v, score, attn_mask=hidden)
    if lse:
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
