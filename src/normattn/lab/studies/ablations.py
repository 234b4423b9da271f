"""What decides besides the norm of keys: changes of the setting, and of the score.

One number is watched, over held-out text of the same last tokens:

    change = accuracy(last segment after 8 L) − accuracy(last segment after L)

*factors*: the source's 100M GAU with KNA reads 8 L about as well as L (kexue 9859); the small MHA
model of the preset `laptop` does not. Baseline and KNA are trained in the preset's setting and with
one change each (joined by "+": `gau+no-tiling`). *questions*: four that the source leaves open.
Each score is compared with one other, at L and by its change. KRMSNorm without a gain is KNA, as
√d·k/‖k‖ at scale 1/√d is k/‖k‖ at scale 1, so KNA represents it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from normattn.errors import InputError, unknown_name
from normattn.lab.report.claims import Claim
from normattn.lab.report.figures import Figure
from normattn.lab.report.tables import NOTHING, Cell, Column, Row, Table, text_column
from normattn.lab.report.view import View
from normattn.lab.stats import Metric, Sums
from normattn.lab.studies import lm_report as lm
from normattn.lab.studies.base import Study
from normattn.lab.studies.keynorm import MATTERS
from normattn.lab.studies.language import TextRun, TextSetting
from normattn.lab.studies.methods import canonical
from normattn.lab.studies.preset import Preset, opened
from normattn.lab.sweep.collect import measured_below
from normattn.lab.sweep.config import merged, value_at
from normattn.lab.sweep.run import Request, Sweep
from normattn.models.config import without_foreign
from normattn.settings import Settings

# factors: changes of the setting

SCORES = ("Baseline", "KNA")
CHANGED = "factor.change"


AS_PRESET, ENGLISH = "preset", "english"
# Half of the pairs of a rotation of base 130 finish a turn within 64 tokens, a quarter of base
# 10,000, whatever the size of the head; in the source's setting (512 tokens) half do.
TURNING = "RoPE(base=130)"


@dataclass(frozen=True)
class Change:
    """One change: `settings` by dotted name, `times` as products of the preset's own numbers.

    `position` is written behind the score's name. A setting of None falls back to its default.
    """

    words: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    times: Mapping[str, float] = field(default_factory=dict)
    position: str = ""

    def applied(self, training: Mapping[str, Any]) -> dict[str, Any]:
        """The preset's training settings with this change; unchanged if it has that block."""
        for name in self.times:
            if value_at(training, name) is None:
                raise InputError(f"{self.words}: {name} has no value here that could be multiplied")
        scaled = {name: self._scaled(training, name) for name in self.times}
        changed = {**self.settings, **scaled}
        if changed.get("model.block") == training["model"].get("block", "mha"):
            return dict(training)
        kept = {**training, "model": without_foreign(training["model"], changed.get("model.block"))}
        if "optimiser" in changed:  # Another one has settings of its own.
            kept.pop("optimiser", None)
        return merged(kept, changed)

    def _scaled(self, training: Mapping[str, Any], name: str) -> Any:
        """A number of the preset times its factor; of steps the whole number below."""
        value, factor = value_at(training, name), self.times[name]
        product = value * factor
        if isinstance(value, int) and name != "steps" and not float(product).is_integer():
            raise InputError(
                f"{self.words}: {name} is {value} here, and {factor:g} of it is no whole number; "
                f"set training.{name} to a multiple of {1 / factor:g}"
            )
        return type(value)(product)


def _longer(times: int) -> Mapping[str, float]:
    """A longer training length with as many tokens in a step."""
    return {"model.train_length": float(times), "batch_size": 1 / times}


# Tiger's rate is relative to the size of each parameter (kexue 9512); not searched for in this
# setting, so that row says what this rate does, not what Tiger can do.
TIGER = {"optimiser": {"name": "tiger", "lr": 5e-3}}
HEADS = "model.heads"
CHANGES: Mapping[str, Change] = {
    AS_PRESET: Change("the unchanged preset"),
    "base-130": Change("RoPE with base 130", position=TURNING),
    "length-2x": Change("twice the training length", times=_longer(2)),
    "length-4x": Change("four times the training length", times=_longer(4)),
    "no-tiling": Change("no repeated text", {"data.tiled_fraction": 0.0}),
    "steps-third": Change("a third of the steps", times={"steps": 1 / 3}),
    "steps-half": Change("half of the steps", times={"steps": 0.5}),
    "steps-4x": Change("four times the steps", times={"steps": 4.0}),
    "one-head": Change("one head", {HEADS: 1}),
    "heads-2x": Change("heads twice as large, base 130", times={HEADS: 1 / 2}, position=TURNING),
    "heads-4x": Change("heads 4 times as large, base 130", times={HEADS: 1 / 4}, position=TURNING),
    "deepnorm": Change("DeepNorm", {"model.placement": "DeepNorm"}),
    "preln": Change("PreLN", {"model.placement": "PreLN"}),
    "tiger": Change("Tiger at 5e-3, not searched for", TIGER),
    "gau": Change("gated attention units", {"model.block": "gau"}),
    "separate-qk": Change(
        "linear W_q and W_k in place of γ", {"model.separate_qk": True, "model.gamma_std": None}
    ),
    "third-rope": Change("a third of the pairs turn", position="PRoPE(fraction=0.33)"),
    "mha": Change("multi-head attention and SwiGLU", {"model.block": "mha", HEADS: 4}),
    "layers-6": Change("6 layers", {"model.layers": 6}),
    "layers-12": Change("12 layers", {"model.layers": 12}),
    ENGLISH: Change("English text"),
}


class FactorsSettings(Settings):
    """`reproduce factors`: the corpus of the row of English text; without it no such row."""

    english: str = ""


class FactorsPreset(Preset):
    """A shared preset as this study reads it."""

    factors: FactorsSettings = FactorsSettings()


def _parts(change: str) -> list[Change]:
    """The single changes that a name joins; `InputError` names the nearest known one."""
    for name in change.split("+"):
        if name not in CHANGES:
            raise unknown_name("change", name, CHANGES, ", and several of them joined by +")
    return [CHANGES[name] for name in change.split("+")]


def _change_runs(setting: TextSetting, english: str, change: str) -> list[TextRun]:
    """Both scores under a change; `InputError` for English text without a corpus."""
    training = dict(setting.training)
    for part in _parts(change):
        training = part.applied(training)
    if ENGLISH in change.split("+"):
        if not english:
            raise InputError("no corpus of English text is given (--set factors.english=FOLDER)")
        training = merged(training, {"data.corpus": english})
    positions = dict.fromkeys(part.position for part in _parts(change) if part.position)
    rotary = "".join(f"-{position}" for position in positions)
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
    """One run for each change, score and seed; `--variants` chooses changes.

    Raises `InputError` for an unknown change and for settings that a change makes impossible. The
    row of English text needs `--set factors.english=CORPUS` and is left out without it.
    """
    preset = opened(request, "factors", FactorsPreset)
    english = preset.factors.english
    setting = TextSetting.of(preset, {"multiples": preset.evaluation.ends})
    made = partial(_change_runs, setting, english)
    plain = [run.training_config for run in made(AS_PRESET)]
    changes, skipped = [], []
    for change in dict.fromkeys(request.variants or CHANGES):
        try:
            if [run.training_config for run in made(change)] == plain and change != AS_PRESET:
                raise InputError(f"{change} changes nothing in the preset {preset.name}")
            changes.append(change)
        except InputError as error:
            if request.variants:
                raise
            skipped.append(f"{change} is left out: {error}")
    runs = [run for change in changes for run in made(change)]
    return setting.sweep(request, "factors", runs, skipped, english=english)


def _change_rows(view: View) -> list[Row]:
    """The changes whose models were read, the unchanged preset first."""
    known = view.values(CHANGED, {"protocol": "last_segment", "method": ""})
    return [
        Row(" + ".join(part.words for part in _parts(name)), {CHANGED: name})
        for name in lm.ranked(known, tuple(CHANGES))
    ]


def _change_of(score: str) -> Metric:
    """What a longer context does to a score."""
    return lm.UNMODIFIED_CHANGE.at({"factor.row": score})


def _change_columns(view: View) -> list[Column]:
    """How good the models are at L, whether they copy, and what a longer context does."""

    def within(sums: Sums) -> Sums:
        """The bins within the training length, of repeated text that ends beyond it."""
        # Models of other training lengths have other documents, and so another digest.
        length = view.values("train_length", {"data": sums.data})[0]
        return sums.at(slice(sum(end <= length for *_, end in sums.bins)))

    def effect(view: View, row: Row) -> Cell:
        if not _shares_documents(view, row):
            return NOTHING
        return Column("", "", _effect(row)).cell(view, Row("", {}))

    columns = []
    for score in SCORES:
        at_l = lm.ACCURACY.at({"factor.row": score}, protocol="train_length")
        copies = lm.SEEN.at({"factor.row": score}, protocol="repeated").between(within)
        columns.append(Column(f"{score}_at_l", f"{score} at L", at_l))
        columns.append(Column(f"{score}_copies", f"{score}, copies at L", copies))
    columns += [Column(f"{name}_change", f"change of {name}", _change_of(name)) for name in SCORES]
    gap = _change_of("KNA") - _change_of("Baseline")
    columns.append(Column("gap", "change of KNA − of Baseline", gap))
    return [*columns, Column("effect", "effect on KNA's change", plain=effect)]


def _effect(row: Row) -> Metric:
    """The change of KNA under a change of the setting, minus that in the unchanged preset."""
    ours = _change_of("KNA")
    return ours.at(row.where) - ours.at({CHANGED: AS_PRESET})


def _shares_documents(view: View, row: Row) -> bool:
    """Whether the unchanged preset was read too, in the same documents."""
    ours, theirs = (
        set(view.values("unit", {CHANGED: name, "protocol": "last_segment"}))
        for name in (row.where[CHANGED], AS_PRESET)
    )
    return row.where[CHANGED] != AS_PRESET and bool(ours & theirs)


def _change_claims(view: View) -> Iterator[Claim]:
    """Of every change whether it takes away KNA's loss."""
    for row in _change_rows(view):
        if _shares_documents(view, row):
            yield Claim(
                f"{row.label}: KNA loses less from L to the longest context",
                _effect(row),
                "asked here, as kexue 9859 differs",
                "change of KNA − its change in the unchanged preset, last segment",
                matters=MATTERS,
            )


def _change_figures(view: View) -> list[Figure]:
    """The change of either score under every change of the setting."""
    keys = ("Baseline_change", "KNA_change", "gap")
    drawn = [column for column in _change_columns(view) if column.key in keys]
    title = "Accuracy of the last segment after the longest context minus after L, in points"
    return [lm.intervals(view, "factors", title, _change_rows(view), drawn)]


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
            head="change",
            intro="Token accuracy in %; change: the last segment after the longest context minus "
            "after L, in points, with 95 % intervals over documents and seeds.",
            notes=(
                "copies at L: repeated text within the training length, the tokens whose answer "
                "stands earlier. A model that copies no better than it reads has little to lose.",
                "effect: the change of KNA minus that in the unchanged preset, paired over "
                "documents and seeds; none for a text that shares no document.",
            ),
        ),
    ),
    claims=_change_claims,
    figures=_change_figures,
    collect=partial(measured_below, factors=("change", "row")),
    variants_help="Changes, separated by commas; join several with +. [default: each by itself]",
    examples=(
        ("--seeds 3 --variants preset,gau+no-tiling+deepnorm", "several changes together"),
        ("--set factors.english=books/", "also train on English text"),
    ),
)

# questions: changes of the score


@dataclass(frozen=True)
class Expected:
    """What a sentence expects of a difference, in points; see `Claim`."""

    words: str
    sign: int = 1
    margin: float = 0.0


@dataclass(frozen=True)
class Question:
    """A question, and pairs of rows that answer it: the second is the reference of the first."""

    words: str
    pairs: tuple[tuple[str, str], ...]
    at_l: Expected = Expected("is better at the training length than")
    change: Expected = Expected("loses less from L to the longest context than")

    @property
    def rows(self) -> tuple[str, ...]:
        """The references come first."""
        others = (against for _, against in self.pairs)
        return tuple(dict.fromkeys([*others, *(row for row, _ in self.pairs)]))


QUESTIONS: Mapping[str, Question] = {
    "gain": Question(
        "Does a gain undo it?",
        (
            ("KRMSNorm", "KNA"),
            ("QKRMSNorm", "QKRMSNorm(gain=false)"),
            ("QKLayerNorm", "QKLayerNorm(gain=false)"),
        ),
        change=Expected("loses more from L to the longest context than", sign=-1),
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
        Expected(f"is as good at L (less than {lm.EQUAL:.0f} point worse) as", margin=lm.EQUAL),
        Expected(
            f"loses no more (by less than {MATTERS:.0f} points) from L to the longest context than",
            margin=MATTERS,
        ),
    ),
}


def resolve_questions(request: Request) -> Sweep:
    """The rows of the questions that `--variants` names; raises `InputError` as keynorm's does."""
    setting = TextSetting.of(opened(request, "questions", Preset))
    asked = request.variants or tuple(QUESTIONS)
    for name in asked:
        if name not in QUESTIONS:
            raise unknown_name("question", name, QUESTIONS)
    rows = tuple(dict.fromkeys(row for name in asked for row in QUESTIONS[name].rows))
    return setting.sweep(request, "questions", [*map(setting.run, canonical(rows, setting))])


def _pair_rows(view: View) -> list[Row]:
    """Every pair that was read: its two rows and the question they answer."""
    known = set(view.values("row", lm.TRAINED))
    return [
        Row(f"{row} − {other}", {"row": row, "other": other, "question": question.words})
        for question in QUESTIONS.values()
        for row, other in question.pairs
        if {row, other} <= known
    ]


def _pair_columns(view: View) -> list[Column]:
    """The first row of a pair at L and its change; then differences to the second."""

    def column(key: str, title: str, metric: Metric, difference: bool = True) -> Column:
        def cell(view: View, row: Row) -> Cell:
            ours, theirs = (metric.at(variant=row.where[name]) for name in ("row", "other"))
            shown = ours - theirs if difference else ours
            return Column(key, title, shown).cell(view, Row("", {}))

        # The metric says in figures that differences have a 0.
        return Column(key, title, metric - metric if difference else metric, plain=cell)

    natural = lm.past(lm.ACCURACY, view, "non_repeated", method="")
    return [
        text_column("question", "question", lambda view, row: row.where["question"]),
        column("at_l", "at L", lm.AT_L, difference=False),
        column("change", "change", lm.UNMODIFIED_CHANGE, difference=False),
        column("at_l_difference", "difference at L", lm.AT_L),
        column("natural_difference", "difference on held-out text past L", natural),
        column("change_difference", "difference in change", lm.UNMODIFIED_CHANGE),
    ]


def _pair_claims(view: View) -> Iterator[Claim]:
    """Of every pair, at L and in what longer contexts change."""
    for question in QUESTIONS.values():
        for row, other in question.pairs:
            at_l = (lm.AT_L, question.at_l, lm.EQUAL, f"{row} − {other} at L, accuracy")
            measured = f"change of {row} − change of {other}, last segment"
            change = (lm.UNMODIFIED_CHANGE, question.change, MATTERS, measured)
            for metric, expected, matters, words in (at_l, change):
                yield Claim(
                    f"{row} {expected.words} {other}",
                    metric.at(variant=row) - metric.at(variant=other),
                    "left open in kexue 9859",
                    *(words, expected.sign, matters, expected.margin),
                )


def _pair_figures(view: View) -> list[Figure]:
    """Every pair's differences; accuracy by position; the trainings."""
    differences = [c for c in _pair_columns(view) if c.key.endswith("_difference")]
    title = "Differences of accuracy, in points"
    drawn = lm.intervals(view, "questions", title, _pair_rows(view), differences)
    return [drawn, *lm.position_figures(view), lm.history_figure(view)]


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
            head="row − reference",
            intro="Token accuracy in % of the first score, and differences in points, "
            "paired over documents and seeds, with 95 % intervals.",
            notes=(
                "change: the last segment after the longest context minus after L, in points.",
                "KNA is KRMSNorm without a gain.",
            ),
        ),
        lm.reading_table(
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
