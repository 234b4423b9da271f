"""Why does KeyNorm read past L: do key norms decide attention, do cosines leave their range?

The source says: without a norm, a key's own size decides how much attention it gets, so that
cos(q, k) is trained badly and leaves its trained range on longer text (kexue.fm/archives/9859).
Measured here: ‖k_j‖ against the attention that key j receives, and the cosines at L and at 8 L, in
models with and without norms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import polars as pl

from normattn.data import TokenData
from normattn.data.evaluation_sets import EvaluationSet, non_repeated_set
from normattn.diagnostics import measure_mechanism
from normattn.evaluation.fingerprints import weights_digest
from normattn.kernels.cosines import BINS
from normattn.measure import Sums, frame
from normattn.measure.statistic import Array, Statistic, crossing, mean
from normattn.models.accounting import flops_per_token
from normattn.models.pretrained import load_model
from normattn.report.claim import Claim
from normattn.report.figure import (
    Density,
    DensityRow,
    Figure,
    Grid,
    IntervalColumn,
    Intervals,
)
from normattn.report.page import Page
from normattn.report.table import Cell, Column, Row, Table, shown
from normattn.report.view import Term, View
from normattn.studies._reading import VARIANT_ORDER, ranked
from normattn.sweep.collect import measured_below
from normattn.sweep.language import (
    CausalCell,
    TextConfig,
    canonical,
    described,
    opened,
    shared_training,
)
from normattn.sweep.layout import CellPaths
from normattn.sweep.measuring import EVALUATIONS, MODEL
from normattn.sweep.settings import EvaluationSettings, MechanismSettings
from normattn.sweep.stages import Note, Stage
from normattn.sweep.study import (
    Request,
    Study,
    Sweep,
    place_of,
    refuse_choices,
    seeds_of,
)
from normattn.training import TrainingConfig
from normattn.training.distribution import choose_device
from normattn.training.workload import Cost

KIND = "mechanism"
VARIANTS = (
    *("Baseline", "KNA", "KNA-NoPE"),
    *("QKLayerNorm", "QKLayerNorm(gain=false)", "QKRMSNorm", "QKRMSNorm(gain=false)"),
)
RECORD = "mechanism.parquet"
# Scores are computed a second time, in blocks and in float64, beside the model's own.
WEIGHT = 8


class MechanismConfig(TextConfig):
    """What the study's cells share: also what is looked at."""

    mechanism: MechanismSettings


class MechanismCell(CausalCell):
    """One trained score, looked into."""

    kind: Literal["mechanism"] = "mechanism"
    mechanism: MechanismSettings

    def after(self, paths: CellPaths) -> list[Stage]:
        """Look into the trained model."""
        config = self.training_config
        return [LookStage(config, paths.run, self.mechanism, self.evaluation)]


@dataclass(frozen=True)
class LookStage(Stage):
    """Count what the scores of the model in `place` do."""

    phase = "diagnostics"
    config: TrainingConfig
    place: Path
    settings: MechanismSettings
    evaluation: EvaluationSettings

    @property
    def cost(self) -> Cost:
        """Every token that is read, counted as often as looking costs more than reading."""
        model = self.config.model
        length = model.train_length * self.settings.multiple
        tokens = WEIGHT * self.settings.max_windows * length
        return Cost(scored=tokens, flops=tokens * flops_per_token(model, length).forward)

    def is_done(self) -> bool:
        """Whether it was measured."""
        return (self.place / EVALUATIONS / RECORD).is_file()

    def run(self, data: TokenData, note: Note) -> None:
        """Measure, unless it was."""
        if self.is_done():
            return
        model = load_model(self.place / MODEL, self.config.model).to(
            choose_device(self.config.device)
        )
        texts = evaluation_set(data, self.config.model.train_length, self.settings, self.evaluation)
        measured = measure_mechanism(
            model,
            texts,
            seed=self.config.seed,
            weights=weights_digest(model),
            tokens_per_batch=self.settings.max_tokens,
            progress=lambda done, total: note(done, total, ""),
        )
        frame.write(self.place / EVALUATIONS / RECORD, measured)


def resolve(request: Request) -> Sweep:
    """The study that a request asks for; raises `InputError` as `keynorm.resolve` does."""
    preset = opened(request, KIND, group=KIND)
    refuse_choices(request, KIND)
    config = MechanismConfig(
        preset=preset.name,
        training=shared_training(preset),
        evaluation=preset.evaluation.model_copy(
            update={"multiples": (1, preset.mechanism.multiple)}
        ),
        mechanism=preset.mechanism,
    )
    cells = tuple(
        MechanismCell(
            variant=variant,
            seed=seed,
            training=config.training,
            evaluation=config.evaluation,
            mechanism=config.mechanism,
        )
        for seed in seeds_of(request, preset)
        for variant in canonical(request.variants or VARIANTS, config)
    )
    return Sweep(
        study=KIND,
        config=config,
        cells=cells,
        skipped=(),
        out=place_of(request, KIND, preset),
        describe=described(
            lambda data: [
                evaluation_set(data, config.train_length, config.mechanism, config.evaluation)
            ]
        ),
        facts=config.facts,
    )


def evaluation_set(
    data: TokenData,
    train_length: int,
    settings: MechanismSettings,
    evaluation: EvaluationSettings,
) -> EvaluationSet:
    """Held-out natural text of `multiple` training lengths."""
    split = data.split(evaluation.split)
    windows, seed = settings.max_windows, evaluation.seed
    return non_repeated_set(split, train_length, settings.multiple, max_windows=windows, seed=seed)


TAIL = 0.001
"""The share of the cosines at L left out at either end of their range."""
QUANTILES = (TAIL, 0.25, 0.5, 0.75, 1 - TAIL)
CORRELATION = mean("correlation", "rank correlation")
RAW = mean("raw_correlation", "before the norm")
SPREAD = mean("spread", "spread of ‖k‖")


def _lengths(view: View) -> tuple[int, int]:
    """The training length, and the longer one."""
    found = view.values("length", {"protocol": "mechanism"})
    return min(found), max(found)


def rows(view: View) -> list[Row]:
    """The scores that were looked into."""
    names = view.values("row", {"protocol": "mechanism"})
    return [Row(name, {"row": name}) for name in ranked(names, VARIANT_ORDER)]


def _near(view: View, **more: object) -> dict[str, object]:
    return {"protocol": "mechanism", "length": _lengths(view)[0], "factor.received": None, **more}


def columns(view: View) -> Sequence[Column]:
    """Correlations, the spread of norms, the range of cosines at both lengths."""
    near, far = _lengths(view)
    at = ((1.0, _near(view)),)
    found = [
        Column("correlation", CORRELATION.title, plain=_correlation),
        Column("heads", "heads + / − / all", plain=_heads),
        Column("raw_correlation", RAW.title, RAW, at),
        Column("spread", SPREAD.title, SPREAD, at),
    ]
    for key, length in (("near", near), ("far", far)):
        for share in QUANTILES:
            found.append(
                Column(
                    f"cosine_{key}_{share:g}",
                    f"cosine, {share:.1%} at {length:,}",
                    cosine_quantile(share),
                    ((1.0, _near(view, length=length)),),
                )
            )
        found.append(Column(f"ends_{key}", f"least, largest at {length:,}", plain=_ends(length)))
    return [*found, Column("outside", f"outside at {far:,}, %", plain=_outside)]


@cache
def cosine_quantile(share: float) -> Statistic:
    """A quantile of the cosines, the mean over heads."""

    def value(above: Array, below: Array, *whole: Array) -> Array:
        heads = above.reshape(*above.shape[:-1], -1, BINS)
        return np.asarray(crossing(heads, share, (-1.0, 1.0)).mean(-1))

    return Statistic("cosine", "cosine", value, "", 2, None)


def outside(near: Sums) -> Statistic:
    """The share (%) of cosines in bins that hold none of the cosines at L, but for their tails."""
    counts = near.sum.sum((0, 1)).reshape(-1, BINS)
    shares = counts.cumsum(-1) / counts.sum(-1, keepdims=True)
    before = np.concatenate((np.zeros((len(shares), 1)), shares[:, :-1]), axis=1)
    allowed = ((shares > TAIL) & (before < 1 - TAIL)).reshape(-1)

    def value(above: Array, below: Array, *whole: Array) -> Array:
        return np.asarray(100 * np.where(allowed, 0.0, above).sum(-1) / above.sum(-1))

    return Statistic("cosine", "outside", value, "%", 2, None)


def _correlation(view: View, row: Row) -> Cell:
    where = {**row.where, **_near(view)}
    sums = view.sums(CORRELATION.name, where)
    if sums is None:
        return Cell("–")
    if not sums.of.any():
        return Cell("one norm")
    found = view.estimate(CORRELATION, where)
    return Cell(shown(found, 2), found)


def _heads(view: View, row: Row) -> Cell:
    """Heads whose own interval lies above 0, below 0, and how many there are."""
    where = {**row.where, **_near(view)}
    sums = view.sums(CORRELATION.name, where)
    if sums is None or not sums.of.any():
        return Cell("–")
    each = [
        view.estimate(CORRELATION, {**where, "layer": layer, "head": head})
        for layer, head, _, _ in sums.bins
    ]
    above = sum(found is not None and found.above_zero for found in each)
    below = sum(found is not None and found.below_zero for found in each)
    return Cell(f"{above} / {below} / {len(each)}")


def _ends(length: int) -> Callable[[View, Row], Cell]:
    def cell(view: View, row: Row) -> Cell:
        chosen = view.frame.filter(row=row.where["row"], length=length, protocol="mechanism")
        least = chosen.filter(statistic="least_cosine")["sum"].to_list()
        largest = chosen.filter(statistic="largest_cosine")["sum"].to_list()
        return Cell(f"{min(least):.2f}, {max(largest):.2f}" if least else "–")

    return cell


def _outside(view: View, row: Row) -> Cell:
    near, far = (
        view.sums("cosine", {**row.where, **_near(view, length=n)}) for n in _lengths(view)
    )
    if near is None or far is None:
        return Cell("–")
    statistic = outside(near)
    found = view.estimate(statistic, {**row.where, **_near(view, length=_lengths(view)[1])})
    return Cell(shown(found, 2), found)


def claims(view: View) -> list[Claim]:
    """The source's explanation, sentence by sentence."""
    near, far = _lengths(view)
    found = []
    baseline = _near(view, row="Baseline")
    found.append(
        Claim(
            "without a norm a key's size decides how much attention it receives",
            "kexue 9859",
            "Baseline: rank correlation of ‖k‖ and attention received",
            CORRELATION,
            (Term(1.0, baseline),),
        )
    )
    for row in ("Baseline", "KNA", "KNA-NoPE"):
        ends = [_near(view, row=row, length=length) for length in (far, near)]
        found.append(
            Claim(
                f"on longer text {row}'s cosines reach further"
                + (
                    " (KeyNorm widens what is trained, so they should not)"
                    if row != "Baseline"
                    else ""
                ),
                "kexue 9859",
                f"{row}: {1 - TAIL:.1%} quantile of cos(q, k), at {far:,} − at {near:,}",
                cosine_quantile(1 - TAIL),
                (Term(1.0, ends[0]), Term(-1.0, ends[1])),
            )
        )
    found.append(
        Claim(
            "KeyNorm widens the range of cosines that training reaches",
            "kexue 9859",
            f"{1 - TAIL:.1%} quantile at {near:,}: KNA − Baseline",
            cosine_quantile(1 - TAIL),
            (Term(1.0, _near(view, row="KNA")), Term(-1.0, baseline)),
        )
    )
    return found


def figures(view: View) -> list[Figure]:
    """Norms against attention, cosines at both lengths, and their ranges."""
    near, far = _lengths(view)
    found: list[Figure] = [_densities(view)]
    quantiles = [c for c in columns(view) if c.key.startswith("cosine_")]
    cells = {c.key: [c.cell(view, row).estimate for row in rows(view)] for c in quantiles}
    found.append(
        Intervals(
            "cosine_ranges",
            "The range of cos(q, k), mean over heads",
            tuple(row.label for row in rows(view)),
            tuple(IntervalColumn(c.title, tuple(cells[c.key])) for c in quantiles),
        )
    )
    lines = []
    for row in rows(view):
        heights = []
        for length in (near, far):
            sums = view.sums("cosine", {**row.where, **_near(view, length=length)})
            if sums is not None:
                counts = sums.sum.sum((0, 1)).reshape(-1, BINS).sum(0)
                heights.append(tuple(float(v) for v in counts / counts.sum()))
        lines.append(DensityRow(row.label, -1.0, 1.0, tuple(heights), (f"{near:,}", f"{far:,}")))
    title = f"Cosines at {near:,} and at {far:,} tokens, all heads"
    found.append(Density("cosines", title, tuple(lines), "cos(q, k)"))
    return found


def _densities(view: View) -> Figure:
    """The share of keys by their norm, and the mean attention that keys of that norm receive."""
    labels, values, texts, edges = [], [], [], []
    for row in rows(view):
        chosen = view.frame.filter(row=row.where["row"], statistic="density")
        table = (
            chosen.group_by("bin")
            .agg(
                ((pl.col("factor.received") * pl.col("sum")).sum() / pl.col("sum").sum()).alias(
                    "mean"
                ),
                pl.col("sum").sum(),
            )
            .sort("bin")
        )
        edges = table["bin"].to_list()
        total = float(table["sum"].sum()) or 1.0
        labels.append(row.label)
        line = [m if n / total > 1e-4 else None for m, n in table.select("mean", "sum").rows()]
        values.append(tuple(None if v is None or not np.isfinite(v) else v for v in line))
        texts.append(("",) * len(line))
    return Grid(
        "key_norms_and_attention",
        "Attention received (log2 over uniform) by the key's norm",
        tuple(labels),
        tuple(f"{2**edge:.2f}" for edge in edges),
        tuple(values),
        tuple(texts),
        x_title="‖k‖ over the text's mean",
        scale_title="mean log2 of attention received over uniform",
    )


PAGE = Page(
    title="Key norms, attention and cosines",
    question="Does a key's norm decide how much attention it receives, and do cosines leave their "
    "trained range on longer text?",
    sources=("kexue.fm/archives/9859",),
    tables=(
        Table(
            "table",
            "",
            rows,
            columns,
            notes=(
                "rank correlation: Spearman's, between ‖k_j‖ as the score sees it and the "
                "attention that key j receives from the next L/2 queries relative to uniform "
                "attention, within a text; mean over layers, heads and texts. heads + / −: those "
                "whose own interval lies above or below 0.",
                "before the norm: the same with the key as it enters the score; a norm cannot hand "
                "it on.",
                "spread: standard deviation of ‖k_j‖ over its mean, within a text.",
                "cosine: cos(q_i, k_j) as the score has them, quantiles, mean over heads; least "
                "and largest of all heads.",
                f"outside: share of the pairs at the longer length whose cosine lies outside the "
                f"range of its head at L ({TAIL:.1%} left out at either end).",
            ),
        ),
    ),
    claims=claims,
    figures=figures,
)

STUDY = Study(
    name=KIND,
    help="Test the source's explanation: key norms against attention, and cosines at L and 8 L."
    "\n\nTrains each score and counts, by hooks on the trained model, how ‖k_j‖ ranks with the "
    "attention that key j receives, and the range of cos(q, k) at L and at 8 L. A table and "
    "figures, with intervals over documents (and seeds).",
    resolve=resolve,
    cells=(MechanismCell,),
    page=PAGE,
    variants="Trained scores, by commas. [default: Baseline, KNA, KNA-NoPE, and QKLayerNorm and "
    "QKRMSNorm with and without gain]",
    examples=(
        ("--preset smoke", "the whole path, small"),
        ("", "the study itself; `--plan` says how long it takes here"),
        ("--variants Baseline,KNA --seeds 3", "two scores, three models each"),
        ("--set mechanism.multiple=16 --plan", "read to 16 L: its cost"),
    ),
    collect=measured_below,
)
