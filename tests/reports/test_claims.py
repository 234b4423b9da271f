from __future__ import annotations

import numpy as np
import pytest

from normattn.errors import InputError
from normattn.reports import Bootstrap, Record, claim, paired_difference
from normattn.reports.cells import gather
from normattn.reports.metrics import METRICS, estimate

from .make import make_record


def _pair(gain: int, documents: int = 40, seed: int = 0) -> tuple[Record, Record]:
    """Documents that differ much from one another, and a second model `gain` tokens better."""
    generator = np.random.default_rng(1)
    base = generator.integers(20, 80, documents)
    better = base + gain + generator.integers(-1, 2, documents)
    return (
        make_record([[int(v)] for v in better], variant="KNA", seed=seed, length=100),
        make_record([[int(v)] for v in base], seed=seed, length=100),
    )


def test_pairing_narrows_the_interval() -> None:
    a, b = _pair(3)
    paired = paired_difference([a], [b])
    alone = [estimate(gather([r]), METRICS["non_repeated"], Bootstrap()) for r in (a, b)]
    widths = [e.high - e.low for e in alone if e and e.high is not None and e.low is not None]
    assert paired.low is not None
    assert paired.high is not None
    assert paired.high - paired.low < 0.2 * min(widths)
    assert paired.value == pytest.approx(
        100 * float(np.mean(np.array(a.correct) - np.array(b.correct))) / 100
    )


def test_a_difference_beyond_its_interval_is_claimed() -> None:
    found = claim(_pair(3), "KNA", "Baseline")
    assert found.found
    gap = found.difference
    assert found.sentence == (
        f"KNA above Baseline on non-repeated text by {gap.value:.1f} points "
        f"[{gap.low:.1f}, {gap.high:.1f}]."
    )


def test_a_difference_within_its_interval_is_not_claimed() -> None:
    found = claim(_pair(0), "KNA", "Baseline")
    assert not found.found
    assert "KNA above Baseline on non-repeated text was not found: difference" in found.sentence
    assert "is above" not in found.sentence


def test_the_opposite_is_said() -> None:
    found = claim(_pair(3), "Baseline", "KNA")
    assert not found.found
    assert found.sentence.endswith("; KNA is above Baseline.")


def test_one_document_claims_nothing() -> None:
    found = claim(_pair(30, documents=1), "KNA", "Baseline")
    assert not found.found
    assert found.difference.low is None
    assert "one document" in found.sentence


def test_only_shared_seeds_are_paired() -> None:
    pairs = [_pair(3, seed=seed) for seed in (0, 1, 2)]
    base = [pairs[0][1], pairs[1][1]]
    assert paired_difference([a for a, _ in pairs], base).seeds == 2
    assert paired_difference([pairs[2][0]], [_pair(0, seed=2)[1]]).seeds == 1
    with pytest.raises(InputError, match="share no seed"):
        paired_difference([pairs[2][0]], base)


def test_cells_of_other_sets_are_not_compared() -> None:
    with pytest.raises(InputError, match="different non_repeated sets"):
        paired_difference([_pair(1)[0]], [_pair(1, documents=9)[1]])
    with pytest.raises(InputError, match="different protocols"):
        paired_difference([_pair(1)[0]], [make_record([[1]], protocol="train_length", length=8)])


def test_unknown_names_are_refused() -> None:
    with pytest.raises(InputError, match="no row is named 'KNB'; there are: Baseline, KNA"):
        claim(_pair(1), "KNB", "Baseline")
    with pytest.raises(InputError, match="unknown metric 'speed'"):
        claim(_pair(1), "KNA", "Baseline", "speed")
    with pytest.raises(InputError, match="KNA was not evaluated on repeated text"):
        claim(_pair(1), "KNA", "Baseline", "repeated")
