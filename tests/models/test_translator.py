"""The encoder–decoder: against torch's own Transformer, its cache, its rows, its files, a task."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from normattn.errors import InputError
from normattn.layers.residual import DeepNorm, ReZero
from normattn.models.config import CausalLMConfig, TranslatorConfig
from normattn.models.flops import parameter_count, translator_flops
from normattn.models.transformer import AttentionContext, Blocks
from normattn.models.translator import Translator
from normattn.score import ScoreSpec

VOCABULARY, LENGTH = 19, 8
PAD, BOS, EOS = 0, 1, 2
SCORES: dict[str, dict[str, str]] = {
    "Baseline": {"score": "Baseline"},
    "KNA": {"score": "KNA"},
    "ReRoPE": {"score": "Baseline", "decoder_score": "Baseline-ReRoPE(window=3)"},
    "rotary cross": {"score": "KNA", "cross_score": "KNA-logn"},
    "RealFormer": {"score": "Baseline-RealFormer"},
    "ResidualQK": {"score": "KNA-ResidualQK", "cross_score": "KNA-ResidualQK"},
    "ResidualQKV": {"score": "KNA-ResidualQKV", "cross_score": "KNA-ResidualQKV"},
    "batch": {"score": "QKBatchNorm", "decoder_score": "KNA", "cross_score": "KBatchNorm-NoPE"},
    "instance": {
        "score": "QKInstanceNorm",
        "decoder_score": "KNA-ALiBi",
        "cross_score": "KInstanceNorm-NoPE",
    },
}


def _config(**changes: Any) -> TranslatorConfig:
    values: dict[str, Any] = {"source_vocab": VOCABULARY, "dim": 16, "heads": 4, "kv_heads": 2}
    values |= {"layers": 2, "decoder_layers": 3, "train_length": LENGTH, **changes}
    return TranslatorConfig(**values)


def _model(**changes: Any) -> Translator:
    torch.manual_seed(0)
    model = Translator(_config(**changes)).double()
    for module in model.modules():
        if isinstance(module, ReZero):  # Away from the identity, so that tests see the layers.
            nn.init.constant_(module.alpha, 0.7)
    return model.eval()


def _sentences(lengths: list[int], seed: int = 0, begin: bool = False) -> Tensor:
    """Random words, bos before them if asked for, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(3, VOCABULARY, (len(lengths), max(lengths)), generator=generator)
    rows[torch.arange(max(lengths))[None] >= torch.tensor(lengths)[:, None]] = PAD
    return torch.cat([torch.full((len(lengths), 1), BOS), rows], 1) if begin else rows


MODELS = {name: _model(**scores) for name, scores in SCORES.items()}


@pytest.mark.parametrize("name", sorted(SCORES))
def test_prefill_is_decode_is_forward(name: str) -> None:
    model = MODELS[name]
    source, target = _sentences([6, 3]), _sentences([11, 11], 1, begin=True)
    with torch.no_grad():
        whole = model.decode(target, model.encode(source))
        encoded, cache = model.encode(source), model.new_cache()
        parts = [model.decode(target[:, :5], encoded, cache)]
        parts += [model.decode(target[:, t : t + 1], encoded, cache) for t in range(5, 12)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-10)
    assert cache.length == 12


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(sorted(SCORES)),
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=3),
    more=st.integers(0, 3),
    seed=st.integers(0, 100),
)
def test_rows_are_independent_of_neighbours_padding_and_the_future(
    name: str, lengths: list[tuple[int, int]], more: int, seed: int
) -> None:
    model = MODELS[name]
    source = F.pad(_sentences([n for n, _ in lengths], seed), (0, more), value=PAD)
    target = _sentences([m for _, m in lengths], seed + 1, begin=True)
    with torch.no_grad():
        together = model(source, target)
        for row, (n, m) in enumerate(lengths):
            alone = model(source[row, None, :n], target[row, None, : m + 1])
            torch.testing.assert_close(together[row, None, : m + 1], alone, rtol=0, atol=1e-9)
            first = model(source[row, None, :n], target[row, None, :1])
            torch.testing.assert_close(alone[:, :1], first, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("shared", "tied"), [(True, True), (False, True), (False, False)])
def test_loss_is_that_of_the_logits(shared: bool, tied: bool) -> None:
    other = {} if shared else {"shared_vocabulary": False, "target_vocab": 13}
    model = _model(tie_head=tied, **other)
    source, target = _sentences([6, 3]), _sentences([5, 7], 1, begin=True).clamp(max=12)
    logits, wanted = model(source, target[:, :-1]).transpose(1, 2), target[:, 1:]
    assert logits.shape[1] == (VOCABULARY if shared else 13)
    smoothed = F.cross_entropy(logits, wanted, ignore_index=PAD, label_smoothing=0.1)
    found = model.loss(source, target, label_smoothing=0.1)
    torch.testing.assert_close(found.loss, smoothed, rtol=0, atol=1e-10)
    ours, hand = (torch.autograd.grad(x, [*model.parameters()]) for x in (found.loss, smoothed))
    torch.testing.assert_close(ours, hand, rtol=0, atol=1e-10)
    plain = F.cross_entropy(logits, wanted, ignore_index=PAD, reduction="none").detach()
    real = wanted != PAD
    torch.testing.assert_close(found.nll, plain[real].mean(), rtol=0, atol=1e-10)
    hits = (logits.argmax(1) == wanted) & real
    assert found.correct == hits.sum()
    scores = model.token_scores(source, target)
    torch.testing.assert_close(scores.loss, plain, rtol=0, atol=1e-10)
    assert torch.equal(scores.correct, hits)
    assert (model.head_weight is model.source_embedding.weight) == (shared and tied)


def test_deepnorm_takes_the_papers_encoder_decoder_factors() -> None:
    """18 and 6 blocks, by hand: α = 0.81·(18⁴·6)^(1/16) and (3·6)^¼; β sizes the value weights."""
    config = _config(placement="DeepNorm", layers=18, decoder_layers=6, dim=64, kv_heads=4)
    model = Translator(config)
    alphas = [
        {module.alpha for module in stack.modules() if isinstance(module, DeepNorm)}
        for stack in (model.encoder, model.decoder)
    ]
    expected = [0.81 * (18**4 * 6) ** (1 / 16), 18**0.25]
    assert [sorted(each) for each in alphas] == [[pytest.approx(each)] for each in expected]
    xavier = (2 / (64 + 64)) ** 0.5
    value = model.get_parameter("decoder.3.cross.sublayer.kv.weight")[64:]
    assert float(value.detach().std()) == pytest.approx(72**-0.25 * xavier, rel=0.05)
    value = model.get_parameter("encoder.3.mixer.sublayer.qkv.weight")[128:]
    assert float(value.detach().std()) == pytest.approx(
        0.87 * (18**4 * 6) ** (-1 / 16) * xavier, rel=0.05
    )


@pytest.mark.parametrize(
    "changes",
    [{}, {"shared_vocabulary": False, "target_vocab": 30, "tie_head": False, "kv_heads": 1}],
)
def test_what_it_costs(changes: dict[str, Any]) -> None:
    """Parameters and products of weights are those that torch counts."""
    config = _config(feed_forward="gelu", hidden=40, norm_gain=False, **changes)
    model, s, t = Translator(config), 7, 5
    distinct = {value.data_ptr(): value.numel() for value in model.state_dict().values()}
    assert parameter_count(model) == sum(distinct.values())
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.full((2, s), 3), torch.full((2, t), 3))
    counts, flops = counter.get_flop_counts()["Global"], translator_flops(config, s, t)
    products = (counts.get(op, 0) for op in (torch.ops.aten.mm, torch.ops.aten.addmm))
    assert 2 * flops.weights == sum(products)
    assert flops.attention == 4 * 16 * (2 * s * s + 3 * (t * (t + 1) / 2 + s * t))
    assert flops.training == 3 * flops.forward


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"score": "QKBatchNorm"}, "name another decoder_score"),
        ({"score": "QInstanceNorm", "decoder_score": "KNA"}, "name another cross_score"),
        (
            {"cross_score": "KNA-NoPEEvery(every=2)", "shared_layers": True},
            "differs from layer to layer",
        ),
        ({"cross_score": "Baseline-ReRoPE(window=2)"}, "within one sequence"),
        ({"decoder_score": "Baseline-Packed"}, "packs documents"),
        ({"block": "gau", "heads": 1, "kv_heads": None}, "has no cross attention"),
        ({"target_vocab": 20}, "shared_vocabulary=False"),
        ({"pad_id": 19}, "outside a vocabulary of 19 words"),
        ({"eos_id": 1}, "must differ"),
        ({"encoder_layers": 3}, "no such setting"),
    ],
)
def test_bad_settings(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        _config(**changes)


def test_bad_sentences() -> None:
    model, source, target = MODELS["KNA"], _sentences([4, 2]), _sentences([3, 2], 1, begin=True)
    with pytest.raises(InputError, match="a source has no token"):
        model(torch.zeros_like(source), target)
    with pytest.raises(InputError, match="vocabulary is 0 to 18"):
        model(source + 20, target)
    for backend in ("auto", "reference"):
        with pytest.raises(InputError, match="no target"):
            model.loss(source, torch.full_like(target, PAD), backend=backend)


def test_padding_of_the_queries_counts_in_cross_attention() -> None:
    """Statistics over queries leave out what a context calls padding, by either name."""
    torch.manual_seed(0)
    config = CausalLMConfig(vocab_size=9, dim=16, layers=1, heads=2, train_length=8)
    blocks = Blocks(config, ScoreSpec.parse("QBatchNorm-NoPE")).double()
    x, padding = torch.randn(2, 4, 16).double(), torch.zeros(2, 4, dtype=torch.bool)
    padding[:, 3:] = True
    memories = blocks.remember(torch.randn(2, 5, 16).double(), None, torch.arange(5))
    short = blocks(x[:, :3], AttentionContext(), memories=memories)
    context = AttentionContext(query_padding=padding)
    torch.testing.assert_close(blocks(x, context, memories=memories)[:, :3], short)
