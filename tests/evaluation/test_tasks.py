"""A classifier's F1 by hand and by scikit-learn; translations against float64 and sacrebleu."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import binary_cross_entropy_with_logits

from data.helpers import multi_layout
from normattn.lab.data.pairs import PairData, PairsConfig, prepare_pairs
from normattn.lab.data.relations import RelationData, RelationSplit
from normattn.lab.data.sources import SPLITS
from normattn.lab.data.tokeniser import WordPieces
from normattn.lab.evaluation.classification import (
    Predictions,
    document_sums,
    evaluate_classifier,
    predict,
    tune_threshold,
)
from normattn.lab.evaluation.translation import (
    corpus_counts,
    score_references,
    translate,
    unigram_loss,
)
from normattn.lab.stats import Identity, estimate, select_sums, with_identity
from normattn.lab.stats.metrics import MACRO_F1, MICRO_F1, Metric, bleu, chrf
from normattn.models.classifier import Classifier
from normattn.models.config import ClassifierConfig, TranslatorConfig
from normattn.models.translator import Translator

PIECES = WordPieces({"[PAD]": 0, "[UNK]": 1, **{f"w{n}": n for n in range(2, 10)}}, True)


def made(probabilities: list[list[float]], true: list[list[int]]) -> Predictions:
    loss = np.zeros(len(true), dtype=np.float32)
    return Predictions(np.array(probabilities, dtype=np.float32), np.array(true) > 0, loss)


def data(documents: int = 12, labels: int = 3) -> RelationData:
    """Documents of token 1 + label, of many lengths, in every split alike."""
    train, validation, test = (
        RelationSplit(
            name,
            [[1 + i % labels] * (1 + i % 5) for i in range(documents)],
            [[i % labels] for i in range(documents)],
            [f"{name}:{i}" for i in range(documents)],
            0,
        )
        for name in SPLITS
    )
    names = tuple("abcdefgh"[:labels])
    return RelationData(train, validation, test, names, 0, 10, PIECES, "0" * 64)


def who(row: str = "RMSNorm", seed: int = 1) -> Identity:
    return Identity("rmsnorm", row, row, seed, "classification", 0, 0)


def value(statistic: Metric, found: Predictions, threshold: float) -> float:
    names = [f"d{n}" for n in range(len(found.true))]
    counts = with_identity(who(), document_sums(found, threshold, names))
    sums = select_sums(counts, statistic.name)
    assert sums is not None
    return estimate(sums, statistic).value


def known(measured: pl.DataFrame, name: str) -> float:
    row = measured.filter(pl.col("statistic") == name, pl.col("protocol") == "training")
    assert row["of"].to_list() == [1.0]
    return float(row["sum"].item())


def classifier(labels: int = 3) -> Classifier:
    torch.manual_seed(0)
    config = ClassifierConfig(
        dim=8, layers=1, heads=1, train_length=8, vocab_size=10, labels=labels, dropout=0.5
    )
    return Classifier(config)


def test_f1_of_counts_by_hand() -> None:
    above, below = np.array([[6.0, 0, 0]]), np.array([[9.0, 2, 0]])
    assert MICRO_F1.value(above, below, above, below) == pytest.approx(100 * 6 / 11)
    # The third label is nowhere: it does not count.
    assert MACRO_F1.value(above, below, above, below) == pytest.approx(100 * (6 / 9 + 0) / 2)
    nothing = np.zeros((1, 3))
    assert MACRO_F1.value(nothing, nothing, nothing, nothing) == 0
    # Of this resample the second label was drawn, and the third, which was not, keeps its F1.
    whole_above, whole_below = np.array([[6.0, 0, 2]]), np.array([[8.0, 2, 2]])
    above, below = np.array([[8.0, 0, 0]]), np.array([[8.0, 1, 0]])
    found = MACRO_F1.value(above, below, whole_above, whole_below)
    assert found == pytest.approx(100 * (1 + 0 + 1) / 3)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(2, 6))
def test_summed_counts_give_what_scikit_learn_gives(seed: int, rows: int, labels: int) -> None:
    f1_score = pytest.importorskip("sklearn.metrics").f1_score
    generator = np.random.default_rng(seed)
    found = Predictions(
        generator.random((rows, labels), dtype=np.float32),
        generator.random((rows, labels)) < 0.4,
        np.zeros(rows, dtype=np.float32),
    )
    predicted = found.probabilities >= 0.5
    there = (predicted | found.true).any(0)
    if there.any():
        f1 = partial(f1_score, found.true, predicted, zero_division=0)
        micro, by_label = f1(average="micro"), f1(average=None)
        assert value(MICRO_F1, found, 0.5) == pytest.approx(100 * micro)
        assert value(MACRO_F1, found, 0.5) == pytest.approx(100 * by_label[there].mean())


def test_the_threshold_is_the_best_and_of_equal_ones_the_nearest_to_a_half() -> None:
    found = made([[0.305, 0.2], [0.31, 0.1]], [[1, 0], [1, 0]])
    assert tune_threshold(found) == (0.3, 1.0)
    assert tune_threshold(made([[0.9], [0.1]], [[1], [0]])) == (0.5, 1.0)


def test_every_document_is_measured() -> None:
    measured = evaluate_classifier(classifier(), data(), who("LayerNorm", 3))
    counts, losses = select_sums(measured, "f1"), select_sums(measured, "loss")
    assert counts is not None
    assert losses is not None
    assert counts.units == losses.units == tuple(sorted(f"test:{i}" for i in range(12)))
    assert (counts.seeds, counts.data, len(counts.bins)) == ((3,), "0" * 64, 3)
    alone, tokens = classifier().eval(), data().split("test").tokens
    order = [int(name.removeprefix("test:")) for name in counts.units]
    with torch.no_grad():
        logits = torch.cat([alone(torch.tensor([tokens[i]])) for i in order])
    predicted = (logits.sigmoid() >= known(measured, "threshold")).numpy()
    true = np.eye(3)[np.array(order) % 3]
    np.testing.assert_array_equal(counts.numerator[0], 2 * predicted * true)
    np.testing.assert_array_equal(counts.denominator[0], predicted + true)
    loss = binary_cross_entropy_with_logits(logits, torch.from_numpy(true), reduction="none")
    np.testing.assert_allclose(losses.numerator[0, :, 0], loss.mean(-1), rtol=1e-5)
    assert losses.denominator.sum() == 12
    assert known(measured, "parameters") == sum(p.numel() for p in classifier().parameters())
    reached = tune_threshold(predict(classifier(), data().split("validation"), 0))[1]
    assert known(measured, "development_micro_f1") == reached


# Translation.
@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> PairData:
    place = tmp_path_factory.mktemp("pairs")
    config = PairsConfig(corpus=str(multi_layout(place / "corpus")), vocab_size=270)
    return prepare_pairs(config, place / "cache")


@pytest.fixture(scope="module")
def translator() -> Translator:
    torch.manual_seed(0)
    config = TranslatorConfig(
        source_vocab=270, dim=16, layers=1, heads=2, train_length=64, dropout=0.1
    )
    return Translator(config)


def test_references_are_scored_one_by_one(pairs: PairData, translator: Translator) -> None:
    loss, correct, tokens = score_references(translator, pairs.test, tokens_per_batch=300)
    assert translator.training
    wide = Translator(translator.config).double()
    wide.load_state_dict(translator.state_dict())
    wide.eval()
    for index in range(len(pairs.test)):
        source = torch.tensor([pairs.test.source_ids(index)])
        target = torch.tensor([pairs.test.target_ids(index)])
        logits, wanted = wide(source, target[:, :-1])[0].detach(), target[0, 1:]
        assert tokens[index] == len(wanted)
        assert correct[index] == int((logits.argmax(-1) == wanted).sum())
        expected = torch.nn.functional.cross_entropy(logits, wanted, reduction="sum")
        assert loss[index] == pytest.approx(float(expected), rel=1e-5)
    again = score_references(translator, pairs.test, tokens_per_batch=1)
    assert again[1].tolist() == correct.tolist()
    assert again[0] == pytest.approx(loss, rel=1e-5)


def test_translations_keep_the_order_of_the_set(pairs: PairData, translator: Translator) -> None:
    told: list[tuple[int, int]] = []
    split, tokeniser = pairs.test.first(4), pairs.tokeniser
    found = translate(
        translator, split, tokeniser, beam=2, batch=3, progress=lambda *done: told.append(done)
    )
    assert told == [(3, 4), (4, 4)]
    assert found == translate(translator, split, tokeniser, beam=2, batch=1)
    assert len(found) == len(split)


def test_the_unigram_model_guesses_by_frequency(pairs: PairData) -> None:
    tokens = [*np.asarray(pairs.train.target.values).tolist(), *[2] * len(pairs.train)]
    vocab_size = pairs.tokeniser.vocab_size
    expected = [
        -sum(
            math.log((tokens.count(each) + 1) / (len(tokens) + vocab_size))
            for each in (*pairs.test.target[index].tolist(), 2)
        )
        for index in range(len(pairs.test))
    ]
    found = unigram_loss(pairs.train, pairs.test, vocab_size)
    assert found.tolist() == pytest.approx(expected, rel=1e-12)
    few = unigram_loss(pairs.train, pairs.test.first(2), vocab_size)
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
