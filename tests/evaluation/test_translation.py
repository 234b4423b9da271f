"""Translating a test set: order, counts, references scored token by token in float64."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from normattn.reports.translation_record import (
    STATISTICS,
    TranslationRecord,
    read_translation,
    write_translation,
)

from data.pairs_helpers import multi_layout
from normattn.data.pairs import PairData, PairsConfig, prepare_pairs
from normattn.errors import InputError
from normattn.evaluation.translation import (
    Search,
    corpus_counts,
    score_references,
    translate,
    unigram_loss,
)
from normattn.models.translator import Translator
from normattn.models.translator_config import TranslatorConfig


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
    found = score_references(model, data.test, tokens_per_batch=300)
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
        assert found.tokens[index] == len(wanted)
        assert found.correct[index] == int((logits.argmax(-1) == wanted).sum())
        expected = -float(logs[torch.arange(len(wanted)), wanted].sum())
        assert found.loss[index] == pytest.approx(expected, rel=1e-5)
    again = score_references(model, data.test, tokens_per_batch=1)
    assert again.correct == found.correct
    assert again.loss == pytest.approx(found.loss, rel=1e-5)


def test_translations_keep_the_order_of_the_set(data: PairData, model: Translator) -> None:
    told: list[tuple[int, int]] = []
    split, tokeniser = data.test.first(4), data.target_tokeniser
    search = Search(beam=2, batch=3)
    found = translate(model, split, tokeniser, search, lambda *done: told.append(done))
    assert told == [(3, 4), (4, 4)]
    assert found == translate(model, split, tokeniser, Search(beam=2, batch=1))
    assert len(found) == len(split)


def test_counts_are_sacrebleus_and_round_trip(tmp_path: Path, data: PairData) -> None:
    pytest.importorskip("sacrebleu", reason="needs sacrebleu")
    references = [target for _, target in data.test.texts]
    translations = [text.replace("Hund", "Katze") for text in references]
    counts = corpus_counts(translations, references)
    assert counts.signatures[0].startswith("BLEU|nrefs:1|case:mixed")
    record = TranslationRecord(
        variant="Baseline",
        spec="Baseline@64",
        seed=0,
        weights="w",
        data="d",
        split="test",
        unigram=5.0,
        beam=4,
        length_penalty=0.6,
        signatures=counts.signatures,
        translations=tuple(translations),
        bleu=counts.bleu,
        chrf=counts.chrf,
        loss=tuple(1.5 for _ in references),
        correct=tuple(1 for _ in references),
        tokens=tuple(2 for _ in references),
    )
    values = {}
    for statistic in STATISTICS:
        sums = record.counts(statistic.field)
        assert sums is not None
        values[statistic.key] = float(statistic.of(sums.sum(0)))
    assert values["bleu"] == pytest.approx(counts.scores[0])
    assert values["chrf"] == pytest.approx(counts.scores[1])
    assert values["loss"] == 0.75
    assert values["accuracy"] == 50.0
    write_translation(tmp_path / "record.json", record)
    assert read_translation(tmp_path / "record.json") == record
    (tmp_path / "record.json").write_text('{"format": 1}')
    with pytest.raises(InputError, match=r"record\.json is no record of translations"):
        read_translation(tmp_path / "record.json")


def test_the_unigram_model_guesses_by_frequency(data: PairData) -> None:
    tokens = [*data.train.target.tokens.tolist(), *[2] * len(data.train)]
    asked = [*data.test.target.tokens.tolist(), *[2] * len(data.test)]
    vocab_size = data.target_tokeniser.vocab_size
    chances = [(tokens.count(each) + 1) / (len(tokens) + vocab_size) for each in asked]
    expected = -sum(map(math.log, chances)) / len(asked)
    found = unigram_loss(data.train, data.test, vocab_size)
    assert found == pytest.approx(expected, rel=1e-12)


def test_as_many_translations_as_references() -> None:
    with pytest.raises(InputError, match="2 translations of 1 sentences"):
        corpus_counts(["a", "b"], ["a"])
