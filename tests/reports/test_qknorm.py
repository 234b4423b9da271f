"""The QK-Norm study's page: rows, paired differences, the ladder, and what fails on it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from normattn.errors import InputError
from normattn.reports.bootstrap import Bootstrap
from normattn.reports.qknorm import qknorm_report
from normattn.reports.stability import LadderRun, Trace, make_ladder
from normattn.reports.summed import bleu
from normattn.reports.translation_record import STATISTICS, TranslationRecord
from normattn.reports.translations import Ended, change_of, translation_rows

SENTENCES = 30
DRAWN = Bootstrap(resamples=200)


def record(
    variant: str, seed: int, gain: float = 0.0, translated: bool = True
) -> TranslationRecord:
    """Counts of made-up translations that are a little better by `gain`."""
    generator = np.random.default_rng([seed, 7])
    tokens = generator.integers(5, 20, SENTENCES)
    shares = np.clip(generator.uniform(0.3, 0.7, SENTENCES) + gain, 0, 1)
    matches = [np.floor(np.maximum(tokens - n, 0) * shares**n).astype(int) for n in (1, 2, 3, 4)]
    grams = [np.maximum(tokens - n + 1, 0) for n in (1, 2, 3, 4)]
    counts = np.stack([tokens, tokens, *matches, *grams], axis=-1)
    characters = np.stack([np.stack([g, g, m]) for g, m in zip(grams, matches, strict=True)])
    characters = np.concatenate([characters, characters[:2]]).reshape(18, SENTENCES).T
    own: dict[str, object] = {}
    if translated:
        own = {
            "bleu": tuple(map(tuple, counts.tolist())),
            "chrf": tuple(map(tuple, characters.tolist())),
            "translations": ("ein Hund",) * SENTENCES,
            "signatures": ("BLEU|nrefs:1", "chrF2|nrefs:1"),
        }
    return TranslationRecord(
        variant=variant,
        spec=f"{variant}@64",
        seed=seed,
        weights=f"{variant}{seed}",
        data="d",
        split="test",
        unigram=5.5,
        loss=tuple((tokens * (3 - 2 * shares)).tolist()),
        correct=tuple(matches[0].tolist()),
        tokens=tuple(tokens.tolist()),
        **own,  # type: ignore[arg-type]
    )


def ladder_run(score: str, rate: float, loss: float | None, seed: int = 0) -> LadderRun:
    """A training that ended at a loss, or in NaN."""
    found = None
    if loss is not None:
        made = record(score, seed, translated=False)
        nats = tuple(loss * count for count in made.tokens)
        found = made.model_copy(update={"loss": nats})
    ended = None if found else Ended(score, seed, 41, "blocks.0")
    traces = (Trace(10, 12.0 * rate, 0.8), Trace(20, 15.0 * rate, 0.5))
    return LadderRun(score, float(rate), 1e-3 * rate, seed, found, ended, traces)


def test_a_difference_is_paired_over_sentences_and_seeds() -> None:
    ours = [record("KNA", seed, 0.1) for seed in (0, 1, 2)]
    base = [record("Baseline", seed) for seed in (1, 2, 3)]
    statistic = STATISTICS[0]
    found = change_of(ours, base, statistic, DRAWN)
    assert found is not None
    assert found.seeds == 2  # those that both have
    a = np.array([each.bleu for each in ours[1:]], float)
    b = np.array([each.bleu for each in base[:2]], float)
    assert found.value == pytest.approx(float(bleu(a.sum((0, 1))) - bleu(b.sum((0, 1)))))
    samples = bleu(DRAWN.sums(a)) - bleu(DRAWN.sums(b))
    assert found.low == pytest.approx(np.percentile(samples, 2.5))
    assert found.high == pytest.approx(np.percentile(samples, 97.5))
    assert found.above_zero
    same = change_of(base, base, statistic, DRAWN)
    assert same is not None
    assert (same.value, same.low, same.high) == (0.0, 0.0, 0.0)


def test_rows_of_different_sentences_are_refused() -> None:
    other = record("KNA", 0).model_copy(update={"data": "e"})
    with pytest.raises(InputError, match="different sentences"):
        translation_rows([record("Baseline", 0), other], [])


def test_who_holds_on_the_ladder() -> None:
    runs = [
        *(ladder_run("Baseline", rate, loss) for rate, loss in ((1, 3.0), (4, 5.45), (16, None))),
        *(ladder_run("KNA", rate, loss) for rate, loss in ((1, 3.0), (4, 2.0), (16, 2.5))),
        ladder_run("KNA", 4, None, seed=1),
    ]
    ladder = make_ladder(runs, ("KNA", "Baseline"))
    assert ladder.scores == ("KNA", "Baseline")
    assert ladder.reach("Baseline") == 1  # 5.45 is hardly better than the unigrams' 5.5
    assert ladder.reach("KNA") == 1  # one of two seeds failed at ×4
    assert ladder.rungs["KNA", 16].holds
    assert ladder.rungs["KNA", 4].text().startswith("NaN at step 41 (1 of 2 seeds), else 2.00 [")
    assert ladder.rungs["Baseline", 16].text() == "NaN at step 41 ✗"
    assert ladder.rungs["Baseline", 4].text().endswith("] ✗")
    best = ladder.best("KNA")
    assert best is not None
    assert best.rate == 4
    assert ladder.rungs["KNA", 4].over_steps(lambda trace: trace.largest)[1][1].seeds == 2


def test_the_whole_page(tmp_path: Path) -> None:
    records = [
        *(
            record(name, seed, gain)
            for name, gain in (("Baseline", 0), ("QKRMSNorm", 0.1))
            for seed in (0, 1)
        ),
        record("KNA", 0),
    ]
    ended = [Ended("CosA", 0, 17, "the loss"), Ended("KNA", 1, 30, "blocks.1")]
    runs = [ladder_run("Baseline", 1, 3.0), ladder_run("Baseline", 2, None)]
    choices = {
        "order": ("Baseline", "QKRMSNorm"),
        "setting": {"corpus": "made up"},
        "pages": {"vision.md": "the same scores in a small Vision Transformer"},
        "bootstrap": DRAWN,
    }
    paths = qknorm_report(records, ended, runs, tmp_path / "a", **choices)  # type: ignore[arg-type]
    assert {path.stem for path in paths} == {
        *("bleu_by_score", "loss_by_learning_rate", "largest_logit", "attention_entropy")
    }
    text = (tmp_path / "a" / "table.md").read_text()
    for expected in (
        "| CosA      | diverged at step 17 |",
        "| KNA ‡",
        "KNA, seed 1: diverged at step 30",
        "QKRMSNorm: BLEU +",
        "| the source      |",
        "`BLEU|nrefs:1`",
        "[vision.md](vision.md)",
        "- corpus: made up",
        "NaN at step 41 ✗",
    ):
        assert expected in text, expected
    facts = json.loads((tmp_path / "a" / "table.json").read_text())
    assert [row["variant"] for row in facts["rows"]] == ["Baseline", "QKRMSNorm", "CosA", "KNA"]
    assert facts["rows"][1]["change"]["bleu"]["seeds"] == 2
    assert facts["ladder"]["unigram"] == 5.5
    lines = (tmp_path / "a" / "table.csv").read_text().splitlines()
    assert len({line.count(",") for line in lines}) == 1
    again = qknorm_report(
        records[::-1],
        ended,
        runs,
        tmp_path / "b",
        **choices,  # type: ignore[arg-type]
    )
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in paths]
    assert (tmp_path / "b" / "table.md").read_text() == text


def test_nothing_to_report(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing to report"):
        qknorm_report([], [], [], tmp_path)
