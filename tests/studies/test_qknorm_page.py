"""The QK-Norm study's page from made-up sums: every column, every verdict, what fails on it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
import pytest

from normattn.lab.report.output import page_json, page_markdown
from normattn.lab.report.page import context
from normattn.lab.report.view import View
from normattn.lab.stats import Bootstrap, Identity, identified, joined, sums
from normattn.lab.stats.metrics import bleu
from normattn.lab.studies.qknorm import STUDY, at, base_of, failures

SENTENCES = 30
DRAWN = Bootstrap(resamples=200)
UNIGRAM = 5.5


def identity(experiment: str, score: str, seed: int, rate: float = 1.0) -> Identity:
    """Whose measurement it is, as the cells say it."""
    return Identity(
        study="qknorm",
        row=score,
        score=f"{score}@64",
        seed=seed,
        protocol=experiment,
        length=0,
        train_length=0,
        data=experiment,
        settings="beam 4; BLEU|nrefs:1" if experiment == "translation" else "",
        factors={"experiment": experiment, "rate": float(rate), "learning_rate": 1e-3 * rate},
    )


def texts(seed: int, gain: float, count: int = SENTENCES) -> dict[str, Any]:
    """Counts of made-up translations that are a little better by `gain`, sentence by sentence."""
    generator = np.random.default_rng([seed, 7])
    tokens = generator.integers(5, 20, count)
    shares = np.clip(
        generator.uniform(0.3, 0.7, count) + gain * generator.uniform(0, 2, count), 0, 1
    )
    matches = [np.floor(np.maximum(tokens - n, 0) * shares**n) for n in (1, 2, 3, 4)]
    grams = [np.maximum(tokens - n + 1, 0) for n in (1, 2, 3, 4)]
    characters = np.stack([np.stack([g, g, m]) for g, m in zip(grams, matches, strict=True)])
    return {
        "tokens": tokens,
        "bleu": np.stack([tokens, tokens, *matches, *grams], axis=-1).astype(float),
        "chrf": np.concatenate([characters, characters[:2]]).reshape(18, count).T.astype(float),
        "loss": tokens * (3 - 2 * shares),
        "correct": matches[0],
    }


def translated(score: str, seed: int, gain: float = 0.0, count: int = SENTENCES) -> pl.DataFrame:
    """A row of the table with one seed."""
    made, units = texts(seed, gain, count), [str(n) for n in range(count)]
    ones = np.ones(count)
    return identified(
        identity("translation", score, seed),
        [
            sums("loss", units, made["loss"], made["tokens"]),
            sums("accuracy", units, made["correct"], made["tokens"]),
            sums("bleu", units, made["bleu"], ones, axis="count", edges=range(10)),
            sums("chrf", units, made["chrf"], ones, axis="count", edges=range(18)),
        ],
    )


def swept(
    score: str, rate: float, nats: float | None, seed: int = 0, steps: int = 2
) -> pl.DataFrame:
    """A training of the sweep: its final loss, or None for one in NaN; what it recorded."""
    who = identity("rates", score, seed, rate)
    trained = replace(who, protocol="training")
    parts = [ended(trained)] if nats is None else []
    if nats is not None:
        tokens, units = texts(seed, 0.0)["tokens"], [str(n) for n in range(SENTENCES)]
        parts.append(
            identified(
                who,
                [
                    sums("loss", units, nats * tokens, tokens),
                    sums("unigram_loss", units, UNIGRAM * tokens, tokens),
                ],
            )
        )
    for step, largest in ((10, 15.0), (20, 12.0))[:steps]:
        at: dict[str, Any] = {"axis": "step", "edges": [float(step)]}
        parts.append(
            identified(
                trained,
                [
                    sums("largest_logit", [""], [[largest * rate + seed]], [[1.0]], **at),
                ],
            )
        )
    return joined(parts)


def ended(trained: Identity, step: int = 41, where: str = "blocks.0") -> pl.DataFrame:
    """A training in NaN."""
    row = sums("diverged", [where], [[1.0]], [[1.0]], axis="step", edges=[float(step)])
    return identified(replace(trained, protocol="training", data="", settings=""), [row])


def tables(parts: Iterable[pl.DataFrame]) -> dict[str, dict[str, dict[str, Any]]]:
    """The numbers of the page: table, row, column."""
    made = json.loads(page_json(context(STUDY.page, joined(parts), bootstrap=DRAWN)))
    return {key: {row["row"]: row for row in rows} for key, rows in made["tables"].items()}


def verdicts(parts: Sequence[pl.DataFrame]) -> dict[str, str]:
    """The verdict of every claim."""
    made = context(STUDY.page, joined(parts), bootstrap=DRAWN)
    return {found.claim.sentence: found.verdict for found in made.findings}


def test_a_difference_is_paired_over_sentences_and_seeds() -> None:
    parts = [
        *(translated("QKRMSNorm", seed, 0.1) for seed in (0, 1, 2)),
        *(translated("Baseline", seed) for seed in (1, 2, 3)),
    ]
    rows = tables(parts)["table"]
    assert list(rows) == ["Baseline", "QKRMSNorm"]
    found = rows["QKRMSNorm"]["change_bleu"]
    assert found["seeds"] == [1, 2]  # those that both have
    ours, base = (
        [float(bleu(texts(seed, gain)["bleu"].sum(0))) for seed in (1, 2)] for gain in (0.1, 0.0)
    )
    assert found["value"] == pytest.approx(np.mean(ours) - np.mean(base), abs=1e-8)
    assert 0 < found["low"] < found["value"] < found["high"]
    assert rows["Baseline"]["change_bleu"] is None
    own = texts(0, 0.1)["tokens"].sum()
    assert rows["QKRMSNorm"]["loss"]["count"] == own
    seeds = [texts(seed, 0.1) for seed in (0, 1, 2)]
    losses, correct = (
        np.mean([text[name].sum() / text["tokens"].sum() for text in seeds])
        for name in ("loss", "correct")
    )
    assert rows["QKRMSNorm"]["loss"]["value"] == pytest.approx(losses, abs=1e-8)
    assert rows["QKRMSNorm"]["accuracy"]["value"] == pytest.approx(100 * correct, abs=1e-8)
    assert rows["QKRMSNorm"]["seeds"] == "0 1 2"


def test_what_the_sweep_says() -> None:
    parts = [
        *(swept("Baseline", rate, nats) for rate, nats in ((1, 3.0), (4, 5.45), (16, None))),
        *(swept("KNA", rate, nats) for rate, nats in ((1, 3.0), (4, 2.0), (16, 2.5))),
        swept("KNA", 4, None, seed=1, steps=1),
    ]
    view = View(joined(parts), DRAWN)
    # 5.45 is hardly better than the unigrams' 5.5.
    assert failures(view, at("rates", "Baseline", 4.0)) == {0: True}
    untested = swept("QNA", 4, 2.0).filter(protocol="training")
    assert failures(View(untested, DRAWN), at("rates", "QNA", 4.0)) == {}
    assert failures(view, at("rates", "KNA", 4.0)) == {0: False, 1: True}
    assert failures(view, at("rates", "Baseline", 16.0)) == {0: True}
    found = tables(parts)
    rates = found["rates"]
    assert list(rates) == [
        *("Baseline ×1", "Baseline ×4", "Baseline ×16", "KNA ×1", "KNA ×4", "KNA ×16")
    ]
    assert rates["Baseline ×16"]["loss"] is None
    assert [rates[f"Baseline ×{rate}"]["failed"] for rate in (1, 4, 16)] == [
        *("0 of 1", "1 of 1", "1 of 1")
    ]
    assert rates["KNA ×4"]["failed"] == "1 of 2"
    assert rates["KNA ×4"]["seeds"] == "0"
    assert rates["KNA ×4"]["loss"]["value"] == pytest.approx(2.0)
    assert rates["KNA ×4"]["change_loss"]["value"] == pytest.approx(-3.45)
    assert rates["KNA ×16"]["learning_rate"] == "0.016"
    assert rates["KNA ×4"]["largest_logit"]["value"] == 61.0  # of seed 1


def test_failing_less_is_an_exact_test_of_three_seeds() -> None:
    sentence = "fewer trainings fail with KNA than with Baseline in the learning-rate sweep"

    def of(seeds: Sequence[int], base: float | None, ours: float | None) -> str:
        parts = [
            swept(score, rate, nats, seed)
            for score, nats in (("Baseline", base), ("KNA", ours))
            for rate in (1.0, 4.0)
            for seed in seeds
        ]
        return verdicts(parts)[sentence]

    assert of((0, 1, 2), None, 3.0) == "confirmed"
    assert of((0, 1, 2), 3.0, None) == "contradicted"
    assert of((0, 1, 2), 3.0, 3.0) == "not confirmed"
    assert of((0, 1), None, 3.0) == "inconclusive"


def test_clipping_beside_normalising() -> None:
    """Does QK-Clip do what normalising does? By its failures, and by its loss."""
    normed, clipped = "QKRMSNorm", "Baseline+QK-Clip"

    def of(base: float | None, ours: float | None, gain: float) -> list[str]:
        made = [
            swept(row, 8.0, nats, seed)
            for seed in (0, 1, 2)
            for row, nats in (("Baseline", base), (clipped, ours), (normed, 3.0 + seed / 100))
        ]
        made += [
            translated(row, seed, own)
            for row, own in ((clipped, gain), (normed, 0.1))
            for seed in (0, 1, 2)
        ]
        found = verdicts([*made, *(swept("Baseline", 1.0, 3.0, seed) for seed in (0, 1, 2))])
        return [
            found.get(sentence, "")
            for sentence in (
                f"fewer trainings fail with {clipped} than with Baseline "
                "in the learning-rate sweep",
                f"{clipped} tolerates as high a learning rate as {normed} "
                "(at least no worse: the difference is not below 0)",
                f"{clipped} at ×8 of the learning rate ends at as good a loss as {normed} "
                "(at least no worse: the difference is not above 0)",
                f"{clipped} ends at as good a loss as {normed} "
                "(at least no worse: the difference is not above 0)",
            )
        ]

    assert of(5.45, 2.0, 0.2) == ["not confirmed", "not confirmed", "confirmed", "confirmed"]
    assert of(5.45, None, 0.0) == ["not confirmed", "not confirmed", "", "contradicted"]


def test_a_row_is_compared_with_baseline_by_its_own_optimiser() -> None:
    assert [base_of(row) for row in ("KNA", "Baseline+QK-Clip", "Baseline")] == ["Baseline"] * 3
    rows = ("QKRMSNorm+Muon", "Baseline+Muon+QK-Clip", "Baseline+Muon")
    assert [base_of(row) for row in rows] == ["Baseline+Muon"] * 3
    made = [swept(row, rate, 3.0, seed) for row in rows for rate in (1.0, 4.0) for seed in (0, 1)]
    made += [translated(rows[1], 0).with_columns(pl.lit(30.0).alias("factor.qk_clip"))]
    text = page_markdown(context(STUDY.page, joined(made), bootstrap=DRAWN))
    assert "QKRMSNorm+Muon at ×4 of the learning rate has a lower loss than Baseline+Muon" in text
    assert text.count("one of the row's own, which may differ from that of other rows") == 2
    assert text.count("passed τ = 30 are") == 2
