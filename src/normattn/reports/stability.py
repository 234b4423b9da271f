"""The learning-rate ladder: which scores hold at which rates, what their logits did meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from normattn.reports.bootstrap import Bootstrap
from normattn.reports.markdown import grid, shown
from normattn.reports.metrics import Estimate
from normattn.reports.translation_record import STATISTICS, TranslationRecord
from normattn.reports.translations import Ended, estimate_of
from normattn.reports.unigram import MARGIN, learnt_nothing

LOSS = next(each for each in STATISTICS if each.key == "loss")
FAILED = "✗"


@dataclass(frozen=True)
class Trace:
    """What attention did at a step: its largest logit, and its entropy as a share of ln n."""

    step: int
    largest: float
    entropy: float


@dataclass(frozen=True)
class LadderRun:
    """One training of the ladder: a record where it came to its end, else where it diverged."""

    score: str
    rate: float
    learning_rate: float
    seed: int
    record: TranslationRecord | None
    ended: Ended | None = None
    traces: tuple[Trace, ...] = field(default=(), repr=False)

    @property
    def loss(self) -> float | None:
        """Nats per token of the test set at the end."""
        if self.record is None:
            return None
        return sum(self.record.loss) / sum(self.record.tokens)

    @property
    def failed(self) -> bool:
        """Whether it ended in NaN, or less than `MARGIN` better than the unigram model."""
        loss = self.loss
        return loss is None or self.record is None or learnt_nothing(loss, self.record.unigram)


@dataclass(frozen=True)
class Rung:
    """All seeds of one score at one rate."""

    score: str
    rate: float
    runs: tuple[LadderRun, ...]
    bootstrap: Bootstrap = field(repr=False)

    @cached_property
    def loss(self) -> Estimate | None:
        """Of the seeds that came to their end; None where none did."""
        records = [run.record for run in self.runs if run.record is not None]
        return estimate_of(records, LOSS, self.bootstrap) if records else None

    @property
    def holds(self) -> bool:
        """Whether every seed learnt something."""
        return not any(run.failed for run in self.runs)

    def text(self) -> str:
        """The cell of the table."""
        ends = [run.ended for run in self.runs if run.ended is not None]
        nan = f"NaN at step {min(each.step for each in ends)}" if ends else ""
        if self.loss is None:
            return f"{nan} {FAILED}"
        if nan:
            nan += f" ({len(ends)} of {len(self.runs)} seeds), else "
        return nan + shown(self.loss, digits=2) + ("" if self.holds else f" {FAILED}")

    def over_steps(self, of: Callable[[Trace], float]) -> tuple[tuple[float, Estimate], ...]:
        """A number by step: the mean over seeds, from the least to the greatest of them."""
        by_step: dict[int, list[float]] = {}
        for run in self.runs:
            for trace in run.traces:
                by_step.setdefault(trace.step, []).append(of(trace))
        return tuple(
            (float(step), Estimate(sum(v) / len(v), min(v), max(v), 0, 0, len(v)))
            for step, v in sorted(by_step.items())
        )

    def as_json(self) -> dict[str, Any]:
        """The rung in table.json."""
        traces = [trace for run in self.runs for trace in run.traces]
        return {
            "score": self.score,
            "rate": self.rate,
            "learning_rate": self.runs[0].learning_rate,
            "seeds": [run.seed for run in self.runs],
            "loss": self.loss.as_json() if self.loss else None,
            "holds": self.holds,
            "diverged": [
                {"seed": run.seed, "step": run.ended.step} for run in self.runs if run.ended
            ],
            "largest_logit": max((trace.largest for trace in traces), default=None),
            "last_entropy_share": _last_entropy(self.runs),
        }


@dataclass(frozen=True)
class Ladder:
    """Every score at every rate."""

    scores: tuple[str, ...]
    rates: tuple[float, ...]
    rungs: dict[tuple[str, float], Rung]
    unigram: float | None

    def __bool__(self) -> bool:
        return bool(self.rungs)

    def of_score(self, score: str) -> list[Rung]:
        """The rungs of a score, rates rising; some may be missing."""
        found = ((score, rate) for rate in self.rates)
        return [self.rungs[key] for key in found if key in self.rungs]

    def reach(self, score: str) -> float | None:
        """The highest rate up to which the score holds throughout; None where it never does."""
        reached = None
        for rung in self.of_score(score):
            if not rung.holds:
                break
            reached = rung.rate
        return reached

    def best(self, score: str) -> Rung | None:
        """The rung of the least loss."""
        found = [rung for rung in self.of_score(score) if rung.loss is not None]
        return min(found, key=lambda rung: rung.loss.value if rung.loss else 0, default=None)


def make_ladder(
    runs: Sequence[LadderRun], order: Sequence[str] = (), bootstrap: Bootstrap | None = None
) -> Ladder:
    """The runs by score (those of `order` first) and rate, seeds together."""
    groups: dict[tuple[str, float], list[LadderRun]] = {}
    for run in sorted(runs, key=lambda run: run.seed):
        groups.setdefault((run.score, run.rate), []).append(run)
    scores = sorted(
        {run.score for run in runs},
        key=lambda name: (order.index(name) if name in order else len(order), name),
    )
    drawn = bootstrap or Bootstrap()
    unigrams = {run.record.unigram for run in runs if run.record is not None}
    return Ladder(
        scores=tuple(scores),
        rates=tuple(sorted({run.rate for run in runs})),
        rungs={key: Rung(*key, tuple(group), drawn) for key, group in groups.items()},
        unigram=min(unigrams, default=None),
    )


def ladder_markdown(ladder: Ladder) -> str:
    """The tables of the ladder, and how to read them."""
    learning_rates = {run.rate: run.learning_rate for r in ladder.rungs.values() for run in r.runs}
    titles = [f"×{rate:g} ({learning_rates[rate]:.3g})" for rate in ladder.rates]
    lines = []
    for score in ladder.scores:
        cells = [ladder.rungs.get((score, rate)) for rate in ladder.rates]
        reach = ladder.reach(score)
        texts = ("–" if cell is None else cell.text() for cell in cells)
        lines.append((score, *texts, "none" if reach is None else f"×{reach:g}"))
    guess = "" if ladder.unigram is None else f" ({ladder.unigram:.2f})"
    parts = [
        "Loss on the test set (nats per token, with intervals over sentences) after training at "
        "so many times the learning rate.",
        grid(("score", *titles, "holds to"), lines),
        f"{FAILED}: the training ended in NaN, or less than {MARGIN:g} nats better than guessing "
        f"each word by its frequency{guess}. Holds to: the highest rate up to which every seed "
        "learnt.",
        _inner_table(ladder, titles),
    ]
    return "\n\n".join(part for part in parts if part)


def _inner_table(ladder: Ladder, titles: Sequence[str]) -> str:
    lines = []
    for score in ladder.scores:
        texts = []
        for rate in ladder.rates:
            rung = ladder.rungs.get((score, rate))
            facts = rung.as_json() if rung else {}
            if facts.get("largest_logit") is None:
                texts.append("–")
            else:
                texts.append(f"{facts['largest_logit']:.3g}; {facts['last_entropy_share']:.2f}")
        lines.append((score, *texts))
    if all(text == "–" for line in lines for text in line[1:]):
        return ""
    return (
        "The largest logit of any recorded step, and the entropy of attention at the last one as a "
        "share of ln n (mean over layers and heads; 1: spread evenly, 0: one key takes all):\n\n"
        + grid(("score", *titles), lines)
    )


def _last_entropy(runs: Sequence[LadderRun]) -> float | None:
    last = [run.traces[-1].entropy for run in runs if run.traces]
    return sum(last) / len(last) if last else None
