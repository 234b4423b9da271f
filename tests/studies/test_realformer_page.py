"""The RealFormer study's page from a small frame, against sums made by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import polars as pl
import pytest

from normattn.lab.report.claims import Finding
from normattn.lab.report.page import PageContext, context
from normattn.lab.report.tables import Filled
from normattn.lab.report.view import View
from normattn.lab.stats import Bootstrap, Identity, fact, identified, joined, sums
from normattn.lab.studies.realformer import STUDY, Setting, grid
from normattn.lab.studies.realformer_runs import by_layer

DOCUMENTS = tuple(f"d{n:02}" for n in range(30))
TOKENS, WINDOWS = np.full(30, 100), np.full(30, 2)
LAYERS = 4
FEW = Bootstrap(resamples=300)
SEEDS = (0, 1, 2)


def who(row: str, seed: int, protocol: str, **factors: Any) -> Identity:
    return Identity(
        study="realformer",
        row=row,
        score="Baseline@16",
        seed=seed,
        protocol=protocol,
        length=16,
        train_length=16,
        data="d",
        weights=f"{row}{seed}",
        factors=factors,
    )


def noise(*of: int) -> np.ndarray:
    """A little, by document."""
    return np.random.default_rng([7, *of]).integers(-5, 6, len(DOCUMENTS))


def encoder(
    row: str,
    hits: float,
    seed: int = 0,
    size: str = "small",
    parameters: int = 800,
) -> pl.DataFrame:
    """A row of the table: `hits` and a little noise of each document's 100 tokens are right.

    Exits miss 20, 13, 7 and 0 tokens more; the stream's variance of layer n is n/2, entropy falls
    by 0.1 a layer, and layer n's gradient is n, all but for a little noise.
    """
    # Of each size its own: a gain that is the same in every document has no interval.
    correct = hits + noise(seed, hash_of(row if size == "small" else f"{row}, {size}")) / 10
    layers = np.arange(1, LAYERS + 1)
    small = noise(seed, 1)[:, None] / 1000 * layers
    exits = correct[:, None] - np.array([20, 13, 7, 0])
    stream = np.pad(layers + small, ((0, 0), (1, 0)))
    batches = [f"batch {n:04}" for n in range(3)]
    norms = layers + small[:3]
    facts = {"parameters": parameters, "planned_steps": 10}
    return joined(
        [
            identified(who(row, seed, "masked", size=size), scored(correct, 300.0 - correct)),
            identified(
                who(row, seed, "depth", size=size),
                [
                    *by_layer("exit_accuracy", DOCUMENTS, exits, TOKENS),
                    *by_layer("variance", DOCUMENTS, stream, WINDOWS, first=0),
                    *by_layer("entropy", DOCUMENTS, 2 * (2 - layers / 10) + small, WINDOWS),
                    *by_layer("agreement", DOCUMENTS, 1 + small[:, 1:], WINDOWS, first=2),
                    *by_layer("agreement_mean", DOCUMENTS, 1 + small[:, 1:], WINDOWS, first=2),
                    *by_layer("gradients_start", batches, norms, np.ones(3)),
                ],
            ),
            identified(
                who(row, seed, "training", size=size),
                [fact(name, float(value)) for name, value in facts.items()],
            ),
        ]
    )


def hash_of(row: str) -> int:
    """A number of a name that is the same in every process."""
    return sum(map(ord, row))


def scored(correct: np.ndarray, nats: np.ndarray) -> list[pl.DataFrame]:
    return [
        sums("accuracy", DOCUMENTS, correct, TOKENS),
        sums("loss", DOCUMENTS, nats, TOKENS),
        sums("unigram_loss", DOCUMENTS, np.full(30, 280.0), TOKENS),
    ]


def setting(place: Setting, nats: float | None, seed: int = 0) -> pl.DataFrame:
    """A setting of the grid with a loss of `nats` hundredths a token; None: it diverged."""
    _, warmup, rate, dropout = place
    factors = {"size": "small", "warmup": warmup, "learning_rate": rate, "dropout": dropout}
    if nats is None:
        rows = sums("diverged", ["blocks.0"], [[1.0]], [[1.0]], axis="step", edges=[3.0])
        return identified(who(place.row, seed, "training", **factors), [rows])
    loss = nats + noise(seed, hash_of(repr(place))) / 10
    return identified(who(place.row, seed, "grid", **factors), scored(TOKENS / 2, loss))


def page(parts: Iterable[pl.DataFrame]) -> PageContext:
    return context(STUDY.page, joined(parts), bootstrap=FEW)


def column(table: Filled, key: str) -> list[Any]:
    """The estimates of a column, or its texts."""
    place = [each.key for each in table.columns].index(key)
    cells = [line[place] for line in table.cells]
    return [cell.text if cell.estimate is None else cell.estimate for cell in cells]


def tables(made: PageContext) -> dict[str, Filled]:
    return {table.key: table for table in made.tables}


def decided(made: PageContext) -> dict[tuple[str, str], Finding]:
    return {(each.claim.sentence, each.claim.measured): each for each in made.findings}


def test_rows_pool_their_seeds_and_statistics_are_ratios_of_sums() -> None:
    parts = [encoder("PostLN", 40, 0), encoder("PostLN", 50, 1), encoder("PreLN", 30, 1)]
    right = {
        (row, seed): float(part.filter(protocol="masked", statistic="accuracy")["sum"].sum())
        for (row, seed), part in zip((("A", 0), ("A", 1), ("B", 1)), parts, strict=True)
    }
    made = tables(page(parts))
    pre, post = column(made["table"], "accuracy")
    assert [row.label for row in made["table"].rows] == ["PreLN", "PostLN"]
    assert post.value == pytest.approx(100 * (right["A", 0] + right["A", 1]) / (2 * 3000))
    assert post.low < post.value < post.high
    assert (post.units, post.count, post.seeds, pre.seeds) == (30, 3000, (0, 1), (1,))
    gap, itself = column(made["table"], "gain")
    assert gap.value == pytest.approx((right["B", 1] - right["A", 1]) / 30)
    assert (gap.seeds, itself) == ((1,), "–")
    assert column(made["table"], "seeds") == ["1", "0, 1"]
    assert [each.value for each in column(made["table"], "planned_steps")] == [10, 10]
    assert "30 documents, 3,000 hidden tokens" in made["table"].notes[0]
    assert "unigram baseline has a loss of 2.800" in made["table"].notes[0]


def test_a_claim_counts_only_beyond_its_interval() -> None:
    rows = {"PostLN": 40, "RealFormer": 46, "PreLN": 46, "ReZero": 52}
    parts = [encoder(row, hits, seed) for row, hits in rows.items() for seed in SEEDS]
    parts += [
        encoder(row, 30, seed, "wide", parameters=1600)
        for row in ("PostLN", "RealFormer", "PreLN")
        for seed in SEEDS
    ]
    made = page(parts)
    found = decided(made)

    def verdicts(sentence: str) -> dict[str, str]:
        return {m: each.verdict for (s, m), each in found.items() if s.startswith(sentence)}

    assert verdicts("RealFormer is better than PostLN and PreLN") == {
        "small: RealFormer − PostLN, accuracy in points": "confirmed",
        "small: RealFormer − PreLN, accuracy in points": "not confirmed",
        "wide: RealFormer − PostLN, accuracy in points": "not confirmed",
        "wide: RealFormer − PreLN, accuracy in points": "not confirmed",
    }
    assert verdicts("PostLN is at least as good as PreLN") == {
        "small: PostLN − PreLN, accuracy in points": "contradicted",
        "wide: PostLN − PreLN, accuracy in points": "confirmed",
    }
    assert verdicts("RealFormer is better than ReZero") == {
        "small: RealFormer − ReZero, accuracy in points": "contradicted"
    }
    # RealFormer loses 16 points by growing where PostLN loses 10 and PreLN 16.
    assert verdicts("a larger model pays off") == {
        "small → wide: RealFormer's gain − PostLN's, accuracy in points": "contradicted",
        "small → wide: RealFormer's gain − PreLN's, accuracy in points": "not confirmed",
    }
    (variance,) = (
        each for (_, m), each in found.items() if m == "small: PreLN, variance, last − first layer"
    )
    assert variance.difference.value == pytest.approx((4 - 1) / 2, abs=0.01)
    assert variance.verdict == "confirmed"


@pytest.mark.parametrize(("failing", "verdict"), [(6, "confirmed"), (5, "not confirmed")])
def test_stability_is_decided_by_settings_that_one_alone_fails(failing: int, verdict: str) -> None:
    """Six settings that only PostLN fails are sure at 5 %, five are not: 2 / 2⁶ and 2 / 2⁵."""
    for bad, other in (("PostLN", "RealFormer"), ("RealFormer", "PostLN")):
        parts = [
            setting(Setting(row, 5, 1e-3 * (n + 1), 0.0), 280 if row == bad and n < failing else 90)
            for row in (bad, other)
            for n in range(8)
        ]
        (found,) = page(parts).findings
        counts = (0, failing) if bad == "PostLN" else (failing, 0)
        assert found.claim.sentence == "RealFormer stabilises training"
        assert f"RealFormer {counts[0]} − PostLN {counts[1]} of 8" in found.claim.measured
        assert found.difference.value == counts[0] - counts[1]
        expected = "contradicted" if bad == "RealFormer" and verdict == "confirmed" else verdict
        assert found.verdict == expected


def states(parts: Iterable[pl.DataFrame]) -> Mapping[Setting, str]:
    return grid(View(joined(parts), FEW))


def test_the_grid_tells_learned_stuck_and_diverged() -> None:
    cold = Setting("PostLN", 0, 1e-3, 0.0)
    learned, stuck, lost = (Setting("PostLN", 5, rate, 0.0) for rate in (1e-3, 1e-2, 1.0))
    parts = [setting(cold, 240), setting(learned, 260), setting(stuck, 271), setting(lost, None)]
    assert states(parts) == {
        learned: "learned",
        stuck: "stuck",
        lost: "diverged",
        cold: "learned",
    }
    assert list(states(parts)) == [learned, stuck, lost, cold]
    # One seed that diverged is a failure, whatever the others came to.
    assert states([*parts, setting(learned, None, seed=1)])[learned] == "diverged"
    # Nor is one that learned nothing hidden by the mean.
    assert states([*parts, setting(learned, 280, seed=1)])[learned] == "stuck"
    made = page(parts)
    filled = tables(made)
    assert column(filled["grid"], "state") == ["learned", "stuck", "diverged", "learned"]
    losses = column(filled["grid"], "loss")
    assert losses[0].value == pytest.approx(2.6, abs=0.01)
    assert losses[2] == "–"
    assert made.notes == (
        "PostLN, dropout 0.0, learning rate 1.0, size small, warmup 5, seed 0: diverged at step 3; "
        "the first value that is not finite came from blocks.0.",
    )


def test_rows_without_a_common_seed_are_not_compared() -> None:
    made = page([encoder("PostLN", 40), encoder("RealFormer", 46, 1)])
    assert not [each for each in made.findings if "RealFormer − PostLN" in each.claim.measured]
    assert "gain" not in [each.key for each in tables(made)["table"].columns]
