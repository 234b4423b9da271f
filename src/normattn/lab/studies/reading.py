"""How far does each inference-time method reach, and how wide should ReRoPE's window be?

*reading*: models are trained as in `keynorm`, then evaluated by position up to 64 training lengths
and by retrieval, with every inference-time method that their score supports. `normattn report`
makes the same report of runs that were evaluated separately.

*window* (kexue 9708): Baseline and Baseline-logn are evaluated on longer text with ReRoPE at
several windows, Baseline also with inference-time logn+.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import polars as pl

from normattn.lab.report.figures import Curves, Figure, Grid, Line, Panel, Point
from normattn.lab.report.tables import Column, Row, Table
from normattn.lab.report.view import View, octaves, points
from normattn.lab.stats import Metric, select
from normattn.lab.stats.arrays import Where
from normattn.lab.stats.metrics import ratio
from normattn.lab.studies import lm_report as lm
from normattn.lab.studies.base import Claim, Study
from normattn.lab.studies.language import ALL, TextSetting, candidates
from normattn.lab.studies.preset import Preset, load_preset
from normattn.lab.sweep.run import Request, Sweep
from normattn.score import ScoreSpec
from normattn.score.spec import UNMODIFIED
from normattn.settings import Settings

KIND = "reading"
POSITION, RETRIEVAL = "by_position", "retrieval"
SEPARATE_TABLES = (POSITION, RETRIEVAL)
"""The protocols with separate tables."""
TASK = "factor.task"
TASKS = {
    "passkey": "passkey",
    "multi_key": "multi-key",
    "variable_tracking": "variable tracking",
    "key_value": "key-value",
    "copy": "copy",
}
EXACT = Metric("exact", "correct answers", ratio(100.0), "%", 1)


class ReadingSettings(Settings):
    """Settings of `reproduce reading`: lengths in units of L, long enough for retrieval."""

    multiples: tuple[int, ...] = (1, 4, 16, 64)


class ReadingPreset(Preset):
    """A shared preset with the settings of this study."""

    reading: ReadingSettings = ReadingSettings()


def resolve(request: Request) -> Sweep:
    """The sweep of *reading*; raises `InputError` as `keynorm.resolve` does."""
    unused = ("evaluation.multiples", "evaluation.protocols")
    preset = load_preset(request, KIND, ReadingPreset, unused)
    overrides = {"multiples": preset.reading.multiples, "protocols": SEPARATE_TABLES}
    setting = TextSetting.of(preset, overrides)
    if request.methods in (None, (ALL,)):
        methods: tuple[str, ...] = (UNMODIFIED, *candidates())
    else:
        methods = setting.canonical_methods(request.methods)
    variants = setting.canonical_scores(request.variants or ("Baseline", "KNA", "CosA-logn"))
    supported, skipped = setting.applicable_methods(dict.fromkeys(variants, methods))
    runs = [setting.run(score, chosen) for score, chosen in supported.items()]
    return setting.sweep(request, KIND, runs, skipped)


def _rows_by(protocol: str) -> Callable[[View], list[Row]]:
    return lambda view: lm.rows_of(view.frame.filter(protocol=protocol))


def _octaves(metric: Metric) -> Callable[[View], Sequence[Column]]:
    """Columns of the metric at positions up to L, 2 L, 4 L, …"""
    by_position = metric.at(protocol=POSITION)
    return lambda view: [
        Column(f"{metric.name}_{number}", title, by_position.between(span))
        for number, (_, title, span) in enumerate(octaves(view, metric, {"protocol": POSITION}))
    ]


def _retrieval_columns(view: View) -> list[Column]:
    if TASK not in view.frame.columns:
        return []
    return [
        Column(
            f"{task}_{key}_{length}",
            f"{title}, {unit}, {length:,}",
            metric.at({TASK: task}, protocol=RETRIEVAL, length=length),
        )
        for task, title in TASKS.items()
        for length in sorted(view.values("length", {"protocol": RETRIEVAL, TASK: task}))
        for key, metric, unit in (("exact", EXACT, "answers"), ("token", lm.ACCURACY, "tokens"))
    ]


def figures(view: View) -> Iterator[Figure]:
    """Figures of the standard protocols, accuracy and loss by position, retrieval by depth."""
    yield from (*lm.position_figures(view), lm.length_figure(view), lm.history_figure(view))
    for row in view.values("row", {"protocol": POSITION}):
        name = "reading_by_position_" + row.replace("(", "_").replace(")", "").replace("=", "")
        yield lm.methods_by_position(view, name, f"{row}: by position", {"row": row})
    length = view.longest(RETRIEVAL)
    for task in view.values(TASK, {"protocol": RETRIEVAL}) if length else ():
        yield from _by_depth(view, {"protocol": RETRIEVAL, TASK: task, "length": length})


def _by_depth(view: View, where: dict[str, Any]) -> Iterator[Figure]:
    """The share of correct answer tokens, by depth of the fact, at the longest length."""
    shares: dict[str, tuple[float, ...]] = {}
    depths: tuple[str, ...] = ()
    for row in _rows_by(RETRIEVAL)(view):
        sums = view.sums("accuracy", {**row.where, **where})
        if sums is not None:
            by_depth = 100 * sums.numerator.sum((0, 1)) / sums.denominator.sum((0, 1))
            shares[row.label] = tuple(by_depth.tolist())
            depths = depths or tuple(f"{depth:.2f}" for _, _, depth, _ in sums.bins)
    yield Grid(
        f"retrieval_{where[TASK]}",
        f"{TASKS[where[TASK]]} at {where['length']:,} tokens: correct answer tokens, %",
        *(tuple(shares), depths, tuple(shares.values())),
        tuple(tuple(f"{share:.0f}" for share in line) for line in shares.values()),
        x_title="depth of the fact (0: beginning)",
        scale_title="%",
    )


def in_short(view: View) -> list[str]:
    """For each protocol, at its longest length: the most accurate model, and the best method."""
    accuracy = view.evaluated.filter(statistic="accuracy")
    longest = accuracy.filter(pl.col("length") == pl.col("length").max().over("protocol"))
    shares = longest.group_by("protocol", "length", "row", "method").agg(
        (100 * pl.col("sum").sum() / pl.col("of").sum()).alias("share")
    )
    sentences = []
    for protocol in view.values("protocol", {"statistic": "accuracy"}):
        rows = shares.filter(protocol=protocol).sort("share", "row", "method", descending=True)
        best = []
        for group in (rows.filter(method=""), rows.filter(pl.col("method") != "")):
            for _, _, row, method, share in group.head(1).rows():
                remark = f", the best of {group.height}" if group.height > 1 else ""
                best.append(f"{share:.1f} % {lm.row_of(row, method).label}{remark}")
        if best:
            text, length = lm.TEXTS.get(protocol, protocol.replace("_", " ")), rows["length"][0]
            sentences.append(f"Accuracy, {text}, {length:,} tokens: {'; '.join(best)}.")
    return sentences


STUDY = Study(
    "reading",
    "How far does each score, and each inference-time method, let a model go past the length "
    "it was trained at?",
    title="Beyond the training length",
    help="Train Baseline, KNA and CosA-logn; evaluate them at up to 64 times the training length "
    "with every inference-time method, by position and by retrieval.",
    sources=("kexue.fm/archives/9708", "kexue.fm/archives/9859"),
    resolve=resolve,
    tables=(
        lm.protocol_table(),
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
                "Answers: correct as a whole, as greedy decoding would give them. Tokens: of the "
                "answers.",
            ),
        ),
    ),
    figures=figures,
    summary=in_short,
    variants_help="Trained scores, separated by commas. [default: Baseline, KNA, CosA-logn]",
    methods_help="Inference-time methods, separated by commas, or `all`. [default: all]",
)

# The window of ReRoPE

PLAIN, INFERENCE_TIME = "no log-n", "logn+"
FORMS = (PLAIN, INFERENCE_TIME, "logn")
SHARES = (0.125, 0.25, 0.5, 0.75, 1.0)
"""ReRoPE's windows, as shares of the training length."""
DRAWN = ("non_repeated", "repeated", "last_segment")


def resolve_window(request: Request) -> Sweep:
    """The sweep of *window*: unmodified and every window, without log-n also with logn+.

    Of the preset's lengths beyond L only the longest is evaluated. Raises `InputError` as
    `keynorm.resolve` does.
    """
    preset = load_preset(request, "window", Preset)
    setting = TextSetting.of(preset, {"multiples": preset.evaluation.multiples[-1:]})
    sizes = dict.fromkeys(max(1, round(share * setting.train_length)) for share in SHARES)
    rerope = [f"ReRoPE(window={size})" for size in sizes]
    without = [UNMODIFIED, *rerope]
    with_logn = [*without, "logn+", *(f"{method}-logn+" for method in rerope)]
    by_score = {"Baseline": with_logn, "Baseline-logn": without}
    runs = [
        setting.run(score, setting.canonical_methods(by_score[score]))
        for score in setting.canonical_scores([*by_score])
    ]
    return setting.sweep(request, "window", runs)


def _windows(view: View) -> dict[tuple[str, int], Where]:
    """The rows by form of log-n and window, windows ascending; 0 is without ReRoPE."""
    forms = {"": PLAIN, "training-time": "logn"}
    rows: dict[tuple[str, int], Where] = {}
    for row in lm.rows_of(view.evaluated):
        spec = ScoreSpec.parse(select(view.evaluated, row.where)["score"][0])
        form = forms.get(spec.logn.when if spec.logn else "", INFERENCE_TIME)
        rows[form, (spec.remapping and spec.remapping.window) or 0] = row.where
    return dict(sorted(rows.items(), key=lambda item: (FORMS.index(item[0][0]), item[0][1])))


def _window_rows(view: View) -> list[Row]:
    return [
        Row(f"{form}, w = {window}" if window else form, where)
        for (form, window), where in _windows(view).items()
    ]


def _window_claims(view: View) -> Iterator[Claim]:
    """Claim for each window that logn+ helps; a mean would hide for which windows."""
    accuracy, rows = lm.at_longest(lm.ACCURACY, view, "non_repeated"), _windows(view)
    for (form, window), where in rows.items():
        if form == INFERENCE_TIME and window:
            yield Claim(
                f"logn+ improves ReRoPE with w = {window}",
                accuracy.at(where) - accuracy.at(rows[PLAIN, window]),
                *("kexue 9708", "logn+ − no log-n, accuracy on held-out text"),
            )


def _window_figures(view: View) -> Iterator[Figure]:
    """Accuracy against w / L, a line for each form of log-n; dashed: without ReRoPE."""
    rows, trained = _windows(view), max(view.values("train_length"))
    panels = []
    for protocol in filter(view.longest, DRAWN):
        metric, lines = lm.at_longest(lm.ACCURACY, view, protocol), list[Line]()
        for form in FORMS:
            by_share = {w / trained: where for (name, w), where in rows.items() if name == form}
            without = view.estimate(metric, by_share.pop(0.0, None) or {"row": ""})
            curve = points(view, ((share, metric.at(where)) for share, where in by_share.items()))
            lines.append(Line(form, curve, form))
            if curve and without is not None:
                level = tuple(Point.of(x, without) for x in (curve[0].x, curve[-1].x))
                lines.append(Line(f"{form}, no ReRoPE", level, form, dashed=True))
        title = f"{lm.TEXTS[protocol]} ({view.longest(protocol):,})"
        panels.append(Panel(title, tuple(lines), "w / training length", "accuracy (%)"))
    title = "Accuracy past the training length against ReRoPE's window"
    yield Curves("accuracy_by_window", title, tuple(panels), shared_y=False)


WINDOW_STUDY = Study(
    "window",
    "How wide should ReRoPE's window w be, and what does log-n scaling add, at training time "
    "(logn) or at inference time (logn+)?",
    title="ReRoPE's window",
    help="Evaluate ReRoPE with windows of ⅛ to 1 training length, without log-n, with logn and "
    "with logn+.\n\nTrains Baseline and Baseline-logn, evaluates at up to 8 times the training "
    "length, and plots accuracy against the window, a line for each form of log-n.",
    sources=("kexue.fm/archives/9708",),
    resolve=resolve_window,
    tables=(lm.protocol_table(rows=_window_rows, head="log-n"),),
    claims=_window_claims,
    figures=_window_figures,
)
