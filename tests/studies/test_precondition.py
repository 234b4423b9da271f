"""The precondition below a table, from small frames whose accuracies are known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl
import pytest

from normattn.lab.report.figures import Curves
from normattn.lab.report.page import context
from normattn.lab.report.view import View
from normattn.lab.stats import Bootstrap, Identity, concat, scalar, sums, with_identity
from normattn.lab.studies import find
from normattn.lab.studies.lm_report import precondition

L, LONGEST, DOCUMENTS = 4, 16, 40
EDGES = [*range(0, LONGEST + 1, 2)]
NOISE = np.random.default_rng(0).normal(0, 0.5, DOCUMENTS)


def frame(at_length: Mapping[str, float], copied: float = 0.0, steps: int = 900) -> pl.DataFrame:
    """Rows of so many points at L; repeated text is `copied` points better than held-out text."""
    parts = []
    for number, (row, points) in enumerate(at_length.items()):

        def identity(protocol: str, length: int, row: str = row) -> Identity:
            return Identity("keynorm", row, row, 0, protocol, length, L, data="d")

        spread = points + NOISE * (1 + number / 100)
        parts += [
            measured(identity("train_length", L), "accuracy", spread, [0, L]),
            measured(identity("non_repeated", LONGEST), "accuracy", spread, EDGES),
            measured(identity("repeated", LONGEST), "accuracy", spread, EDGES),
            measured(identity("repeated", LONGEST), "accuracy_seen", spread + copied, EDGES, 1),
            with_identity(identity("training", 0), [scalar("steps", steps)]),
        ]
    return concat(parts)


def measured(
    identity: Identity, statistic: str, points: Any, edges: list[int], unseen: int = 0
) -> pl.DataFrame:
    """A hundred tokens a document and bin, none in the first `unseen` bins."""
    of = np.full((DOCUMENTS, len(edges) - 1), 100.0)
    of[:, :unseen] = 0
    names = [f"x{n:02}" for n in range(DOCUMENTS)]
    return with_identity(
        identity, [sums(statistic, names, of * points[:, None] / 100, of, axis="p", edges=edges)]
    )


def said(measurements: pl.DataFrame) -> str:
    return "\n".join(precondition(view(measurements)))


def view(measurements: pl.DataFrame) -> View:
    return View(measurements, Bootstrap(resamples=200))


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


def test_nothing_is_said_of_models_that_were_trained_for_a_few_steps() -> None:
    points = {"Baseline": 30.0, "KNA": 30.4}
    assert said(frame(points))
    assert not said(frame(points, steps=30))


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
    for seed in (0, 1, 2):
        for number, ((row, method), right) in enumerate(rights.items()):
            spread = NOISE[:, None] * (seed + number) / 5
            who = Identity("keynorm", row, row, seed, "repeated", LONGEST, L, method, data="d")
            above = np.array(right) + spread
            names = [f"x{n:02}" for n in range(DOCUMENTS)]
            at: Any = {"axis": "distance", "edges": (3, 7)}
            of = np.full((DOCUMENTS, 2), 100.0)
            parts.append(with_identity(who, [sums("accuracy_by_distance", names, above, of, **at)]))
    made = context(find("keynorm").page, concat(parts), bootstrap=Bootstrap(resamples=200))
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
    parts = []
    for row in ("Baseline", "KNA", "NGPT", "Baseline-HoPE", "Baseline-ALiBi", "KNA-SlidingWindow"):
        for length in (L, LONGEST):
            identity = Identity("keynorm", row, row, 0, "last_segment", length, L, data="d")
            parts.append(measured(identity, "accuracy", 30 + NOISE, [0, length]))
    claims = find("keynorm").page.claims(view(concat(parts)))
    asked = [claim.sentence.split()[0] for claim in claims if claim.source == "asked here"]
    assert asked == ["Baseline-HoPE", "Baseline-HoPE", "NGPT", "NGPT"]
