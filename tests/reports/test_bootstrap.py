from __future__ import annotations

import numpy as np
import pytest

from normattn.errors import InputError
from normattn.reports.bootstrap import Bootstrap, _weights, ratio


def _sums(seeds: int, documents: int, bins: int = 1) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(3)
    tokens = generator.integers(5, 40, (1, documents, bins)).repeat(seeds, axis=0).astype(float)
    return np.floor(tokens * generator.uniform(0.1, 0.9, (seeds, documents, 1))), tokens


@pytest.mark.parametrize(("seeds", "documents", "bins"), [(1, 7, 1), (3, 5, 2), (2, 1, 3)])
def test_every_resample_is_the_ratio_of_the_drawn_copies(
    seeds: int, documents: int, bins: int
) -> None:
    correct, tokens = _sums(seeds, documents, bins)
    bootstrap = Bootstrap(resamples=50, seed=11)
    samples = bootstrap.samples(correct, tokens)
    by_document = _weights(50, 11, 1, documents).astype(int)
    by_seed = _weights(50, 11, 2, seeds).astype(int)
    for r in range(50):  # the copies written out, one by one
        drawn_documents = np.repeat(np.arange(documents), by_document[r])
        drawn_seeds = np.repeat(np.arange(seeds), by_seed[r])
        assert len(drawn_documents) == documents
        assert len(drawn_seeds) == seeds
        above = sum(correct[s, d] for s in drawn_seeds for d in drawn_documents)
        below = sum(tokens[s, d] for s in drawn_seeds for d in drawn_documents)
        np.testing.assert_allclose(samples[r], above / below, rtol=1e-13)


def test_a_ratio_of_resampled_sums_is_the_sample_of_that_ratio() -> None:
    correct, tokens = _sums(3, 8, 2)
    bootstrap = Bootstrap(resamples=30, seed=5)
    above, below = bootstrap.sums(correct), bootstrap.sums(tokens)
    assert above.shape == (30, 2)
    np.testing.assert_array_equal(above / below, bootstrap.samples(correct, tokens))
    # Copies drawn in all: every seed and document is drawn as often as there are, on average.
    assert bootstrap.sums(np.ones((3, 8, 1))).tolist() == [[24.0]] * 30


def test_the_spread_is_the_analytic_one_for_equal_documents() -> None:
    # With equal token counts the ratio is a mean, whose bootstrap variance is s²(n)/n exactly.
    generator = np.random.default_rng(0)
    values = generator.normal(50, 5, (1, 200, 1))
    samples = Bootstrap(resamples=20000).samples(values, np.full_like(values, 100.0))
    expected = values.std() / 100 / np.sqrt(200)
    assert samples.std() == pytest.approx(expected, rel=0.03)
    low, high = Bootstrap(resamples=20000).interval(samples)
    assert (high - low)[0] == pytest.approx(2 * 1.96 * expected, rel=0.04)


def test_about_95_percent_of_intervals_hold_the_truth() -> None:
    generator = np.random.default_rng(5)
    bootstrap, held, trials = Bootstrap(resamples=400), 0, 300
    for _ in range(trials):
        chance = generator.beta(40, 60, (1, 60, 1))
        tokens = np.full((1, 60, 1), 50.0)
        correct = generator.binomial(50, chance).astype(float)
        low, high = bootstrap.interval(bootstrap.samples(correct, tokens))
        held += bool(low[0] <= 0.4 <= high[0])
    assert 0.90 <= held / trials <= 0.985


def test_seeds_that_differ_widen_the_interval() -> None:
    correct, tokens = _sums(1, 30)
    one = Bootstrap().interval(Bootstrap().samples(correct, tokens))
    three = np.concatenate((correct * 0.5, correct, correct * 1.1))
    several = Bootstrap().samples(three, tokens.repeat(3, axis=0))
    wide = Bootstrap().interval(several)
    assert wide[1][0] - wide[0][0] > 1.5 * (one[1][0] - one[0][0])


def test_bins_without_tokens_give_nan_and_leave_the_others_alone() -> None:
    correct, tokens = _sums(1, 6, 2)
    correct[..., 1] = tokens[..., 1] = 0
    assert np.isnan(ratio(correct, tokens)[1])
    low, high = Bootstrap().interval(Bootstrap().samples(correct, tokens))
    assert np.isnan(low[1])
    assert np.isnan(high[1])
    assert low[0] < ratio(correct, tokens)[0] < high[0]


def test_draws_depend_on_the_seed_alone() -> None:
    sums = _sums(2, 9)
    first = Bootstrap(seed=1).samples(*sums)
    _weights.cache_clear()
    np.testing.assert_array_equal(first, Bootstrap(seed=1).samples(*sums))
    assert not np.array_equal(first, Bootstrap(seed=2).samples(*sums))


@pytest.mark.parametrize("bad", [{"resamples": 0}, {"level": 1.0}, {"level": 0.0}])
def test_senseless_settings_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(InputError):
        Bootstrap(**bad)  # type: ignore[arg-type]
