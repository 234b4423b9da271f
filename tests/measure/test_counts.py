"""BLEU, chrF and F1 from summed counts: sacrebleu's own numbers, and some made by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from normattn.lab.stats.metrics import MICRO_F1, bleu, chrf, macro_f1

WORDS = "der die ein Hund Katze läuft sitzt auf dem grünen Gras , . und".split()  # noqa: SIM905
SENTENCE = st.lists(st.sampled_from(WORDS), min_size=0, max_size=9).map(" ".join)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(SENTENCE, SENTENCE.filter(bool)), min_size=1, max_size=6))
def test_any_corpus_and_its_resamples_have_sacrebleus_scores(pairs: list[tuple[str, str]]) -> None:
    metrics = pytest.importorskip("sacrebleu.metrics", reason="needs sacrebleu")
    count, (translations, references) = len(pairs), zip(*pairs, strict=True)
    drawn = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=2)
    weights = np.vstack([np.ones(count, int), drawn])
    for metric, ours in ((metrics.BLEU(), bleu), (metrics.CHRF(), chrf)):
        counts = np.array(metric._extract_corpus_statistics(translations, [references]), float)
        for found, weight in zip(ours(weights @ counts), weights, strict=True):
            chosen = np.repeat(np.arange(count), weight)  # the resample written out
            theirs = metric.corpus_score(
                [translations[i] for i in chosen], [[references[i] for i in chosen]]
            )
            assert found == pytest.approx(theirs.score, rel=1e-12, abs=1e-12)


def test_f1_of_counts_by_hand() -> None:
    above, below = np.array([[6.0, 0, 0]]), np.array([[9.0, 2, 0]])
    assert MICRO_F1.value(above, below, above, below) == pytest.approx(100 * 6 / 11)
    # The third label is nowhere: it does not count.
    assert macro_f1(above, below, above, below) == pytest.approx(100 * (6 / 9 + 0) / 2)
    nothing = np.zeros((1, 3))
    assert macro_f1(nothing, nothing, nothing, nothing) == 0
    # Of this resample the second label was drawn, and the third, which was not, keeps its F1.
    whole_above, whole_below = np.array([[6.0, 0, 2]]), np.array([[8.0, 2, 2]])
    above, below = np.array([[8.0, 0, 0]]), np.array([[8.0, 1, 0]])
    assert macro_f1(above, below, whole_above, whole_below) == pytest.approx(100 * (1 + 0 + 1) / 3)
