"""What the pages of studies conclude, from sums made by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import polars as pl
import pytest

from normattn.lab.report.claims import Finding
from normattn.lab.report.figures import Curves
from normattn.lab.report.output import page_json
from normattn.lab.report.page import PageContext, context
from normattn.lab.report.view import View
from normattn.lab.stats import Identity, concat, scalar, sums, with_identity
from normattn.lab.studies import find, qknorm, realformer, rmsnorm
from normattn.lab.studies.base import Study
from normattn.lab.studies.lm_report import precondition
from normattn.lab.studies.realformer import Setting

SEEDS = (0, 1, 2)
DOCUMENTS = tuple(f"d{n:02}" for n in range(30))
TOKENS = np.full(30, 100)


def page(study: Study, parts: Iterable[pl.DataFrame]) -> PageContext:
    return context(study.page, concat(parts))


def tables(made: PageContext) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = json.loads(page_json(made))["tables"]
    return found


def finding(made: PageContext, said: str) -> Finding:
    """The one claim whose sentence or measured difference says so."""
    (found,) = [
        each for each in made.findings if said in f"{each.claim.sentence}: {each.claim.measured}"
    ]
    return found


def ended(training: Identity, step: int) -> pl.DataFrame:
    rows = sums("diverged", ["blocks.0"], [[1.0]], [[1.0]], axis="step", edges=[float(step)])
    return with_identity(replace(training, protocol="training", data="", settings=""), [rows])


# QK-Norm
def trained(experiment: str, score: str, seed: int, rate: float = 1.0) -> Identity:
    return Identity(
        *("qknorm", score, f"{score}@64", seed, experiment, 0, 0),
        data=experiment,
        settings="beam 4; BLEU|nrefs:1" if experiment == "translation" else "",
        factors={"experiment": experiment, "rate": float(rate), "learning_rate": 1e-3 * rate},
    )


def swept(score: str, rate: float, nats: float | None, seed: int = 0) -> pl.DataFrame:
    """A training of the sweep: its final loss, or None for one in NaN; what it recorded."""
    who = trained("rates", score, seed, rate)
    at: dict[str, Any] = {"axis": "step", "edges": [10.0]}
    logit = sums("largest_logit", [""], [[15.0 * rate + seed]], [[1.0]], **at)
    parts = [with_identity(replace(who, protocol="training"), [logit])]
    if nats is None:
        return concat([*parts, ended(who, 41)])
    tokens = np.random.default_rng(seed).integers(5, 20, 30)
    each = {"loss": nats, "unigram_loss": 5.5}
    losses = [sums(name, DOCUMENTS, each[name] * tokens, tokens) for name in each]
    return concat([*parts, with_identity(who, losses)])


def test_what_the_sweep_of_learning_rates_says() -> None:
    parts = [
        *(swept("Baseline", rate, nats) for rate, nats in ((1, 3.0), (4, 5.45), (16, None))),
        *(swept("KNA", rate, nats) for rate, nats in ((1, 3.0), (4, 2.0), (16, 2.5))),
        swept("KNA", 4, None, seed=1),
    ]
    view = View(concat(parts))
    # 5.45 is hardly better than the unigrams' 5.5.
    for row, failed in {
        ("Baseline", 4.0): {0: True},
        ("KNA", 4.0): {0: False, 1: True},
        ("Baseline", 16.0): {0: True},
        ("QNA", 4.0): {},
    }.items():
        assert qknorm.failures(view, qknorm.where_of("rates", *row)) == failed
    rates = {row["row"]: row for row in tables(page(qknorm.STUDY, parts))["rates"]}
    assert [*rates] == [f"{score} ×{rate}" for score in ("Baseline", "KNA") for rate in (1, 4, 16)]
    assert rates["Baseline ×16"]["loss"] is None
    assert rates["KNA ×4"]["failed"] == "1 of 2"
    assert rates["KNA ×4"]["loss"]["value"] == pytest.approx(2.0)
    assert rates["KNA ×4"]["change_loss"]["value"] == pytest.approx(-3.45)
    assert rates["KNA ×4"]["largest_logit"]["value"] == 61.0  # of seed 1


@pytest.mark.parametrize(
    ("seeds", "base", "ours", "verdict"),
    [
        (SEEDS, None, 3.0, "confirmed"),
        (SEEDS, 3.0, None, "contradicted"),
        (SEEDS, 3.0, 3.0, "not confirmed"),
        ((0, 1), None, 3.0, "inconclusive"),
    ],
)
def test_failing_less_is_exact_over_seeds(
    seeds: Sequence[int], base: float | None, ours: float | None, verdict: str
) -> None:
    trainings = product((("Baseline", base), ("KNA", ours)), (1.0, 4.0), seeds)
    parts = [swept(score, rate, nats, seed) for (score, nats), rate, seed in trainings]
    made = page(qknorm.STUDY, parts)
    assert finding(made, "fewer trainings fail with KNA than with Baseline").verdict == verdict


# RealFormer
def encoded(row: str, seed: int, protocol: str, **factors: Any) -> Identity:
    who = Identity("realformer", row, "Baseline@16", seed, protocol, 16, 16, data="d")
    return replace(who, weights=f"{row}{seed}", factors=factors)


def noise(*of: Any) -> np.ndarray:
    """A little, by document: a gain that is the same in every document has no interval."""
    return np.random.default_rng([7, sum(map(ord, repr(of)))]).integers(-5, 6, 30) / 10


def scored(correct: np.ndarray, nats: np.ndarray) -> list[pl.DataFrame]:
    return [
        sums("accuracy", DOCUMENTS, correct, TOKENS),
        sums("loss", DOCUMENTS, nats, TOKENS),
        sums("unigram_loss", DOCUMENTS, np.full(30, 280.0), TOKENS),
    ]


def encoder(row: str, hits: float, seed: int, size: str = "small") -> pl.DataFrame:
    """`hits` and a little noise of each document's 100 tokens are right."""
    correct = hits + noise(row, seed, size)
    known = [scalar("parameters", 800.0 if size == "small" else 1600.0)]
    known.append(scalar("planned_steps", 10.0))
    rows = {"masked": scored(correct, 300.0 - correct), "training": known}
    return concat(with_identity(encoded(row, seed, p, size=size), rows[p]) for p in rows)


def setting(place: Setting, nats: float | None, seed: int = 0) -> pl.DataFrame:
    """A setting of the grid with a loss of `nats` hundredths a token; None: it diverged."""
    _, warmup, rate, dropout = place
    factors = {"size": "small", "warmup": warmup, "learning_rate": rate, "dropout": dropout}
    who = encoded(place.row, seed, "grid", **factors)
    if nats is None:
        return ended(who, 3)
    return with_identity(who, scored(TOKENS / 2, nats + noise(place, seed)))


def test_claims_about_encoders_of_two_sizes() -> None:
    """RealFormer loses 16 points by growing where PostLN loses 10 and PreLN 16."""
    hits = {"PostLN": 40, "RealFormer": 46, "PreLN": 46}
    parts = [encoder(row, hits[row], seed) for row, seed in product(hits, SEEDS)]
    parts += [encoder(row, 30, seed, "wide") for row, seed in product(hits, SEEDS)]
    made = page(realformer.STUDY, parts)
    for measured, verdict in {
        "small: RealFormer − PostLN, accuracy in points": "confirmed",
        "small: RealFormer − PreLN, accuracy in points": "not confirmed",
        "wide: RealFormer − PostLN, accuracy in points": "not confirmed",
        "small: PostLN − PreLN, accuracy in points": "contradicted",
        "wide: PostLN − PreLN, accuracy in points": "confirmed",
        "small → wide: RealFormer's gain − PostLN's, accuracy in points": "contradicted",
        "small → wide: RealFormer's gain − PreLN's, accuracy in points": "not confirmed",
    }.items():
        assert finding(made, measured).verdict == verdict, measured


@pytest.mark.parametrize("row", ["PostLN", "RealFormer"])
@pytest.mark.parametrize(("failing", "sure"), [(6, True), (5, False)])
def test_stability_is_decided_where_one_alone_fails(row: str, failing: int, sure: bool) -> None:
    """Six settings that only one fails are sure at 5 %, five are not: 2 / 2⁶ and 2 / 2⁵."""
    parts = [
        setting(Setting(each, 5, 1e-3 * (n + 1), 0.0), 280 if each == row and n < failing else 90)
        for each in ("PostLN", "RealFormer")
        for n in range(8)
    ]
    (found,) = page(realformer.STUDY, parts).findings
    counts = (0, failing) if row == "PostLN" else (failing, 0)
    assert f"RealFormer {counts[0]} − PostLN {counts[1]} of 8" in found.claim.measured
    assert found.difference.value == counts[0] - counts[1]
    decided = "confirmed" if row == "PostLN" else "contradicted"
    assert found.verdict == (decided if sure else "not confirmed")


def test_the_grid_tells_learned_stuck_and_diverged() -> None:
    cold = Setting("PostLN", 0, 1e-3, 0.0)
    learned, stuck, lost = (Setting("PostLN", 5, rate, 0.0) for rate in (1e-3, 1e-2, 1.0))
    parts = [setting(cold, 240), setting(learned, 260), setting(stuck, 271), setting(lost, None)]
    told = {learned: "learned", stuck: "stuck", lost: "diverged", cold: "learned"}
    for nats, state in ((260.0, "learned"), (280.0, "stuck"), (None, "diverged")):
        # One seed that diverged or learned nothing is a failure, whatever the others came to.
        found = realformer.grid(View(concat([*parts, setting(learned, nats, seed=1)])))
        assert found == {**told, learned: state}
    rows = tables(page(realformer.STUDY, parts))["grid"]
    assert [row["state"] for row in rows] == [*told.values()]
    assert rows[0]["loss"]["value"] == pytest.approx(2.6, abs=0.01)
    assert rows[2]["loss"] is None


# RMSNorm
def normed(row: str, seed: int = 0, protocol: str = "classification", data: str = "d") -> Identity:
    return Identity("rmsnorm", row, row, seed, protocol, 0, 0, data=data)


def test_a_ratio_of_times_is_paired_by_round() -> None:
    drift, own = np.linspace(1, 5, 40), np.random.default_rng(5).normal(0.9, 0.004, 40)
    parts = [
        rmsnorm.timed(normed(row, protocol="step time", data=""), tuple(map(float, seconds)))
        for row, seconds in (("LayerNorm", drift), ("RMSNorm", own * drift))
    ]
    found = finding(page(rmsnorm.STUDY, parts), "median time of a step")
    ratio = np.median(own * drift) / np.median(drift)
    assert found.difference.value == pytest.approx(100 * (ratio - 1))
    # The rounds drift by a factor of five; their ratio does not.
    assert found.difference.half_width == pytest.approx(0, abs=2)
    assert found.verdict == "confirmed"


def curve(row: str, seed: int, early: float) -> pl.DataFrame:
    """Twenty steps of loss 1, the first two of `early`."""
    steps = [
        sums("loss", [""], [[early if step < 3 else 1.0]], [[1.0]], axis="step", edges=[step])
        for step in range(1, 21)
    ]
    return with_identity(normed(row, seed, "training", data=""), [*steps, scalar("steps", 20.0)])


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ((0.1, 0.11, 0.12), "confirmed"),
        ((-0.1, -0.11, -0.12), "contradicted"),
        ((0.1, -0.1, 0.02), "not confirmed"),
        ((0.1, 0.11), "inconclusive"),
    ],
)
def test_the_early_loss_is_paired_over_seeds(differences: tuple[float, ...], verdict: str) -> None:
    parts = [
        curve(row, seed, 2.0 + 0.1 * seed + more)
        for seed, difference in enumerate(differences)
        for row, more in (("LayerNorm", 0.0), ("RMSNorm", difference))
    ]
    found = finding(page(rmsnorm.STUDY, parts), "first 10% of the steps")
    assert found.verdict == verdict
    assert found.difference.value == pytest.approx(1000 * float(np.mean(differences)))
    if verdict == "confirmed":
        # Student's t with two degrees of freedom: 4.3027 · 10/√3.
        assert found.difference.half_width == pytest.approx(4.30265 * 10 / 3**0.5, rel=1e-4)


# The precondition below a table of language models.
L, LONGEST, COUNT = 4, 16, 40
EDGES = [*range(0, LONGEST + 1, 2)]
NAMES = [f"x{n:02}" for n in range(COUNT)]
NOISE = np.random.default_rng(0).normal(0, 0.5, COUNT)


def frame(at_length: Mapping[str, float], copied: float = 0.0) -> pl.DataFrame:
    """Rows of so many points at L; repeated text is `copied` points better than held-out text."""
    parts = []
    for number, (row, points) in enumerate(at_length.items()):
        natural = Identity("keynorm", row, row, 0, "non_repeated", LONGEST, L, data="d")
        repeated = replace(natural, protocol="repeated")
        spread = points + NOISE * (1 + number / 100)
        parts += [
            part(replace(natural, protocol="train_length", length=L), "accuracy", spread, [0, L]),
            part(natural, "accuracy", spread, EDGES),
            part(repeated, "accuracy", spread, EDGES),
            part(repeated, "accuracy_seen", spread + copied, EDGES, 1),
        ]
    return concat(parts)


def part(
    identity: Identity, name: str, points: Any, edges: list[int], unseen: int = 0
) -> pl.DataFrame:
    """A hundred tokens a document and bin, none in the first `unseen` bins."""
    of = np.full((COUNT, len(edges) - 1), 100.0)
    of[:, :unseen] = 0
    right = of * points[:, None] / 100
    return with_identity(identity, [sums(name, NAMES, right, of, axis="p", edges=edges)])


def said(measurements: pl.DataFrame) -> str:
    return "\n".join(precondition(View(measurements)))


@pytest.mark.parametrize(
    ("points", "verdict"),
    [
        ({"Baseline": 30.0, "KNA": 30.4, "CosA": 29.7}, "The precondition is met: "),
        ({"Baseline": 30.0, "KNA": 30.4, "CosA": 33.0}, "The precondition is not met: "),
        ({"Baseline": 30.0, "KNA": 31.0}, "The precondition is undecided: "),
    ],
)
def test_equally_good_at_the_training_length(points: dict[str, float], verdict: str) -> None:
    text = said(frame(points))
    assert verdict in text
    for row, value in list(points.items())[1:]:
        assert f"{row} {value - 30:+.1f} [" in text


def test_copying_is_tokens_within_the_training_length_alone() -> None:
    for points, whom in ((12.0, "every score"), (8.0, "no score")):
        text = said(frame({"Baseline": 30.0, "KNA": 30.4}, copied=points))
        assert f"Copying is learned by {whom}: " in text


def test_copying_by_distance_is_tabulated_and_claimed() -> None:
    """KNA copies over 3 tokens and not over 7; YaRN gives it those."""
    parts = []
    rights = {
        ("KNA", ""): (60, 20),
        ("KNA", "YaRN"): (70, 65),
        ("Baseline", ""): (50, 10),
        ("Baseline", "StreamingLLM"): (20, 20),
    }
    at: Any = {"axis": "distance", "edges": (3, 7)}
    for seed in SEEDS:
        for number, ((row, method), right) in enumerate(rights.items()):
            who = Identity("keynorm", row, row, seed, "repeated", LONGEST, L, method, data="d")
            above = right + NOISE[:, None] * (seed + number) / 5
            of = np.full((COUNT, 2), 100.0)
            parts.append(with_identity(who, [sums("accuracy_by_distance", NAMES, above, of, **at)]))
    made = page(find("keynorm"), parts)
    (table,) = (table for table in made.tables if table.key == "copying")
    assert [column.key for column in table.columns] == ["row", "copied_3", "copied_7"]
    verdicts = {found.claim.measured: found.verdict for found in made.findings}
    assert verdicts == {
        "KNA − Baseline-StreamingLLM, repeated text, distance 3": "confirmed",
        "KNA − Baseline-StreamingLLM, repeated text, distance 7": "confirmed",
        "KNA-YaRN − KNA, repeated text, distance 7": "confirmed",
    }
    (figure,) = (f for f in made.figures if f.name == "accuracy_by_distance")
    assert isinstance(figure, Curves)
    assert figure.panels[0].train_length == L
    assert [point.x for point in figure.panels[0].lines[0].points] == [3, 7]


def test_other_scores_are_tested_for_what_longer_contexts_do_and_controls_are_not() -> None:
    rows = ("Baseline", "KNA", "NGPT", "Baseline-HoPE", "Baseline-ALiBi", "KNA-SlidingWindow")
    parts = []
    for row, length in product(rows, (L, LONGEST)):
        identity = Identity("keynorm", row, row, 0, "last_segment", length, L, data="d")
        parts.append(part(identity, "accuracy", 30 + NOISE, [0, length]))
    claims = find("keynorm").page.claims(View(concat(parts)))
    asked = [claim.sentence.split()[0] for claim in claims if claim.source == "asked here"]
    assert asked == ["Baseline-HoPE", "Baseline-HoPE", "NGPT", "NGPT"]


def test_longer_contexts_raise_the_loss_of_unmodified_models() -> None:
    """At the longest context KNA's loss is 0.1 higher than at L and Baseline's 0.4; with YaRN 0."""
    parts = []
    for row, method, length in product(("Baseline", "KNA"), ("", "YaRN"), (L, LONGEST)):
        who = Identity("keynorm", row, row, 0, "last_segment", length, L, method, data="d")
        rise = {"KNA": 10, "Baseline": 40}[row] if length > L and not method else 0
        parts.append(part(who, "loss", 100 + rise + NOISE, [0, length]))
    view = View(concat(parts))
    claims = find("keynorm").page.claims(view)
    (claim,) = (c for c in claims if c.sentence.startswith("the loss of KNA"))
    estimate = claim.metric and view.estimate(claim.metric)
    assert estimate
    assert estimate.value == pytest.approx(-0.3)
