"""BLEU and chrF from summed counts: sacrebleu's own numbers, sum by sum."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from normattn.lab.stats.metrics import bleu, chrf

metrics = pytest.importorskip("sacrebleu.metrics", reason="needs sacrebleu")

WORDS = "der die ein Hund Katze läuft sitzt auf dem grünen Gras , . und".split()  # noqa: SIM905
SENTENCE = st.lists(st.sampled_from(WORDS), min_size=0, max_size=9).map(" ".join)


def corpus(count: int, seed: int) -> tuple[list[str], list[str]]:
    """References, and translations with some words exchanged or left out."""
    generator = random.Random(seed)
    references, translations = [], []
    for _ in range(count):
        words = generator.choices(WORDS, k=generator.randint(1, 12))
        references.append(" ".join(words))
        kept = [generator.choice(WORDS) if generator.random() < 0.3 else w for w in words]
        translations.append(" ".join(w for w in kept if generator.random() < 0.9))
    return translations, references


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(SENTENCE, SENTENCE.filter(bool)), min_size=1, max_size=5))
def test_any_corpus_has_sacrebleus_scores(pairs: list[tuple[str, str]]) -> None:
    translations, references = map(list, zip(*pairs, strict=True))
    for metric, ours in ((metrics.BLEU(), bleu), (metrics.CHRF(), chrf)):
        counts = np.array(metric._extract_corpus_statistics(translations, [references]), float)
        expected = metric.corpus_score(translations, [references]).score
        assert float(ours(counts.sum(0))) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_many_sums_at_once_as_one_by_one() -> None:
    translations, references = corpus(40, 1)
    for metric, ours in ((metrics.BLEU(), bleu), (metrics.CHRF(), chrf)):
        counts = np.array(metric._extract_corpus_statistics(translations, [references]), float)
        weights = np.random.default_rng(0).multinomial(40, np.full(40, 1 / 40), size=7)
        together = ours(weights @ counts)
        for row, weight in enumerate(weights):  # the resample written out
            drawn = np.repeat(np.arange(40), weight)
            score = metric.corpus_score(
                [translations[i] for i in drawn], [[references[i] for i in drawn]]
            ).score
            assert together[row] == pytest.approx(score, rel=1e-12)
