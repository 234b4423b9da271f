"""Ablations of KeyNorm: changes of the setting (*factors*) and of the score (*questions*).

Both measure one number, on the same final tokens of held-out text:

    change = accuracy after 8 L − accuracy after L

*factors*: the source's 100M GAU with KNA is about as accurate at 8 L as at L (kexue 9859); the
small model of the preset `laptop` is not. Baseline and KNA are trained in the preset's setting and
with one change each, or several joined by + (`gau+no-tiling`).

*questions*: four that the source leaves open. Each score is compared with a reference, at L and by
its change. KNA stands for KRMSNorm without a gain: √d·k/‖k‖ at scale 1/√d is k/‖k‖ at scale 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from normattn.errors import InputError, unknown_name
from normattn.lab.report.figures import Figure
from normattn.lab.report.tables import EMPTY_CELL, Cell, Column, Row, Table, text_column
from normattn.lab.report.view import View
from normattn.lab.stats import Metric, Sums
from normattn.lab.studies import lm_report as lm
from normattn.lab.studies.base import Claim, Study
from normattn.lab.studies.keynorm import MATTERS
from normattn.lab.studies.language import TextRun, TextSetting
from normattn.lab.studies.preset import Preset, load_preset, overridden
from normattn.lab.sweep.collect import collect_measurements
from normattn.lab.sweep.config import merged, value_at
from normattn.lab.sweep.run import Request, Sweep

# factors: changes of the setting

SCORES = ("Baseline", "KNA")
CHANGED = "factor.change"
AS_PRESET = "preset"
# At any head dimension, half of the pairs of a RoPE with base 130 complete a turn within 64 tokens,
# as in the source's setting (512 tokens). With base 10,000, a quarter do.
TURNING = "RoPE(base=130)"


@dataclass(frozen=True)
class Change:
    """One change: `settings` by dotted name, and `times`, factors for the preset's numbers.

    `position` is appended to the score's name. A setting of None takes its default.
    """

    words: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    times: Mapping[str, float] = field(default_factory=dict)
    position: str = ""

    def applied(self, training: Mapping[str, Any]) -> dict[str, Any]:
        """The training settings with this change; unchanged if they already have its block."""
        base, changes = dict(training), dict(self.settings)
        for name, factor in self.times.items():
            value = value_at(training, name)
            if value is None:
                raise InputError(f"{self.words}: {name} has no value here that could be multiplied")
            # Steps are rounded down.
            if isinstance(value, int) and name != "steps" and not (value * factor).is_integer():
                raise InputError(
                    f"{self.words}: {name} is {value} here, and {factor:g} of it is no whole "
                    f"number; set training.{name} to a multiple of {1 / factor:g}"
                )
            changes[name] = type(value)(value * factor)
        if changes.get("model.block") == training["model"].get("block", "mha"):
            return base
        if "optimiser" in changes:  # Another optimiser has other settings.
            base.pop("optimiser", None)
        return overridden(base, changes)


HEADS, LENGTH = "model.heads", "model.train_length"
CHANGES: Mapping[str, Change] = {
    AS_PRESET: Change("the unchanged preset"),
    "base-130": Change("RoPE with base 130", position=TURNING),
    # As many tokens per step.
    "length-2x": Change("twice the training length", times={LENGTH: 2.0, "batch_size": 1 / 2}),
    "length-4x": Change("four times the training length", times={LENGTH: 4.0, "batch_size": 1 / 4}),
    "no-tiling": Change("no repeated text", {"data.tiled_fraction": 0.0}),
    "steps-third": Change("a third of the steps", times={"steps": 1 / 3}),
    "steps-half": Change("half of the steps", times={"steps": 0.5}),
    "steps-4x": Change("four times the steps", times={"steps": 4.0}),
    "one-head": Change("one head", {HEADS: 1}),
    "heads-2x": Change("heads twice as large, base 130", times={HEADS: 1 / 2}, position=TURNING),
    "heads-4x": Change("heads 4 times as large, base 130", times={HEADS: 1 / 4}, position=TURNING),
    "deepnorm": Change("DeepNorm", {"model.placement": "DeepNorm"}),
    "preln": Change("PreLN", {"model.placement": "PreLN"}),
    # Tiger's learning rate is relative to the size of each parameter (kexue 9512). It was not tuned
    # here, so this row shows what this rate does, not what Tiger can do.
    "tiger": Change(
        "Tiger at 5e-3, not searched for", {"optimiser": {"name": "tiger", "lr": 5e-3}}
    ),
    "gau": Change("gated attention units", {"model.block": "gau"}),
    "separate-qk": Change(
        "linear W_q and W_k in place of γ", {"model.separate_qk": True, "model.gamma_std": None}
    ),
    "third-rope": Change("a third of the pairs turn", position="PRoPE(fraction=0.33)"),
    "mha": Change("multi-head attention and SwiGLU", {"model.block": "mha", HEADS: 4}),
    "layers-6": Change("6 layers", {"model.layers": 6}),
    "layers-12": Change("12 layers", {"model.layers": 12}),
}


def _change_runs(setting: TextSetting, change: str) -> list[TextRun]:
    """The runs of both scores under changes that + joins; `InputError` for an unknown one."""
    training, positions = dict(setting.training), dict[str, None]()
    for name in change.split("+"):
        if name not in CHANGES:
            raise unknown_name("change", name, CHANGES, ", and several of them joined by +")
        training = CHANGES[name].applied(training)
        positions |= {CHANGES[name].position: None}
    rotary = "".join(f"-{position}" for position in positions if position)
    return [
        setting.run(
            score,
            variant=f"{change}-{score}",
            row=score,
            factors={"change": change, "row": score},
            training=merged(training, {"model.score": score + rotary}),
        )
        for score in SCORES
    ]


def resolve_factors(request: Request) -> Sweep:
    """The sweep of *factors*: a run for each change, score and seed; `--variants` chooses changes.

    Raises `InputError` for an unknown change and for settings that a change makes impossible.
    """
    preset = load_preset(request, "factors", Preset)
    setting = TextSetting.of(preset, {"multiples": preset.evaluation.ends})
    unchanged = [run.training_config for run in _change_runs(setting, AS_PRESET)]
    runs, skipped = list[TextRun](), []
    for change in dict.fromkeys(request.variants or CHANGES):
        try:
            changed = _change_runs(setting, change)
            configs = [run.training_config for run in changed]
            if configs == unchanged and change != AS_PRESET:
                raise InputError(f"{change} changes nothing in the preset {preset.name}")
            runs += changed
        except InputError as error:
            if request.variants:
                raise
            skipped.append(f"{change} is left out: {error}")
    return setting.sweep(request, "factors", runs, skipped)


def _change_rows(view: View) -> list[Row]:
    evaluated = view.values(CHANGED, {"protocol": "last_segment", "method": ""})
    return [
        Row(" + ".join(CHANGES[single].words for single in name.split("+")), {CHANGED: name})
        for name in lm.ranked(evaluated, tuple(CHANGES))
    ]


CHANGE_OF = {score: lm.UNMODIFIED_CHANGE.at({"factor.row": score}) for score in SCORES}
"""The change of each score's accuracy from L to 8 L."""
CHANGE_COLUMNS = (
    *(
        Column(f"{score}_change", f"change of {score}", change)
        for score, change in CHANGE_OF.items()
    ),
    Column("gap", "change of KNA − of Baseline", CHANGE_OF["KNA"] - CHANGE_OF["Baseline"]),
)


def _change_columns(view: View) -> list[Column]:
    def within_training_length(sums: Sums) -> Sums:
        # The digest of the data identifies the training length, as each has different documents.
        length = view.values("train_length", {"data": sums.data})[0]
        return sums.at(slice(sum(end <= length for *_, end in sums.bins)))

    def effect(view: View, row: Row) -> Cell:
        metric = _effect(view, row)
        return EMPTY_CELL if metric is None else Column("", "", metric).cell(view, Row("", {}))

    columns = []
    for score in SCORES:
        at_l = lm.ACCURACY.at({"factor.row": score}, protocol="train_length")
        seen = lm.SEEN.at({"factor.row": score}, protocol="repeated")
        copies = seen.between(within_training_length)
        columns.append(Column(f"{score}_at_l", f"{score} at the training length", at_l))
        columns.append(Column(f"{score}_copies", f"{score}, repeated text, seen", copies))
    return [*columns, *CHANGE_COLUMNS, Column("effect", "effect on KNA's change", plain=effect)]


def _effect(view: View, row: Row) -> Metric | None:
    """KNA's change under a change of the setting, minus its change in the unchanged preset.

    None for the latter, and where it was not evaluated on the same documents.
    """
    changed, unchanged = (
        set(view.values("unit", {CHANGED: name, "protocol": "last_segment"}))
        for name in (row.where[CHANGED], AS_PRESET)
    )
    if row.where[CHANGED] == AS_PRESET or not changed & unchanged:
        return None
    return CHANGE_OF["KNA"].at(row.where) - CHANGE_OF["KNA"].at({CHANGED: AS_PRESET})


def _change_claims(view: View) -> Iterator[Claim]:
    """Claim for each change of the setting that KNA loses less with it."""
    for row in _change_rows(view):
        effect = _effect(view, row)
        if effect is not None:
            yield Claim(
                f"{row.label}: KNA loses less from the training length to the longest context",
                effect,
                "asked here, as kexue 9859 differs",
                "change of KNA − its change in the unchanged preset, same final tokens",
                matters=MATTERS,
            )


def _change_figures(view: View) -> list[Figure]:
    title = "Accuracy on the same final tokens: longest context − training length, in points"
    return [lm.interval_figure(view, "factors", title, _change_rows(view), CHANGE_COLUMNS)]


FACTORS = Study(
    "factors",
    "Which difference from the post's setting makes a small model with normalised keys "
    "lose accuracy past its training length?",
    title="Why KeyNorm decays",
    help="Train Baseline and KNA with one changed setting at a time, and evaluate at L and 8 L.\n\n"
    "The result is the change of accuracy on the same final tokens when the context grows. "
    "--variants selects changes; join several with +: " + ", ".join(CHANGES) + ".",
    sources=("kexue.fm/archives/9859",),
    resolve=resolve_factors,
    tables=(
        Table(
            "table",
            "",
            _change_rows,
            _change_columns,
            head="setting",
            intro="Token accuracy in %. Change: the same final tokens after the longest context "
            "minus after the training length, in points, with 95 % intervals over documents and "
            "seeds.",
            notes=(
                "Repeated text, seen: within the training length, only tokens whose answer occurs "
                "earlier. A model that has not learned to copy has little to lose.",
                "Effect: the change of KNA minus that in the unchanged preset, paired over "
                "documents and seeds. None where the two share no document.",
            ),
        ),
    ),
    claims=_change_claims,
    figures=_change_figures,
    collect=partial(collect_measurements, factors=("change", "row")),
    variants_help="Changes, separated by commas; join several with +. [default: each by itself]",
    examples=(("--seeds 3 --variants preset,gau+no-tiling+deepnorm", "several changes together"),),
)

# questions: changes of the score


@dataclass(frozen=True)
class Expected:
    """What a claim expects of a difference, in points; see `Claim`."""

    words: str
    sign: int = 1
    margin: float = 0.0


@dataclass(frozen=True)
class Question:
    """A question, and the pairs (score, reference) that answer it."""

    words: str
    pairs: tuple[tuple[str, str], ...]
    at_l: Expected = Expected("is better at the training length than")
    change: Expected = Expected("loses less from the training length to the longest context than")

    @property
    def rows(self) -> tuple[str, ...]:
        """All scores, references first."""
        references = (reference for _, reference in self.pairs)
        return tuple(dict.fromkeys([*references, *(row for row, _ in self.pairs)]))


QUESTIONS: Mapping[str, Question] = {
    "gain": Question(
        "Does a gain undo it?",
        (
            ("KRMSNorm", "KNA"),
            ("QKRMSNorm", "QKRMSNorm(gain=false)"),
            ("QKLayerNorm", "QKLayerNorm(gain=false)"),
        ),
        change=Expected("loses more from the training length to the longest context than", sign=-1),
    ),
    "learned-scale": Question(
        "Is a learned scale better?", (("QKNorm2020", "CosA"), ("Baseline-SSMax", "Baseline-logn"))
    ),
    "constant": Question(
        "Is another constant than CosA's 4 better?",
        tuple((f"CosA(c={c})", "CosA") for c in (2, 3, 3.5, 6)),
    ),
    "residual": Question(
        "Do residual scores go with normalised keys?",
        (("KNA-RealFormer", "KNA"), ("Baseline-RealFormer", "Baseline")),
        Expected(
            f"is as good at the training length (less than {lm.EQUAL:.0f} point worse) as",
            margin=lm.EQUAL,
        ),
        Expected(
            f"loses no more (by less than {MATTERS:.0f} points) from the training length to the "
            "longest context than",
            margin=MATTERS,
        ),
    ),
}


def resolve_questions(request: Request) -> Sweep:
    """The sweep of *questions*; `--variants` chooses questions.

    Raises `InputError` as `keynorm.resolve` does.
    """
    setting, rows = TextSetting.of(load_preset(request, "questions", Preset)), list[str]()
    for name in request.variants or QUESTIONS:
        if name not in QUESTIONS:
            raise unknown_name("question", name, QUESTIONS)
        rows += QUESTIONS[name].rows
    return setting.sweep(request, "questions", [*map(setting.run, setting.canonical_scores(rows))])


def _pair_rows(view: View) -> list[Row]:
    evaluated = set(view.values("row", lm.TRAINED))
    return [
        Row(f"{row} − {other}", {"row": row, "other": other, "question": question.words})
        for question in QUESTIONS.values()
        for row, other in question.pairs
        if {row, other} <= evaluated
    ]


def _pair_columns(view: View) -> list[Column]:
    def column(key: str, title: str, metric: Metric, difference: bool = True) -> Column:
        def cell(view: View, row: Row) -> Cell:
            first, second = (metric.at(variant=row.where[name]) for name in ("row", "other"))
            chosen = first - second if difference else first
            return Column(key, title, chosen).cell(view, Row("", {}))

        # The metric only tells figures to draw a line at 0 for differences.
        return Column(key, title, metric - metric if difference else metric, plain=cell)

    held_out = lm.at_longest(lm.ACCURACY, view, "non_repeated", method="")
    return [
        text_column("question", "question", lambda view, row: row.where["question"]),
        column("at_l", "at the training length", lm.AT_L, difference=False),
        column("change", "change", lm.UNMODIFIED_CHANGE, difference=False),
        column("at_l_difference", "difference at the training length", lm.AT_L),
        column("natural_difference", "difference on longer held-out text", held_out),
        column("change_difference", "difference in change", lm.UNMODIFIED_CHANGE),
    ]


def _pair_claims(view: View) -> Iterator[Claim]:
    for question in QUESTIONS.values():
        for row, other in question.pairs:
            at_l = f"{row} − {other} at the training length, accuracy"
            change = f"change of {row} − change of {other}, same final tokens"
            for metric, expected, matters, measured in (
                (lm.AT_L, question.at_l, lm.EQUAL, at_l),
                (lm.UNMODIFIED_CHANGE, question.change, MATTERS, change),
            ):
                yield Claim(
                    f"{row} {expected.words} {other}",
                    metric.at(variant=row) - metric.at(variant=other),
                    "left open in kexue 9859",
                    *(measured, expected.sign, matters, expected.margin),
                )


def _pair_figures(view: View) -> list[Figure]:
    columns = [c for c in _pair_columns(view) if c.key.endswith("_difference")]
    title, rows = "Differences of accuracy, in points", _pair_rows(view)
    intervals = lm.interval_figure(view, "questions", title, rows, columns)
    return [intervals, *lm.position_figures(view), lm.history_figure(view)]


STUDY = Study(
    "questions",
    "Does a gain undo what a norm of queries and keys does past the training length, is a "
    "learned scale or another constant better, and do residual scores help?",
    title="Gains, scales, constants and residual scores",
    help="Train scores with and without a gain, a learned scale, other constants and residual "
    "scores; evaluate each, unmodified, at up to 8 training lengths.\n\n--variants "
    "selects questions: " + ", ".join(QUESTIONS) + ".",
    sources=("kexue.fm/archives/9859",),
    resolve=resolve_questions,
    tables=(
        Table(
            "table",
            "",
            _pair_rows,
            _pair_columns,
            head="score − reference",
            intro="Token accuracy in % of the first score, and differences in points, "
            "paired over documents and seeds, with 95 % intervals.",
            notes=(
                "Change: the same final tokens after the longest context minus after the training "
                "length, in points.",
                "KNA is KRMSNorm without a gain.",
            ),
        ),
        lm.protocol_table(
            *("scores", "Every score"),
            notes=lambda view: (*lm.precondition(view, view.values("row", lm.TRAINED)), *lm.LEGEND),
        ),
    ),
    claims=_pair_claims,
    figures=_pair_figures,
    variants_help="Questions, separated by commas. [default: all]",
    examples=(
        ("--preset workstation", "on models that copy"),
        ("--variants constant --seeds 3", "one question, with intervals over three seeds"),
    ),
)
