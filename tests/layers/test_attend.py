"""`attention` in every shape: heads, masks, positions, precisions, documents, seldom calls."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from layers.written_out import assert_every_kernel_agrees
from normattn import CausalLM, CausalLMConfig, InputError, Score, ScoreSpec, attention
from normattn.kernels import BACKENDS, tiled
from normattn.kernels.stats import observing
from normattn.lab.diagnostics import Collector, layer_names
from normattn.layers import documents_from_lengths, documents_from_positions
from normattn.layers.cache import KeyValueCache
from normattn.models.transformer import set_activation_checkpointing
from score import oracle
from score.cases import built, learned, tensors
from score.oracle import Recipe

PLAIN = Recipe("KNA", "logn", train_length=4)
RECIPES = [
    PLAIN,
    Recipe("Baseline", "", method="ReRoPE", window=3),
    Recipe("CosA", "logn", "none", train_length=4),
    Recipe("QNA", "logn+", "interleaved", "YaRN", train_length=4),
]
every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.text)


SERVING = ("reference", "auto", "chunked")


def _assert_agree(
    recipe: Recipe, q: Tensor, k: Tensor, v: Tensor, must: Any = SERVING, **options: Any
) -> None:
    """All kernels give the oracle's output and gradients."""
    names = {"attn_mask": "mask", "key_padding": "padding"}
    words = {names.get(word, word): value for word, value in options.items()}
    score = built(recipe, q.shape[1], q.shape[3], k.shape[1])
    parameters = learned(score)
    leaves = (q, k, v, *parameters.values())
    expected = oracle.attend(recipe, q, k, v, learned=parameters, **words)
    run = partial(attention, q, k, v, score, **options)
    # Tiles of 3 rows of some heads or batch rows.
    with mock.patch.multiple(tiled, ROWS=3, TILE_BYTES=1500):
        assert_every_kernel_agrees(run, expected, leaves, must)


@every_recipe
@pytest.mark.parametrize(
    ("heads", "groups", "queries", "keys"),
    [(4, 1, 7, 7), (4, 2, 3, 8), (3, 3, 7, 8), (2, 2, 1, 1), (2, 1, 1, 8), (2, 2, 2, 3)],
)
def test_grouped_heads_and_fewer_queries_than_keys(
    recipe: Recipe, heads: int, groups: int, queries: int, keys: int
) -> None:
    """Queries are the last ones; values have another size."""
    q, k, v = tensors((2, heads, queries, 4), (2, groups, keys, 4), (2, groups, keys, 6))
    _assert_agree(recipe, q, k, v)


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r.method != "ReRoPE"])
@pytest.mark.parametrize(("queries", "keys"), [(1, 5), (5, 1), (7, 4), (4, 7)])
def test_bidirectional_over_any_lengths(recipe: Recipe, queries: int, keys: int) -> None:
    q, k, v = tensors((2, 2, queries, 4), (2, 2, keys, 4), (2, 2, keys, 4))
    _assert_agree(recipe, q, k, v, (*SERVING, "fused"), causal=False)


@every_recipe
def test_padding_anywhere(recipe: Recipe) -> None:
    q, k, v = tensors((3, 2, 7, 4), (3, 1, 7, 4), (3, 1, 7, 4))
    padding = torch.zeros(3, 7, dtype=torch.bool)
    padding[0, :3], padding[1, 5:], padding[2, ::2] = True, True, True
    _assert_agree(recipe, q, k, v, key_padding=padding)
    if recipe.method != "ReRoPE":
        _assert_agree(recipe, q, k, v, key_padding=padding, causal=False)


STATISTICS = [
    *(Recipe(variant, "", "none") for variant in ("QKBatchNorm", "QInstanceNorm", "KBatchNorm")),
    *(Recipe(variant, "logn", "half") for variant in ("QBatchNorm", "QKInstanceNorm")),
    Recipe("QKInstanceNorm", "", "interleaved", rotate_first=True),
    Recipe("QKBatchNorm", "logn", "half", rotate_first=True),
]


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("recipe", STATISTICS, ids=[recipe.text for recipe in STATISTICS])
def test_statistics_leave_out_the_padding_of_both(recipe: Recipe, padded: bool) -> None:
    """As in cross attention, where the two differ."""
    q, k, v = tensors(*[(3, 2, 6, 4)] * 3)
    at = torch.arange(6)[None]
    keys, queries = at < torch.tensor([[2], [0], [4]]), at >= torch.tensor([[6], [3], [5]])
    options = {"key_padding": keys, "query_padding": queries if padded else None}
    _assert_agree(recipe, q, k, v, ("reference", "auto"), causal=False, **options)


BIAS = 3 * tensors((2, 2, 7, 7), seed=3)[0].detach()
SEEN = BIAS > -0.8
MASKS = {
    "boolean": SEEN,
    "boolean, shared by heads": SEEN[:, :1],
    "boolean, of keys only": SEEN[:, :1, 3:4],
    "added": BIAS,
    "added, of queries only": BIAS[..., :1],
    "added, hiding some": BIAS.masked_fill(~SEEN, -torch.inf),
    "added, hiding every key of a row": BIAS.index_fill(2, torch.tensor([2, 5]), -torch.inf),
}


@every_recipe
@pytest.mark.parametrize("name", MASKS)
def test_masks(recipe: Recipe, name: str) -> None:
    mask, (q, k, v) = MASKS[name], tensors(*[(2, 2, 7, 4)] * 3)
    _assert_agree(recipe, q, k, v, attn_mask=mask)
    padding = torch.arange(7)[None] < torch.tensor([[1], [3]])
    _assert_agree(recipe, q, k, v, attn_mask=mask, key_padding=padding)


@every_recipe
def test_explicit_positions(recipe: Recipe) -> None:
    q, k, v = tensors((2, 2, 5, 4), (2, 2, 6, 4), (2, 2, 6, 4))
    rows = torch.tensor([[0, 1, 5, 9, 30], [3, 2, 1, 0, 4]])
    columns = torch.tensor([5, 0, 1, 2, 9, 3])
    padding = torch.arange(6)[None] < torch.tensor([[2], [0]])
    given: list[dict[str, Tensor]] = [
        {"q_positions": rows, "k_positions": columns},
        {"q_positions": rows[0], "k_positions": columns},
        {"q_positions": rows},
        {"k_positions": torch.stack((columns, columns.flip(0)))},
        {"q_positions": rows, "k_positions": columns, "key_padding": padding},
    ]
    for options in given:
        _assert_agree(recipe, q, k, v, **options)


@every_recipe
@pytest.mark.parametrize(
    ("dtype", "off"), [(torch.float32, (3e-6, 3e-5)), (torch.bfloat16, (0.02, 0.06))]
)
def test_precision(recipe: Recipe, dtype: torch.dtype, off: tuple[float, float]) -> None:
    """Of outputs and of gradients."""
    low = tensors((1, 2, 40, 16), (1, 1, 40, 16), (1, 1, 40, 16), dtype=dtype)
    wide = [x.detach().double().requires_grad_() for x in low]
    exact = partial(attention, *wide, recipe.text)(backend="reference")
    exact_grads = torch.autograd.grad(exact.sin().sum(), wide)
    for backend in ("auto", "chunked", "reference"):
        out = partial(attention, *low, recipe.text)(backend=backend)
        assert out.dtype == dtype
        assert (out.double() - exact).norm() <= off[0] * exact.norm()
        grads = torch.autograd.grad(out.double().sin().sum(), low)
        for mine, hand in zip(grads, exact_grads, strict=True):
            assert mine.dtype == dtype
            assert (mine.double() - hand).norm() <= off[1] * hand.norm(), backend


def test_a_mask_that_learns_gets_its_gradient() -> None:
    q, k, v = tensors((1, 2, 5, 4), (1, 2, 5, 4), (1, 2, 5, 4))
    (mask,) = tensors((2, 5, 5), seed=5)
    out = attention(q, k, v, PLAIN.text, attn_mask=mask)
    expected = oracle.attend(PLAIN, q, k, v, mask=mask)
    grads = (torch.autograd.grad(x.square().sum(), mask) for x in (out, expected))
    torch.testing.assert_close(*grads)
    with pytest.raises(InputError, match="learned mask"):
        attention(q, k, v, PLAIN.text, attn_mask=mask, backend="chunked")


COUNTING = (
    *("Baseline-logn@4", "CosA-NoPE-logn@4", "Baseline-SSMax(bias=true)@4", "Baseline-SqrtLogN@4"),
    *("Baseline-Temperature(beta=0.7,length=2,shift=1)@4", "QKRMSNorm-logn-RotateFirst@4"),
    "Baseline-YaRN(factor=2)-logn+@2",
)


@pytest.mark.parametrize("name", COUNTING)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_keys_that_a_mask_hides_do_not_count(name: str, backend: str) -> None:
    """Causality means the same as a mask of any type and as an argument."""
    score = Score(name, 2, 4).double()
    q, k, v = tensors((2, 2, 7, 4), (2, 2, 7, 4), (2, 2, 7, 4))
    triangle = torch.ones(7, 7, dtype=torch.bool).tril()
    causal = attention(q, k, v, score, backend=backend)
    added = torch.zeros(7, 7, dtype=torch.float64).masked_fill(~triangle, -torch.inf)
    lowest = added.clamp(min=torch.finfo(torch.float32).min).float()
    for mask in (triangle, triangle.expand(2, 2, 7, 7), added, lowest):
        as_mask = attention(q, k, v, score, causal=False, attn_mask=mask, backend=backend)
        torch.testing.assert_close(as_mask, causal, rtol=1e-9, atol=1e-11)


# A number that comes back, falling ones, padding inside a document, and before and after it, and
# padding of another number.
NUMBERS = [
    *([0, 0, 1, 1, 1, 0, 0, 0, 0], [3, 3, 1, 1, 2, 2, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1, 1, 1]),
    *([0, 0, 0, 1, 1, 1, 0, 0, 0], [0, 0, 7, 7, 0, 0, 1, 1, 1]),
]
PADDED = [[], [], [2, 3], [0, 2, 4, 8], [2, 3]]
PACKED = [
    Recipe("Baseline", packed=True),
    Recipe("KNA", "logn", train_length=4, packed=True),
    Recipe("Baseline", "", "none", bias="ALiBi", packed=True),
    Recipe("Baseline", method="ReRoPE", window=2, packed=True),
]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("recipe", PACKED, ids=[recipe.text for recipe in PACKED])
def test_each_document_reads_as_if_alone(recipe: Recipe, causal: bool) -> None:
    if not causal and recipe.needs_causal:
        pytest.skip("two regimes are causal")
    q, k, v = (x.detach() for x in tensors((5, 2, 9, 8), (5, 1, 9, 8), (5, 1, 9, 8)))
    documents, padding = torch.tensor(NUMBERS), torch.zeros(5, 9, dtype=torch.bool)
    for row, places in enumerate(PADDED):
        padding[row, places] = True
    for given in (padding, None):
        expected = oracle.attend(recipe, q, k, v, causal=causal, padding=given, documents=documents)
        real = ~(torch.zeros_like(padding) if given is None else given)[:, None, :, None]
        for backend in ("auto", "chunked", "reference"):
            how: Any = {"key_padding": given, "documents": documents, "backend": backend}
            out = attention(q, k, v, recipe.text, causal, **how)
            torch.testing.assert_close(out * real, expected * real)


def test_positions_that_begin_anew_are_documents_by_name_only() -> None:
    """Without them they are refused; padding, any order and equal neighbours are no restart."""
    at = torch.tensor([0, 1, 2, 0, 1, 2])
    q, k, v = (x.detach() for x in tensors((1, 2, 6, 8), (1, 1, 6, 8), (1, 1, 6, 8)))
    read = partial(attention, q, k, v, q_positions=at, k_positions=at)
    with pytest.raises(InputError, match="Packed"):
        read("KNA")
    packed = read("KNA-Packed", documents=torch.tensor([[0, 0, 0, 1, 1, 1]]))
    halves = [(q[:, :, x], k[:, :, x], v[:, :, x]) for x in (slice(0, 3), slice(3, 6))]
    expected = torch.cat([attention(a, b, c, "KNA", backend="reference") for a, b, c in halves], 2)
    torch.testing.assert_close(packed, expected, rtol=1e-9, atol=1e-9)
    left = read("KNA", key_padding=torch.arange(6)[None] < 3)
    torch.testing.assert_close(left[:, :, 3:], expected[:, :, 3:], rtol=1e-9, atol=1e-9)
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    turned = partial(attention, *(x[:, :, order] for x in (q, k, v)), "KNA")
    mixed = turned(q_positions=order, k_positions=order)
    whole = attention(q, k, v, "KNA")[:, :, order]
    torch.testing.assert_close(mixed, whole, rtol=1e-9, atol=1e-9)
    attention(q, k, v, "KNA", k_positions=torch.tensor([0, 1, 1, 1, 2, 3]))


def test_both_give_the_documents_of_a_row() -> None:
    expected = torch.tensor([[0, 0, 0, 1, 2, 2]])
    assert torch.equal(documents_from_positions(torch.tensor([[0, 1, 2, 0, 0, 1]])), expected)
    assert torch.equal(documents_from_lengths(torch.tensor([0, 3, 4, 6])), expected)
    rows = torch.tensor([[0, 1, 2, 3], [5, 6, 0, 1]])
    assert documents_from_positions(rows).tolist() == [[0, 0, 0, 0], [0, 0, 1, 1]]


class Same(nn.Module):
    """A parametrisation that changes nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("name", "module", "parameter"),
    [("QKRMSNorm(gain=true)", "query_norm", "weight"), ("QKNorm2020", "", "scale")],
)
def test_a_parametrised_parameter_counts(name: str, module: str, parameter: str) -> None:
    score = Score(ScoreSpec.parse(name, train_length=64), 2, 8).double()
    owner = score.get_submodule(module)
    getattr(owner, parameter).data.mul_(3)
    q, k, v = torch.randn(3, 1, 2, 6, 8, dtype=torch.float64)
    before = attention(q, k, v, score)
    parametrize.register_parametrization(owner, parameter, Same())
    torch.testing.assert_close(attention(q, k, v, score), before)
    attention(q, k, v, score).sum().backward()  # type: ignore[no-untyped-call]
    assert all(each.grad is not None for each in owner.parameters())


@pytest.mark.parametrize(
    "name", ["Baseline-ReRoPE(window=4)", "Baseline-SelfExtend(group=2,window=4)", "Baseline-ALiBi"]
)
def test_an_empty_batch_gives_an_empty_result(name: str) -> None:
    q, k, v = torch.zeros(3, 0, 2, 5, 8)
    assert attention(q, k, v, name).shape == (0, 2, 5, 8)
    padding = torch.zeros(0, 5) > 0
    assert attention(q, k, v, name, key_padding=padding).shape == (0, 2, 5, 8)


WITHOUT_QUERIES = [
    Recipe("KNA", "logn", train_length=4),
    Recipe("Baseline", method="DynamicNTK"),
    Recipe("Baseline", method="ReRoPE", window=2),
    Recipe("Baseline", method="StreamingLLM"),
    Recipe("QKRMSNorm", "", "none", bias="KERPLELog", sink=True, cap=2.0),
]


@pytest.mark.parametrize("recipe", WITHOUT_QUERIES, ids=[r.text for r in WITHOUT_QUERIES])
@pytest.mark.parametrize("keys", [0, 7])
def test_no_query_is_an_empty_result_by_every_kernel(recipe: Recipe, keys: int) -> None:
    q, k, v = tensors((2, 2, 0, 4), (2, 1, keys, 4), (2, 1, keys, 4))
    score, served = built(recipe, 2, 4, 1), set()
    for backend in BACKENDS:
        try:
            out = attention(q, k, v, score, backend=backend)
        except InputError as refusal:
            if "kernel cannot serve this" not in str(refusal):
                raise
            continue
        served.add(backend)
        assert out.shape == (2, 2, 0, 4)
        assert not torch.autograd.grad(out.sum(), k)[0].any()
    assert {"auto", "chunked", "reference"} <= served


@pytest.mark.parametrize("backend", ["auto", "chunked", "strips", "reference"])
@pytest.mark.parametrize("first", [-20, -5, 1 << 40])
def test_a_bias_does_not_depend_on_the_first_position(backend: str, first: int) -> None:
    """Also where the first position is below 0, or so far that no table could reach it."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 9, 8)
    at = torch.arange(9) + first
    moved = attention(q, k, v, "KNA-ALiBi", q_positions=at, k_positions=at, backend=backend)
    torch.testing.assert_close(moved, attention(q, k, v, "KNA-ALiBi", backend="reference"))


def test_blocks_far_apart_are_computed_without_those_between() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 4, 8, dtype=torch.float64)
    far = torch.tensor([0, 1, 1 << 40, (1 << 40) + 1])
    out = attention(q, k, v, "KNA-DynamicNTK@8", q_positions=far, k_positions=far)
    first = attention(q[:, :, :2], k[:, :, :2], v[:, :, :2], "KNA")
    torch.testing.assert_close(out[:, :, :2], first)
    assert out.isfinite().all()


@pytest.mark.parametrize(
    "name",
    [
        *("Baseline-HoPE(base=77)@16", "Baseline-XPos(scale=77)", "Baseline-NTKMixed(factor=7.7)"),
        *("Baseline-ClippedRoPE(clip=2)", "Baseline-LongRoPE(factor=7.7)@16", "Baseline-DroPE"),
        *("Baseline-YaRN(factor=7.7)@16", "Baseline-ALiBi"),
    ],
)
def test_the_default_device_does_not_matter(name: str) -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 8)
    with torch.device("meta"):
        out = attention(q, k, v, name)
    torch.testing.assert_close(out, attention(q, k, v, name, backend="reference"))


@pytest.mark.parametrize("score", ["Baseline", "KNA-ALiBi", "QKLayerNorm-ReRoPE(window=3)"])
def test_recomputed_blocks_use_the_kernels_of_the_forward_pass(score: str) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 11, "dim": 16, "layers": 2, "heads": 2, "score": score}
    model = CausalLM(CausalLMConfig(**sizes, train_length=8)).double()
    ids = torch.randint(0, 11, (2, 8))
    gradients = []
    for on in (False, True):
        set_activation_checkpointing(model, on)
        for backend in ("auto", "reference"):
            model.zero_grad()
            with observing(Collector(layer_names(model))):
                loss = model(ids, backend=backend).square().mean()
            loss.backward()
            gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for other in gradients[1:]:
        torch.testing.assert_close(gradients[0], other, rtol=1e-8, atol=1e-10)


def test_a_cache_takes_a_key_for_each_query_and_values_of_one_size() -> None:
    score = Score(ScoreSpec.parse("Baseline-ALiBi"), 2, 8)
    cache, x = KeyValueCache(), torch.randn(1, 2, 3, 8)
    with torch.no_grad():
        attention(x, x, x, score, cache=cache)
        with pytest.raises(InputError, match="2 queries and 3 keys"):
            attention(x[:, :, :2], x, x, score, cache=cache)
        with pytest.raises(InputError, match="2 heads of size 8"):
            attention(x, x, x[..., :4], score, cache=cache)
        assert cache.length == 3
        attention(x, x, x, score, cache=cache)
    assert cache.length == 6
