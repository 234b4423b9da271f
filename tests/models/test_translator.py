"""The encoder–decoder: cache, rows, loss, what it refuses; and by the formulas of a paper."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from normattn.errors import InputError
from normattn.layers.residual import DeepNorm, ReZero
from normattn.models.config import TranslatorConfig
from normattn.models.translator import Translator
from normattn.score import Score

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
    shared, xavier = (18**4 * 6) ** (1 / 16), (2 / (64 + 64)) ** 0.5
    for stack, alpha in ((model.encoder, 0.81 * shared), (model.decoder, 18**0.25)):
        found = {module.alpha for module in stack.modules() if isinstance(module, DeepNorm)}
        assert sorted(found) == pytest.approx([alpha])
    for name, first, beta in (
        ("decoder.3.cross.sublayer.kv.weight", 64, 72**-0.25),
        ("encoder.3.mixer.sublayer.qkv.weight", 128, 0.87 / shared),
    ):
        value = model.get_parameter(name)[first:].detach()
        assert float(value.std()) == pytest.approx(beta * xavier, rel=0.05)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"score": "QKBatchNorm"}, "name another decoder_score"),
        ({"score": "QInstanceNorm", "decoder_score": "KNA"}, "name another cross_score"),
        ({"cross_score": "KNA-NoPEEvery(every=2)", "shared_layers": True}, "from layer to layer"),
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


# QKNorm as its paper has it (arXiv 2010.04245), in every attention of an encoder–decoder:
# softmax(g · Q̂ K̂ᵀ) V, rows of Q̂ and K̂ of length 1 head by head, g one learned number for each
# attention layer, which starts at log₂(l² − l) with l the 97.5th-percentile length.
PAPER: dict[str, Any] = {"kv_heads": None, "norm": "layer", "feed_forward": "gelu"}


def scales(made: Translator) -> list[Tensor]:
    """g of every attention."""
    found = [each.scale for each in made.modules() if isinstance(each, Score)]
    return [scale for scale in found if scale is not None]


def heads(x: Tensor) -> Tensor:
    return torch.stack(x.chunk(4, -1), 1)


def paper(q: Tensor, k: Tensor, v: Tensor, g: Tensor, hidden: Tensor) -> Tensor:
    """The paper's attention, `hidden` (B, T, S) True where a query must not look."""
    q, k = (x / x.pow(2).sum(-1, keepdim=True).sqrt() for x in (heads(q), heads(k)))
    score = (g * (q @ k.transpose(-1, -2))).masked_fill(hidden[:, None], -math.inf)
    return torch.cat((score.softmax(-1) @ heads(v)).unbind(1), -1)


def norm(layer: Any, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], layer.gain, layer.bias, layer.eps)


def feed(place: Any, x: Tensor) -> Any:
    layer, y = place.sublayer, norm(place.norm, x)
    return x + F.gelu(y @ layer.up.weight.T) @ layer.down.weight.T


def itself(place: Any, x: Tensor, hidden: Tensor) -> Any:
    layer = place.sublayer
    q, k, v = (norm(place.norm, x) @ layer.qkv.weight.T).chunk(3, -1)
    return x + paper(q, k, v, layer.score.scale, hidden) @ layer.out.weight.T


def across(place: Any, x: Tensor, source: Tensor, hidden: Tensor) -> Any:
    layer = place.sublayer
    k, v = (source @ layer.kv.weight.T).chunk(2, -1)
    q = norm(place.norm, x) @ layer.q.weight.T
    return x + paper(q, k, v, layer.score.scale, hidden) @ layer.out.weight.T


def by_hand(made: Any, source: Tensor, target: Tensor) -> Any:
    """Logits of the whole PreLN encoder–decoder from its weights, with plain matmuls."""
    embedding = made.source_embedding.weight
    padded = (source == PAD)[:, None]
    x = embedding[source]
    for block in made.encoder:
        x = feed(block.feed_forward, itself(block.mixer, x, padded))
    read = norm(made.encoder_norm, x)
    future = torch.ones(2 * target.shape[1:], dtype=torch.bool).triu(1)[None]
    y = embedding[target]
    for block in made.decoder:
        y = itself(block.mixer, y, future)
        y = feed(block.feed_forward, across(block.cross, y, read, padded))
    return norm(made.decoder_norm, y) @ embedding.T


def test_an_encoder_decoder_is_the_papers() -> None:
    made = _model(score="QKNorm2020-NoPE", **PAPER)
    assert len(scales(made)) == 2 + 3 + 3
    with torch.no_grad():  # Apart, so that none can stand for another.
        for number, scale in enumerate(scales(made)):
            scale.add_(0.7 * number - 2)
    source, target = _sentences([5, 3, 2]), _sentences([4, 2, 3], 1, begin=True)
    ours, hand = made(source, target), by_hand(made, source, target)
    torch.testing.assert_close(ours, hand, rtol=0, atol=1e-10)
    loss = made.loss(source, target).loss
    expected = F.cross_entropy(hand[:, :-1].mT, target[:, 1:], ignore_index=PAD)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
    gradients = (torch.autograd.grad(x, [*made.parameters()]) for x in (loss, expected))
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("score", "length"),
    [("QKNorm2020-NoPE", LENGTH), ("QKNorm2020", LENGTH), ("QKNorm2020(length=29)-NoPE", 29)],
)
def test_every_g_starts_at_the_papers_number(score: str, length: int) -> None:
    found = scales(_model(score=score, **PAPER))
    assert len(found) == 8
    for scale in found:
        assert scale.shape == ()
        assert scale.item() == pytest.approx(math.log2(length**2 - length), rel=1e-6)
