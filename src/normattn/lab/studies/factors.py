"""Which difference to the source's setting makes KeyNorm decay past the training length?

The source's 100M GAU with KNA reads 8 L about as well as L (kexue 9859); the small MHA model of the
preset `laptop` does not. Baseline and KNA are trained in the preset's setting and with one change
each (joined by "+": `gau+no-tiling`), and one number is watched:

    change = accuracy(last segment after 8 L) − accuracy(last segment after L)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from normattn.errors import InputError, unknown
from normattn.lab.report.claims import Claim
from normattn.lab.report.figures import Figure
from normattn.lab.report.tables import NOTHING, Cell, Column, Row, Table
from normattn.lab.report.view import View
from normattn.lab.stats import Metric, Sums
from normattn.lab.studies.base import Study
from normattn.lab.studies.keynorm import MATTERS
from normattn.lab.studies.language import TextRun, TextSetting
from normattn.lab.studies.lm_report import (
    ACCURACY,
    CHANGE,
    SEEN,
    intervals,
    ranked,
)
from normattn.lab.studies.preset import opened, own_group
from normattn.lab.sweep.collect import measured_below
from normattn.lab.sweep.config import merged, value_at
from normattn.lab.sweep.run import Request, Sweep
from normattn.models.config import without_foreign
from normattn.settings import Settings

UNMODIFIED_CHANGE = CHANGE.at(method="")

# Changes of the setting

SCORES = ("Baseline", "KNA")
AS_PRESET, ENGLISH = "preset", "english"
# Half of the pairs of a rotation of base 130 finish a turn within 64 tokens, a quarter of base
# 10,000, whatever the size of the head; in the source's setting (512 tokens) half do.
TURNING = 130


@dataclass(frozen=True)
class Change:
    """One change: `settings` by dotted name, `times` as products of the preset's own numbers.

    `base` is that of the rotation.
    """

    words: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    times: Mapping[str, float] = field(default_factory=dict)
    base: int | None = None

    def applied(self, training: Mapping[str, Any]) -> dict[str, Any]:
        """The preset's training settings with this change; unchanged if it has that block."""
        scaled = {
            name: type(value := value_at(training, name))(value * factor)
            for name, factor in self.times.items()
        }
        changed = {**self.settings, **scaled}
        if changed.get("model.block") == training["model"].get("block", "mha"):
            return dict(training)
        kept = {**training, "model": without_foreign(training["model"], changed.get("model.block"))}
        if "optimiser" in changed:  # Another one has settings of its own.
            del kept["optimiser"]
        return merged(kept, changed)


def _model(**settings: Any) -> Mapping[str, Any]:
    return {f"model.{name}": value for name, value in settings.items()}


def _longer(times: int) -> Mapping[str, float]:
    """A longer training length with as many tokens in a step."""
    return {"model.train_length": float(times), "batch_size": 1 / times}


# Tiger's rate is relative to the size of each parameter (kexue 9512); not searched for in this
# setting, so that row says what this rate does, not what Tiger can do.
TIGER = {"optimiser": {"name": "tiger", "lr": 5e-3}}
CHANGES: Mapping[str, Change] = {
    AS_PRESET: Change("the preset as it is"),
    "base-130": Change("RoPE with base 130", base=TURNING),
    "length-2x": Change("twice the training length", times=_longer(2)),
    "length-4x": Change("four times the training length", times=_longer(4)),
    "no-tiling": Change("no tiled text", {"data.tiled_fraction": 0.0}),
    "steps-third": Change("a third of the steps", times={"steps": 1 / 3}),
    "steps-half": Change("half of the steps", times={"steps": 0.5}),
    "steps-4x": Change("four times the steps", times={"steps": 4.0}),
    "one-head": Change("one head", _model(heads=1)),
    "heads-2x": Change("heads twice as large, base 130", times=_model(heads=1 / 2), base=TURNING),
    "heads-4x": Change("heads 4 times as large, base 130", times=_model(heads=1 / 4), base=TURNING),
    "deepnorm": Change("DeepNorm", _model(placement="DeepNorm")),
    "preln": Change("PreLN", _model(placement="PreLN")),
    "tiger": Change("Tiger at 5e-3, not searched for", TIGER),
    "gau": Change("gated attention units", _model(block="gau")),
    "mha": Change("multi-head attention and SwiGLU", _model(block="mha", heads=4)),
    "layers-6": Change("6 layers", _model(layers=6)),
    "layers-12": Change("12 layers", _model(layers=12)),
    ENGLISH: Change("English text"),
}


class FactorsSettings(Settings):
    """`reproduce factors`: the corpus of the row of English text; without it no such row."""

    english: str = ""


def parts(change: str) -> list[Change]:
    """The single changes that a name joins; `InputError` names the nearest known one."""
    for name in change.split("+"):
        if name not in CHANGES:
            raise unknown("change", name, CHANGES, ", and several of them joined by +")
    return [CHANGES[name] for name in change.split("+")]


def words(change: str) -> str:
    """A change as the page calls it."""
    return " + ".join(part.words for part in parts(change))


def _changed(change: str, score: str, setting: TextSetting, english: str) -> dict[str, Any]:
    """The training settings of a change; `InputError` for English text without a corpus."""
    training = dict(setting.training)
    for part in parts(change):
        training = part.applied(training)
    if ENGLISH in change.split("+"):
        if not english:
            raise InputError("no corpus of English text was named (--set factors.english=FOLDER)")
        training = merged(training, {"data.corpus": english})
    rotary = "".join(f"-RoPE(base={base})" for base in {c.base for c in parts(change) if c.base})
    return merged(training, {"model.score": score + rotary})


def resolve_factors(request: Request) -> Sweep:
    """One run for each change, score and seed; `--variants` chooses changes.

    Raises `InputError` for an unknown change and for settings that a change makes impossible. The
    row of English text needs `--set factors.english=CORPUS` and is left out without it.
    """
    request.refuse_choices("factors")
    preset = opened(request, "factors", "factors")
    english = own_group(request, "factors", FactorsSettings).english
    setting = TextSetting.of(preset, {"multiples": preset.evaluation.ends})
    made = partial(_factor_runs, setting, english)
    plain = [run.training_config for run in made(AS_PRESET, 0)]
    changes, skipped = [], []
    for change in dict.fromkeys(request.variants or CHANGES):
        try:
            if [run.training_config for run in made(change, 0)] == plain and change != AS_PRESET:
                raise InputError(f"{change} changes nothing in the preset {preset.name}")
            changes.append(change)
        except InputError as error:
            if request.variants:
                raise
            skipped.append(f"{change} is left out: {error}")
    seeds = request.seeds_or(preset.seeds)
    runs = [run for seed in seeds for change in changes for run in made(change, seed)]
    return setting.sweep(request, "factors", runs, skipped, english=english)


def _factor_runs(setting: TextSetting, english: str, change: str, seed: int) -> list[TextRun]:
    return [
        TextRun(
            variant=f"{change}-{score}",
            row=score,
            factors={"change": change, "row": score},
            seed=seed,
            training=_changed(change, score, setting, english),
            evaluation=setting.evaluation,
        )
        for score in SCORES
    ]


def _change_rows(view: View) -> list[Row]:
    """The changes whose models were read, the unchanged preset first."""
    known = view.values("factor.change", {"protocol": "last_segment", "method": ""})
    return [Row(words(name), {"factor.change": name}) for name in ranked(known, tuple(CHANGES))]


def _change_of(score: str) -> Metric:
    """What a longer context does to a score."""
    return UNMODIFIED_CHANGE.at({"factor.row": score})


def _change_columns(view: View) -> list[Column]:
    """How good the models are at L, whether they copy, and what a longer context does."""
    shown = []
    for score in SCORES:
        at = {"factor.row": score}
        at_l = ACCURACY.at(at, protocol="train_length")
        copies = SEEN.at(at, protocol="repeated").between(_within(view))
        shown.append(Column(f"{score}_at_l", f"{score} at L", at_l))
        shown.append(Column(f"{score}_copies", f"{score}, copies at L", copies))
    shown += [Column(f"{name}_change", f"change of {name}", _change_of(name)) for name in SCORES]
    gap = _change_of("KNA") - _change_of("Baseline")
    shown.append(Column("gap", "change of KNA − of Baseline", gap))
    shown.append(_effect("effect", "effect on KNA's change", lambda change: AS_PRESET))
    if _several(view):
        shown.append(_effect("last", "effect of the last of several", _without_last))
    return shown


def _within(view: View) -> Callable[[Sums], Sums]:
    """The bins within the training length, of tiled text that ends beyond it."""

    def bins(sums: Sums) -> Sums:
        # Models of other training lengths have other documents, and so another digest.
        length = view.values("train_length", {"data": sums.data})[0]
        return sums.at([n for n, (*_, end) in enumerate(sums.bins) if end <= length])

    return bins


def _several(view: View) -> bool:
    """Whether changes were joined."""
    return any(_without_last(str(row.where["factor.change"])) for row in _change_rows(view))


def _without_last(change: str) -> str | None:
    """What a joined change adds its last part to; None for a single one."""
    return change.rpartition("+")[0] or None


def _effect(key: str, title: str, against: Callable[[str], str | None]) -> Column:
    """The change of KNA minus the same under another change of the setting."""
    ours = _change_of("KNA")

    def cell(view: View, row: Row) -> Cell:
        change = str(row.where["factor.change"])
        other = against(change)
        if other is None or not _comparable(view, change, other):
            return NOTHING
        return Column(key, title, ours - ours.at({"factor.change": other})).cell(view, row)

    return Column(key, title, plain=cell)


def _comparable(view: View, change: str, other: str) -> bool:
    """Whether the other change was read too, in the same documents."""
    units = [
        set(view.values("unit", {"factor.change": name, "protocol": "last_segment"}))
        for name in (change, other)
    ]
    return change != other and bool(units[0] & units[1])


def _change_claims(view: View) -> list[Claim]:
    """Of every change whether it takes away KNA's loss."""
    ours = _change_of("KNA")
    return [
        Claim(
            f"{row.label}: KNA loses less from L to the longest context",
            ours.at(row.where) - ours.at({"factor.change": AS_PRESET}),
            "asked here, as kexue 9859 differs",
            "change of KNA − its change in the preset as it is, last segment",
            matters=MATTERS,
        )
        for row in _change_rows(view)
        if _comparable(view, row.where["factor.change"], AS_PRESET)
    ]


def _change_figures(view: View) -> list[Figure]:
    """The change of either score under every change of the setting."""
    keys = ("Baseline_change", "KNA_change", "gap")
    drawn = [column for column in _change_columns(view) if column.key in keys]
    title = "Accuracy of the last segment after the longest context minus after L, in points"
    return [intervals(view, "factors", title, _change_rows(view), drawn)]


def _change_notes(view: View) -> Sequence[str]:
    always = (
        "copies at L: tiled text within the training length, the tokens whose answer "
        "stands earlier. A model that copies no better than it reads has little to lose.",
        "effect: the change of KNA minus that in the preset as it is, paired over "
        "documents and seeds; none for a text that shares no document.",
    )
    last = (
        "effect of the last of several: of changes that are joined, minus the change of KNA under "
        "all of them but the last."
    )
    return (*always, last) if _several(view) else always


STUDY = Study(
    "factors",
    "Which difference to the source's setting makes a small model with normalised keys "
    "lose accuracy past its training length?",
    title="Why KeyNorm decays",
    help="Train Baseline and KNA with one change of the setting each; read after L and 8 L.\n\n"
    "One number is watched: what the longest context takes from the same last segment. --variants "
    "chooses changes, and joins several by +: " + ", ".join(CHANGES) + ".",
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
            notes=_change_notes,
        ),
    ),
    claims=_change_claims,
    figures=_change_figures,
    collect=partial(measured_below, factors=("change", "row")),
    variants_help="Changes, by commas, several at once joined by +. [default: all, one at a time]",
    examples=(
        ("--preset smoke --variants preset,no-tiling", "the whole path, small"),
        ("--seeds 3", "the study itself"),
        ("--seeds 3 --variants preset,gau+no-tiling+deepnorm", "several changes together"),
        ("--set factors.english=books/", "with the row of English text"),
    ),
)
