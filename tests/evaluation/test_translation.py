"""Translating a test set: order, counts, references scored token by token in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.helpers import multi_layout
from normattn.lab.data.pairs import PairData, PairsConfig, prepare_pairs
from normattn.lab.evaluation.translation import (
    corpus_counts,
    score_references,
    translate,
    unigram_loss,
)
from normattn.lab.stats.metrics import bleu, chrf
from normattn.models.config import TranslatorConfig
from normattn.models.translator import Translator


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PairData:
    place = tmp_path_factory.mktemp("pairs")
    config = PairsConfig(corpus=str(multi_layout(place / "corpus")), vocab_size=270)
    return prepare_pairs(config, place / "cache")


@pytest.fixture(scope="module")
def model() -> Translator:
    torch.manual_seed(0)
    config = TranslatorConfig(
        source_vocab=270, dim=16, layers=1, heads=2, train_length=64, dropout=0.1
    )
    return Translator(config)


def test_references_are_scored_one_by_one_in_float64(data: PairData, model: Translator) -> None:
    loss, correct, tokens = score_references(model, data.test, tokens_per_batch=300)
    assert model.training
    wide = Translator(model.config).double()
    wide.load_state_dict(model.state_dict())
    wide.eval()
    for index in range(len(data.test)):
        source = torch.tensor([data.test.source_ids(index)])
        target = torch.tensor([data.test.target_ids(index)])
        logits = wide(source, target[:, :-1])[0].detach()
        logs = torch.log_softmax(logits, -1)
        wanted = target[0, 1:]
        assert tokens[index] == len(wanted)
        assert correct[index] == int((logits.argmax(-1) == wanted).sum())
        expected = -float(logs[torch.arange(len(wanted)), wanted].sum())
        assert loss[index] == pytest.approx(expected, rel=1e-5)
    again = score_references(model, data.test, tokens_per_batch=1)
    assert again[1].tolist() == correct.tolist()
    assert again[0] == pytest.approx(loss, rel=1e-5)


def test_translations_keep_the_order_of_the_set(data: PairData, model: Translator) -> None:
    told: list[tuple[int, int]] = []
    split, tokeniser = data.test.first(4), data.tokeniser
    found = translate(
        model, split, tokeniser, beam=2, batch=3, progress=lambda *done: told.append(done)
    )
    assert told == [(3, 4), (4, 4)]
    assert found == translate(model, split, tokeniser, beam=2, batch=1)
    assert len(found) == len(split)


def test_the_unigram_model_guesses_by_frequency(data: PairData) -> None:
    tokens = [*np.asarray(data.train.target.values).tolist(), *[2] * len(data.train)]
    vocab_size = data.tokeniser.vocab_size
    expected = [
        -sum(
            math.log((tokens.count(each) + 1) / (len(tokens) + vocab_size))
            for each in (*data.test.target[index].tolist(), 2)
        )
        for index in range(len(data.test))
    ]
    found = unigram_loss(data.train, data.test, vocab_size)
    assert found.tolist() == pytest.approx(expected, rel=1e-12)
    few = unigram_loss(data.train, data.test.first(2), vocab_size)
    assert few.tolist() == found.tolist()[:2]


WORDS = "der die ein Hund Katze läuft sitzt auf dem grünen Gras , . und".split()  # noqa: SIM905
SENTENCE = st.lists(st.sampled_from(WORDS), min_size=0, max_size=9).map(" ".join)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(SENTENCE, SENTENCE.filter(bool)), min_size=1, max_size=6))
def test_any_corpus_and_its_resamples_have_sacrebleus_scores(pairs: list[tuple[str, str]]) -> None:
    metrics = pytest.importorskip("sacrebleu.metrics", reason="needs sacrebleu")
    count, (translations, references) = len(pairs), zip(*pairs, strict=True)
    drawn = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=2)
    weights = np.vstack([np.ones(count, int), drawn])
    counted = corpus_counts(translations, references)
    assert counted["bleu"].signature.startswith("BLEU|nrefs:1|case:mixed")
    for name, metric, ours in (("bleu", metrics.BLEU(), bleu), ("chrf", metrics.CHRF(), chrf)):
        for found, weight in zip(ours(weights @ counted[name].counts), weights, strict=True):
            chosen = np.repeat(np.arange(count), weight)  # the resample written out
            theirs = metric.corpus_score(
                [translations[i] for i in chosen], [[references[i] for i in chosen]]
            )
            assert found == pytest.approx(theirs.score, rel=1e-12, abs=1e-12)
