"""How far do methods let a trained model read, and how wide should ReRoPE's window be?

*reading*: models are trained as in `keynorm`, then read by position to 64 training lengths and
asked for facts, under every inference-time method that their score can take. The same page is what
`normattn report` makes of runs that were evaluated by hand. *window* (kexue 9708): Baseline and
Baseline-logn are read past L with ReRoPE at several windows, the first with logn+ (switched on
after training) too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import polars as pl
from pydantic import Field, field_validator

from normattn.errors import InputError
from normattn.lab.report.claims import Claim
from normattn.lab.report.figures import Curves, Figure, Grid, Line, Panel, Point
from normattn.lab.report.tables import Column, Row, Table
from normattn.lab.report.view import View, bin_points, octaves, points
from normattn.lab.stats import Metric, select
from normattn.lab.stats.arrays import Where
from normattn.lab.stats.metrics import ratio
from normattn.lab.studies import lm_report as lm
from normattn.lab.studies.base import Study
from normattn.lab.studies.language import TextSetting
from normattn.lab.studies.methods import ALL, candidates, canonical, checked_methods, usable
from normattn.lab.studies.preset import Preset, opened
from normattn.lab.sweep.run import Request, Sweep
from normattn.score import ScoreSpec
from normattn.score.spec import UNMODIFIED
from normattn.settings import Settings

KIND = "reading"
POSITION, RETRIEVAL = "by_position", "retrieval"
OWN_TABLES = (POSITION, RETRIEVAL)
"""Protocols whose rows have their own tables."""
TASK = "factor.task"
TASKS = {
    "passkey": "passkey",
    "multi_key": "multi-key",
    "variable_tracking": "variable tracking",
    "key_value": "key-value",
    "copy": "copy",
}
EXACT = Metric("exact", "answers right", ratio(100.0), "%", 1)


class ReadingSettings(Settings):
    """`reproduce reading`: the lengths in units of L; each must have room for the facts asked."""

    multiples: tuple[int, ...] = (1, 4, 16, 64)


class ReadingPreset(Preset):
    """A shared preset as this study reads it."""

    reading: ReadingSettings = ReadingSettings()


def resolve(request: Request) -> Sweep:
    """Every choice made and checked, as `keynorm.resolve` does."""
    instead = {"multiples": "reading.multiples", "protocols": "the protocols of its question"}
    preset = opened(request, KIND, ReadingPreset, instead)
    read = {"multiples": preset.reading.multiples, "protocols": OWN_TABLES}
    setting = TextSetting.of(preset, read)
    asked = request.methods or (ALL,)
    methods = (UNMODIFIED, *candidates()) if asked == (ALL,) else checked_methods(asked, setting)
    variants = canonical(request.variants or ("Baseline", "KNA", "CosA-logn"), setting)
    ways, skipped = usable(dict.fromkeys(variants, methods), setting)
    return setting.sweep(request, KIND, [setting.run(*way) for way in ways.items()], skipped)


def _rows_by(protocol: str) -> Callable[[View], list[Row]]:
    """Rows that were read by one protocol."""
    return lambda view: lm.rows_of(view.frame.filter(protocol=protocol))


def _octaves(metric: Metric) -> Callable[[View], Sequence[Column]]:
    """The metric at positions up to L, 2 L, 4 L, …"""
    at = metric.at(protocol=POSITION)
    return lambda view: [
        Column(f"{metric.name}_{number}", title, at.between(span))
        for number, (_, title, span) in enumerate(octaves(view, metric, {"protocol": POSITION}))
    ]


def _retrieval_columns(view: View) -> list[Column]:
    if TASK not in view.frame.columns:
        return []
    return [
        Column(
            f"{task}_{key}_{length}",
            f"{title}, {words}, {length:,}",
            metric.at({TASK: task}, protocol=RETRIEVAL, length=length),
        )
        for task, title in TASKS.items()
        for length in sorted(view.values("length", {"protocol": RETRIEVAL, TASK: task}))
        for key, metric, words in (("exact", EXACT, "answers"), ("token", lm.ACCURACY, "tokens"))
    ]


def figures(view: View) -> Iterator[Figure]:
    """What the standard protocols give, then accuracy and loss by position, retrieval by depth."""
    yield from (*lm.position_figures(view), lm.length_figure(view), lm.history_figure(view))
    for row in view.values("row", {"protocol": POSITION}):
        yield _by_position(view, row)
    length = view.longest(RETRIEVAL)
    for task in view.values(TASK, {"protocol": RETRIEVAL}) if length else ():
        yield from _by_depth(view, {"protocol": RETRIEVAL, TASK: task, "length": length})


def _by_position(view: View, row: str) -> Figure:
    where = {"row": row, "protocol": POSITION}
    trained = view.one("train_length", where)
    panels = []
    for metric, unit in ((lm.ACCURACY, "accuracy (%)"), (lm.LOSS, "loss (nats)")):
        lines = []
        for method in lm.ranked(view.values("method", where), lm.METHOD_ORDER):
            curve = bin_points(view, metric, {**where, "method": method}, lambda bin_: bin_[3])
            if curve:
                lines.append(Line(method or UNMODIFIED, curve))
        axes: dict[str, Any] = {"log_x": True, "train_length": trained}
        panels.append(Panel(metric.title, tuple(lines), "position", unit, **axes))
    name = "reading_by_position_" + row.replace("(", "_").replace(")", "").replace("=", "")
    return Curves(name, f"{row}: by position", tuple(panels), shared_y=False)


def _by_depth(view: View, where: dict[str, Any]) -> Iterator[Figure]:
    """Tokens of the answers that are right, by depth of the fact, at the longest length."""
    rows = _rows_by(RETRIEVAL)(view)
    read = {row.label: view.sums("accuracy", {**row.where, **where}) for row in rows}
    known = {name: sums for name, sums in read.items() if sums is not None}
    if not known:
        return
    values = tuple(
        tuple((100 * sums.numerator.sum((0, 1)) / sums.denominator.sum((0, 1))).tolist())
        for sums in known.values()
    )
    yield Grid(
        f"retrieval_{where[TASK]}",
        f"{TASKS[where[TASK]]} at {where['length']:,} tokens: answer tokens right, %",
        tuple(known),
        tuple(f"{depth:.2f}" for _, _, depth, _ in next(iter(known.values())).bins),
        values,
        tuple(tuple(f"{value:.0f}" for value in line) for line in values),
        x_title="depth of the fact (0: beginning)",
        scale_title="%",
    )


def in_short(view: View) -> list[str]:
    """The accuracy of every protocol at its longest length: the best model, and the best method."""
    right = view.read.filter(statistic="accuracy")
    longest = right.filter(pl.col("length") == pl.col("length").max().over("protocol"))
    shares = longest.group_by("protocol", "length", "row", "method").agg(
        (100 * pl.col("sum").sum() / pl.col("of").sum()).alias("share")
    )
    sentences = []
    for protocol in view.values("protocol", {"statistic": "accuracy"}):
        found = shares.filter(protocol=protocol).sort("share", "row", "method", descending=True)
        words = []
        for kind in (found.filter(method=""), found.filter(pl.col("method") != "")):
            for _, _, row, method, share in kind.head(1).rows():
                best = f", the best of {kind.height}" if kind.height > 1 else ""
                words.append(f"{share:.1f} % {lm.row_of(row, method).label}{best}")
        if words:
            named, length = protocol.replace("_", " "), found["length"][0]
            sentences.append(f"Accuracy, {named}, {length:,} tokens: {'; '.join(words)}.")
    return sentences


STUDY = Study(
    "reading",
    "How far does each score, and each inference-time method, let a model go past the length "
    "it was trained at?",
    title="Reading past the training length",
    help="Train Baseline, KNA and CosA-logn; evaluate them at up to 64 times the training length "
    "with every inference-time method, by position and by retrieval.",
    sources=("kexue.fm/archives/9708", "kexue.fm/archives/9859"),
    resolve=resolve,
    tables=(
        lm.reading_table(),
        Table(
            "accuracy_by_position",
            "Accuracy by position, %",
            _rows_by(POSITION),
            _octaves(lm.ACCURACY),
            intro="Held-out text, every token scored, in octaves of the training length.",
        ),
        Table("loss_by_position", "Loss by position, nats", _rows_by(POSITION), _octaves(lm.LOSS)),
        Table(
            "retrieval",
            "Facts inserted into a long text and queried at its end, %",
            _rows_by(RETRIEVAL),
            _retrieval_columns,
            notes=(
                "answers: right as a whole, as greedy decoding would give them; tokens: of "
                "the answers.",
            ),
        ),
    ),
    figures=figures,
    summary=in_short,
    variants_help="Trained scores, separated by commas. [default: Baseline, KNA, CosA-logn]",
    methods_help="Inference-time methods, separated by commas, or `all`. [default: all]",
)

# The window of ReRoPE

PLAIN, POST_HOC = "no log-n", "logn+"
FORMS = (PLAIN, POST_HOC, "logn")
DRAWN = ("non_repeated", "repeated", "last_segment")


class WindowSettings(Settings):
    """`reproduce window`: the windows of ReRoPE, as shares of the training length."""

    shares: tuple[Annotated[float, Field(gt=0)], ...] = (0.125, 0.25, 0.5, 0.75, 1.0)

    @field_validator("shares")
    @classmethod
    def _rising(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if not value or list(value) != sorted(set(value)):
            raise ValueError(f"shares must rise, got {list(value)}")
        return value


class WindowPreset(Preset):
    """A shared preset as this study reads it."""

    window: WindowSettings = WindowSettings()


def resolve_window(request: Request) -> Sweep:
    """Unmodified, then every window; for the model without log-n also with logn+.

    Only the longest of the tested lengths is read. Raises `InputError` as `keynorm.resolve` does.
    """
    preset = opened(request, "window", WindowPreset)
    window = preset.window
    setting = TextSetting.of(preset, {"multiples": preset.evaluation.multiples[-1:]})
    sizes = [max(1, round(share * setting.train_length)) for share in window.shares]
    if len(set(sizes)) < len(sizes):
        raise InputError(
            f"window.shares give the same window twice at a training length of "
            f"{setting.train_length}: {sizes}"
        )
    methods = [UNMODIFIED, *(f"ReRoPE(window={size})" for size in sizes)]
    ways = {
        "Baseline": [*methods, "logn+", *(f"{method}-logn+" for method in methods[1:])],
        "Baseline-logn": methods,
    }
    runs = [
        setting.run(variant, checked_methods(ways[variant], setting))
        for variant in canonical([*ways], setting)
    ]
    return setting.sweep(request, "window", runs, window=window)


def _windows(view: View) -> dict[tuple[str, int], Where]:
    """Where each form of log-n and window was read, windows ascending; 0 without ReRoPE."""
    found: dict[tuple[str, int], Where] = {}
    for row in lm.rows_of(view.read):
        spec = ScoreSpec.parse(select(view.read, row.where)["score"][0])
        form = PLAIN
        if spec.logn is not None:
            form = "logn" if spec.logn.when == "training-time" else POST_HOC
        window = spec.remapping.window if spec.remapping else None
        found[form, window or 0] = row.where
    return dict(sorted(found.items(), key=lambda each: (FORMS.index(each[0][0]), each[0][1])))


def _window_rows(view: View) -> list[Row]:
    """Every form of log-n at every window."""
    return [
        Row(f"{form}, w = {window}" if window else form, where)
        for (form, window), where in _windows(view).items()
    ]


def _window_claims(view: View) -> Iterator[Claim]:
    """logn+ helps ReRoPE at every window: the mean over windows would hide which."""
    natural, read = lm.past(lm.ACCURACY, view, "non_repeated"), _windows(view)
    for (form, window), where in read.items():
        if form == POST_HOC and window:
            yield Claim(
                f"logn+ improves ReRoPE with w = {window}",
                natural.at(where) - natural.at(read[PLAIN, window]),
                *("kexue 9708", "logn+ − no log-n, non-repeated accuracy"),
            )


def _window_figures(view: View) -> Iterator[Figure]:
    """Accuracy against w / L, a line for each form of log-n; dotted: without ReRoPE."""
    read, trained = _windows(view), max(view.values("train_length"))
    panels = []
    for protocol in filter(view.longest, DRAWN):
        metric, lines = lm.past(lm.ACCURACY, view, protocol), list[Line]()
        for form in FORMS:
            own = {w / trained: where for (name, w), where in read.items() if name == form}
            level = view.estimate(metric, own.pop(0.0, None) or {"row": ""})
            shares = points(view, metric, own.items())
            lines.append(Line(form, shares, form))
            if shares and level is not None:
                flat = tuple(Point.of(x, level) for x in (shares[0].x, shares[-1].x))
                lines.append(Line(f"{form}, no ReRoPE", flat, form, dashed=True))
        title = f"{protocol.replace('_', ' ')} ({view.longest(protocol):,})"
        panels.append(Panel(title, tuple(lines), "w / L", "accuracy (%)"))
    title = "Accuracy past the training length against ReRoPE's window"
    yield Curves("accuracy_by_window", title, tuple(panels), shared_y=False)


WINDOW_STUDY = Study(
    "window",
    "How wide should ReRoPE's window w be, and what does log-n scaling add, trained in or "
    "switched on afterwards (logn+)?",
    title="ReRoPE's window",
    help="Evaluate ReRoPE with windows of ⅛ to 1 training length, without log-n, with logn and "
    "with logn+.\n\nTrains Baseline and Baseline-logn, evaluates at up to 8 times the training "
    "length, and plots accuracy against the window, a line for each form of log-n.",
    sources=("kexue.fm/archives/9708",),
    resolve=resolve_window,
    tables=(lm.reading_table(rows=_window_rows, head="log-n"),),
    claims=_window_claims,
    figures=_window_figures,
    examples=(('--set "window.shares=[0.25,0.5,1,2]"', "other windows"),),
)
