"""Why does KeyNorm handle longer text: do key norms decide attention, do cosines leave their range?

The source's explanation: without a norm, a key's length decides how much attention it receives, so
cos(q, k) is trained badly and leaves its trained range on longer text (kexue.fm/archives/9859).

Measured here, in models with and without norms: ‖k_j‖ against the attention that key j receives,
and the cosines at L and at 8 L. Also what the source leaves open: ‖k_j‖ against the position j, and
whether unseen positions cost more than cosines out of range.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import polars as pl
from pydantic import Field

from normattn.errors import InputError
from normattn.kernels.cosines import BINS
from normattn.lab.data.tokens import TokenData
from normattn.lab.data.windows import EvaluationSet, natural_set
from normattn.lab.diagnostics.keys import TAIL
from normattn.lab.diagnostics.mechanism import READINGS, measure_mechanism
from normattn.lab.evaluation.scorer import weights_digest
from normattn.lab.report.figures import Curves, Figure, Line, Panel
from normattn.lab.report.tables import Column, Row, Table
from normattn.lab.report.view import View, points
from normattn.lab.stats import LONGEST, SHORTEST, Metric
from normattn.lab.stats.arrays import Array
from normattn.lab.stats.metrics import crossing, mean
from normattn.lab.studies.base import Claim, Study
from normattn.lab.studies.language import TextSetting, evaluation_cost
from normattn.lab.studies.lm_report import VARIANT_ORDER, interval_figure, ranked
from normattn.lab.studies.preset import EvaluationSettings, Preset, load_preset
from normattn.lab.sweep.run import MeasuredRun, Progress, Request, Sweep
from normattn.lab.training import TrainingConfig
from normattn.lab.training.planning import Cost
from normattn.settings import Settings

KIND = "mechanism"
VARIANTS = (
    *("Baseline", "KNA", "KNA-NoPE"),
    *("QKLayerNorm", "QKLayerNorm(gain=false)", "QKRMSNorm", "QKRMSNorm(gain=false)"),
)
UNUSED = tuple(f"evaluation.{n}" for n in ("protocols", "max_windows", "max_tokens", "precision"))
MAX_TOKENS = 4096
"""Tokens in a batch; affects results only by rounding."""
WEIGHT = 11
"""The cost of measuring a text, in forward passes (found: 7 to 12). Texts are read three times, and
scores are computed twice more, in blocks and in float64."""


class MechanismSettings(Settings):
    """Settings of `reproduce mechanism`: the largest number of texts."""

    max_windows: int = Field(default=64, ge=1)


class MechanismPreset(Preset):
    """A shared preset with the settings of this study."""

    mechanism: MechanismSettings = MechanismSettings()


class MechanismRun(MeasuredRun):
    """One trained score, and statistics of its layers on held-out text."""

    training_class: ClassVar[type[TrainingConfig]] = TrainingConfig
    record, phase = KIND, "diagnostics"
    kind: Literal["mechanism"] = "mechanism"
    evaluation: EvaluationSettings
    mechanism: MechanismSettings

    def cost(self, config: TrainingConfig) -> Cost:
        """The cost of measuring all texts."""
        windows = WEIGHT * self.mechanism.max_windows
        return evaluation_cost(config, self.evaluation.multiples[-1:], windows)

    def measure(
        self, folder: Path, config: TrainingConfig, data: TokenData, progress: Progress
    ) -> pl.DataFrame:
        """Measure keys, cosines and attention on held-out text."""
        model = self.load_trained(folder, config)
        return measure_mechanism(
            model,
            self.texts(data, config.model.train_length),
            seed=config.seed,
            weights=weights_digest(model),
            tokens_per_batch=MAX_TOKENS,
            progress=lambda done, total: progress(done, total, ""),
        )

    def texts(self, data: TokenData, length: int) -> EvaluationSet:
        """Held-out text of the longest tested length."""
        evaluation, sampling = self.evaluation, (self.mechanism.max_windows, self.evaluation.seed)
        split, longest = data.split(evaluation.split), evaluation.multiples[-1]
        return natural_set("non_repeated", split, length, longest, *sampling)


def resolve(request: Request) -> Sweep:
    """The sweep of a request; raises `InputError` as `keynorm.resolve` does."""
    preset = load_preset(request, KIND, MechanismPreset, UNUSED)
    setting = TextSetting.of(preset, {"multiples": preset.evaluation.ends})
    runs = [
        setting.run_of(MechanismRun, score, mechanism=preset.mechanism)
        for score in setting.canonical_scores(request.variants or VARIANTS)
    ]

    def sets(data: TokenData, length: int, settings: EvaluationSettings) -> list[EvaluationSet]:
        return [runs[0].texts(data, length)]

    return setting.sweep(request, KIND, runs, sets=sets, mechanism=preset.mechanism)


# Metrics

SOURCE, SOURCE_OPEN = "kexue 9859", "kexue 9859, left open"
QUANTILES = (TAIL, 0.25, 0.5, 0.75, 1 - TAIL)
AT_L, LONGER = ({"protocol": KIND, "length": length} for length in (SHORTEST, LONGEST))


@cache
def cosine_quantile(share: float) -> Metric:
    """A quantile of the cosines, averaged over heads."""

    def value(counts: Array, of: Array, *whole: Array) -> Array:
        by_head = counts.reshape(*counts.shape[:-1], -1, BINS)
        return np.asarray(crossing(by_head, share, (-1.0, 1.0)).mean(-1))

    return Metric("cosine", "cosine", value, "", 2)


def _share(part: Array, whole: Array) -> Array:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(whole > 0, part / whole, np.nan)


def _outside(pairs: Array, of: Array, *whole: Array) -> Array:
    """The share (%) of pairs outside the trained range; bins alternate inside and outside."""
    return 100 * _share(pairs[..., 1::2].sum(-1), pairs.sum(-1))


def _recovered(correct: Array, tokens: Array, *whole: Array) -> Array:
    """The share of the accuracy lost on longer text that clamped positions recover."""
    alone, unmodified, clamped = np.moveaxis(_share(correct, tokens), -1, 0)
    return _share(clamped - unmodified, alone - unmodified)


CORRELATION = mean("correlation", "rank correlation").at(AT_L)
# Bins: trained distances inside and outside the range, then longer distances likewise.
NEAR, FAR = (
    Metric("pairs", "", _outside, "%").at(LONGER).between((first, first + 2.0))
    for first in (0.0, 2.0)
)
FURTHER = FAR - NEAR
NEAR_OUTSIDE, FAR_INSIDE, FAR_OUTSIDE = (
    mean("attention", "", scale=100.0).at(LONGER).between((region, region + 1.0))
    for region in (1.0, 2.0, 3.0)
)
BEYOND = Column("beyond", "attention beyond the training length, %", FAR_INSIDE + FAR_OUTSIDE)
RECOVERED = Metric("last_accuracy", "share recovered", _recovered).at(LONGER)


def last_tokens(name: str, reading: str) -> Metric:
    """The accuracy (%) or the loss of the last L tokens under one of `READINGS`."""
    scale, digits = (100.0, 2) if name == "accuracy" else (1.0, 3)
    start = float(READINGS.index(reading))
    return mean(f"last_{name}", "", digits, scale).at(LONGER).between((start, start + 1))


def product_between(low: int, high: int) -> Metric:
    """The mean of q_i · k_j, before biases, over pairs at these distances, layers and heads."""
    return mean("product", "mean q · k").between((float(low), float(high)))


# Tables


def lengths(view: View) -> tuple[int, int]:
    """The training length and the longer one; raises `InputError` where no model was measured."""
    measured = view.values("length", {"protocol": KIND})
    if not measured:
        raise InputError("there is nothing to report yet: no trained model was measured")
    return min(measured), max(measured)


def rows(view: View, statistic: str = "cosine") -> list[Row]:
    """A row for each score of which a statistic was measured."""
    names = view.values("row", {"protocol": KIND, "statistic": statistic})
    return [Row(name, {"row": name}) for name in ranked(names, VARIANT_ORDER)]


def columns(view: View) -> list[Column]:
    """Correlations, the spread of norms, and quantiles of cosines at both lengths."""
    near, far = lengths(view)
    made = [Column("correlation", CORRELATION.title, CORRELATION, without="one norm")]
    for metric in (
        mean("raw_correlation", "correlation before the norm"),
        mean("spread", "spread of ‖k‖"),
        mean("mean_direction", "energy in the mean key, %", scale=100.0),
    ):
        made.append(Column(metric.name, metric.title, metric.at(AT_L)))
    for end, length, where in (("near", near, AT_L), ("far", far, LONGER)):
        for share in QUANTILES:
            key, title = f"cosine_{end}_{share:g}", f"cosine, {share:.1%} at {length:,}"
            made.append(Column(key, title, cosine_quantile(share).at(where)))
    return made


def _distances(view: View) -> list[tuple[int, int]]:
    """The octaves of distance over which products were measured."""
    where = {"protocol": KIND, "statistic": "product"}
    edges = {*view.values("bin", where), *view.values("bin_end", where)}
    return list(pairwise(sorted(map(int, edges))))


def _profile_columns(view: View) -> list[Column]:
    near, far = lengths(view)
    columns = []
    for low, high in _distances(view):
        title = f"{low:,} … {high - 1:,}" if high - low > 1 else str(low)
        columns.append(Column(f"product_{low}", title, product_between(low, high).at(LONGER)))
    beyond = (product_between(near, far) - product_between(near // 2, near)).at(LONGER)
    return [*columns, Column("rebound", "beyond the training length − octave before", beyond)]


def _layer_rows(view: View) -> list[Row]:
    where = {"protocol": KIND, "statistic": "attention"}
    return [
        Row(f"{row.label}, layer {layer + 1}", {**row.where, "layer": layer})
        for row in rows(view, "attention")
        for layer in view.values("layer", {**where, **row.where})
    ]


def _clamped_columns() -> Iterator[Column]:
    for name in ("accuracy", "loss"):
        metrics = {reading: last_tokens(name, reading) for reading in READINGS}
        for reading, metric in metrics.items():
            yield Column(f"{name}_{reading}", f"{name}, {reading}", metric)
        for first, second in (("unmodified", "alone"), ("clamped", "unmodified")):
            key, title = f"{name}_{first}_less_{second}", f"{name}, {first} − {second}"
            yield Column(key, title, metrics[first] - metrics[second])
    yield Column("recovered", RECOVERED.title, RECOVERED)


TABLES = (
    Table(
        "table",
        "",
        rows,
        columns,
        main=("correlation", "spread", f"cosine_near_{1 - TAIL:g}", f"cosine_far_{1 - TAIL:g}"),
        notes=(
            "Rank correlation: Spearman's, of ‖k_j‖ with the attention that key j receives from "
            "the next L/2 queries, relative to uniform attention, within a text. Before the norm: "
            "of the key as it enters the score.",
            "Spread: standard deviation of ‖k_j‖ over its mean, within a text. Energy in the mean "
            "key: of the keys divided by their lengths, before positions.",
            "Cosine: quantiles of cos(q_i, k_j), averaged over heads.",
        ),
    ),
    Table(
        "distances",
        "Where do cosines leave their trained range?",
        lambda view: rows(view, "pairs"),
        (
            Column("near_outside", "pairs outside, trained distances, %", NEAR),
            Column("far_outside", "pairs outside, longer distances, %", FAR),
            Column("further", "difference", FURTHER),
            Column("near_attention", "attention outside, trained distances, %", NEAR_OUTSIDE),
            Column("far_attention", "attention outside, longer distances, %", FAR_OUTSIDE),
            Column("far_inside", "attention inside, longer distances, %", FAR_INSIDE),
            BEYOND,
        ),
        notes=(
            "Outside: the cosine is outside the range that its head has at the training length L "
            f"({TAIL:.1%} left out at either end). Trained distances: i − j < L.",
            "Attention: of all attention of the queries at i ≥ L, mean over heads.",
        ),
    ),
    Table(
        "profile",
        "How large are logits by distance?",
        lambda view: rows(view, "product"),
        _profile_columns,
        notes=(
            "The mean of q_i · k_j, the logit before biases, over the pairs at these distances in "
            "the longer texts, all layers and heads.",
        ),
    ),
    Table(
        "layers",
        "Which layers attend beyond the training length?",
        _layer_rows,
        (BEYOND,),
        notes=("Of all attention of the queries at i ≥ L, the training length; mean over heads.",),
    ),
    Table(
        "clamped",
        "What do unseen positions cost?",
        lambda view: rows(view, "last_accuracy"),
        tuple(_clamped_columns()),
        notes=(
            "Accuracy in % and loss in nats of the last L tokens of each text. Alone: without "
            "context. Unmodified: after the whole text. Clamped: the same, with relative positions "
            "of at most L − 1, so that none is unseen.",
            "Share recovered: of the accuracy lost after the whole text. The rest was not lost to "
            "unseen positions.",
        ),
    ),
)

# Claims and figures

WIDENED = " (KeyNorm widens what is trained, so they should not)"


def claims(view: View) -> Iterator[Claim]:
    """The source's explanation, sentence by sentence, then what the source leaves open."""
    near, far = lengths(view)
    highest = cosine_quantile(1 - TAIL)
    yield Claim(
        "without a norm a key's size decides how much attention it receives",
        CORRELATION.at(variant="Baseline"),
        *(SOURCE, "Baseline: rank correlation of ‖k‖ and attention received"),
    )
    for row, remark in (("Baseline", ""), ("KNA", WIDENED), ("KNA-NoPE", WIDENED)):
        yield Claim(
            f"on longer text {row}'s cosines reach further{remark}",
            highest.at(LONGER, variant=row) - highest.at(AT_L, variant=row),
            *(SOURCE, f"{row}: {1 - TAIL:.1%} quantile of cos(q, k), at {far:,} − at {near:,}"),
        )
    yield Claim(
        "KeyNorm widens the range of cosines that training reaches",
        highest.at(AT_L, variant="KNA") - highest.at(AT_L, variant="Baseline"),
        *(SOURCE, f"{1 - TAIL:.1%} quantile at {near:,}: KNA − Baseline"),
    )
    yield Claim(
        "a key's norm carries its position, whichever way",
        mean("position_size", "size").at(AT_L, variant="Baseline"),
        *(SOURCE_OPEN, "Baseline: rank correlation of ‖k‖ and its position, its size"),
    )
    for row in ("Baseline", "KNA"):
        yield Claim(
            f"{row}'s cosines leave their trained range at unseen distances rather than at trained "
            "ones",
            FURTHER.at(variant=row),
            *(SOURCE_OPEN, f"{row}: share of pairs outside, at i − j ≥ {near:,} − nearer"),
        )
    share = f"share of the accuracy lost at {far:,} tokens that clamped positions recover"
    for row in ("Baseline", "KNA"):
        sentence = f"unseen positions cost {row} accuracy on longer text"
        yield Claim(sentence, RECOVERED.at(variant=row), SOURCE_OPEN, f"{row}: {share}")


def figures(view: View) -> Iterator[Figure]:
    """The accuracy of the last tokens under every reading, and the mean product by distance."""
    near, far = lengths(view)
    title = f"Accuracy of the last {near:,} of {far:,} tokens, %"
    accuracies = [Column(r, f"accuracy, {r}, %", last_tokens("accuracy", r)) for r in READINGS]
    yield interval_figure(view, "last_accuracy", title, rows(view, "last_accuracy"), accuracies)
    products = {low: product_between(low, high).at(LONGER) for low, high in _distances(view)}
    lines = []
    for row in rows(view, "product"):
        # The axis begins at a quarter of L.
        by_distance = ((n, p.at(row.where)) for n, p in products.items() if n >= near // 4)
        lines.append(Line(row.label, points(view, by_distance)))
    panel = Panel("", tuple(lines), "distance i − j", "mean q · k", log_x=True, train_length=near)
    yield Curves("product_by_distance", "Mean of q · k by distance", (panel,))


STUDY = Study(
    "mechanism",
    "Does a key's norm decide how much attention it receives, and do cosines leave their "
    "trained range on longer text?",
    title="Key norms, attention and cosines",
    help="Test the KeyNorm post's explanation: key norms, attention, and cosines at L and 8 L.\n\n"
    "Trains each score and measures three things: the rank correlation of ‖k_j‖ with the attention "
    "that key j receives and with j, the range of cos(q, k) at L and 8 L, and what positions cost "
    "that never occurred in training.",
    sources=("kexue.fm/archives/9859",),
    resolve=resolve,
    runs=(MechanismRun,),
    tables=TABLES,
    claims=claims,
    figures=figures,
    variants_help="Trained scores, separated by commas. [default: Baseline, KNA, KNA-NoPE, and "
    "QKLayerNorm and QKRMSNorm with and without gain]",
    examples=(('--set "evaluation.multiples=[1,16]" --plan', "the cost of evaluating at 16 L"),),
)
