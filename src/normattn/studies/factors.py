"""Which difference to the source's setting makes KeyNorm decay past the training length?

The source's 100M GAU with KNA reads 8 L about as well as L (kexue 9859); the small MHA model of the
preset `laptop` does not. Baseline and KNA are trained in the preset's setting and with one change
each, and one number is watched: what the longest context takes from the same last L tokens,

    change = accuracy(last segment after 8 L) − accuracy(last segment after L)

Changes are joined by "+": `gau+no-tiling`. Seeds and everything else stay the preset's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal

import polars as pl

from normattn.errors import InputError
from normattn.models.block_settings import without_foreign
from normattn.report.claim import Claim
from normattn.report.figure import Figure, IntervalColumn, Intervals
from normattn.report.page import Page
from normattn.report.table import NOTHING, Cell, Column, Row, Table
from normattn.report.view import Term, View
from normattn.studies._reading import ACCURACY, POINTS, SEEN
from normattn.sweep.collect import measured_below
from normattn.sweep.language import CausalCell, TextConfig, described, opened, shared_training
from normattn.sweep.layout import CellPaths
from normattn.sweep.measuring import evaluation_sets
from normattn.sweep.merging import merged
from normattn.sweep.omissions import Omission
from normattn.sweep.reading import AS_IS, ReadStage
from normattn.sweep.stages import Stage
from normattn.sweep.study import Cell as AnyCell
from normattn.sweep.study import Request, Study, Sweep, place_of, refuse_choices, seeds_of
from normattn.training import TrainingConfig

NAME = "factors"
SCORES = ("Baseline", "KNA")
AS_PRESET, ENGLISH = "preset", "english"
CHANGE, SCORE = "factor.change", "factor.row"


@dataclass(frozen=True)
class Change:
    """One change of the setting: `settings` by dotted name, products of the preset's own numbers
    (`times`), and the base of the rotation.
    """

    words: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    times: Mapping[str, float] = field(default_factory=dict)
    base: int | None = None

    def applied(self, training: Mapping[str, Any]) -> dict[str, Any]:
        """The preset's training settings with this change."""
        scaled = {
            name: type(value := _value(training, name))(value * factor)
            for name, factor in self.times.items()
        }
        changed = {**self.settings, **scaled}
        kept = {**training, "model": without_foreign(training["model"], changed.get("model.block"))}
        if "optimiser" in changed:  # Another one has settings of its own.
            del kept["optimiser"]
        return merged(kept, changed)


def _value(settings: Mapping[str, Any], name: str) -> Any:
    found: Any = settings
    for part in name.split("."):
        found = found[part]
    return found


def _longer(times: int) -> Mapping[str, float]:
    """A longer training length with as many tokens in a step."""
    return {"model.train_length": float(times), "batch_size": 1 / times}


# Half of the pairs of a rotation of base 130 finish a turn within 64 tokens, a quarter of base
# 10,000, whatever the size of the head; in the source's setting (512 tokens) half do.
TURNING = 130
# Relative to the size of each parameter (kexue 9512); not searched for in this setting, so a row
# with Tiger says what this rate does, not what Tiger can do.
TIGER = 5e-3
CHANGES: Mapping[str, Change] = {
    AS_PRESET: Change("the preset as it is"),
    "base-130": Change("RoPE with base 130", base=TURNING),
    "length-2x": Change("twice the training length", times=_longer(2)),
    "length-4x": Change("four times the training length", times=_longer(4)),
    "no-tiling": Change("no tiled text", {"data.tiled_fraction": 0.0}),
    "steps-half": Change("half of the steps", times={"steps": 0.5}),
    "steps-4x": Change("four times the steps", times={"steps": 4.0}),
    "heads-2x": Change(
        "heads twice as large, base 130", times={"model.heads": 1 / 2}, base=TURNING
    ),
    "heads-4x": Change(
        "heads 4 times as large, base 130", times={"model.heads": 1 / 4}, base=TURNING
    ),
    "deepnorm": Change("DeepNorm", {"model.placement": "DeepNorm"}),
    "preln": Change("PreLN", {"model.placement": "PreLN"}),
    "tiger": Change(
        "Tiger at 5e-3, not searched for", {"optimiser": {"name": "tiger", "lr": TIGER}}
    ),
    "gau": Change("gated attention units", {"model.block": "gau"}),
    "mha": Change("multi-head attention and SwiGLU", {"model.block": "mha", "model.heads": 3}),
    "layers-6": Change("6 layers", {"model.layers": 6}),
    "layers-12": Change("12 layers", {"model.layers": 12}),
    ENGLISH: Change("English text"),
}


class FactorCell(CausalCell):
    """Baseline or KNA trained with a change of the setting, and read after L and after 8 L."""

    kind: Literal["factor"] = "factor"
    change: str
    row: str

    @property
    def training_config(self) -> TrainingConfig:
        """The settings with the change; the score with its base."""
        bases = {change.base for change in parts(self.change) if change.base}
        rotary = "".join(f"-RoPE(base={base})" for base in bases)
        varied = {"seed": self.seed, "model.score": self.row + rotary}
        return TrainingConfig.parse(merged(self.training, varied), f"the settings of {self.name}")

    def after(self, paths: CellPaths) -> list[Stage]:
        """Read the run as it is."""
        factors = {"change": self.change, "row": self.row}
        return [
            ReadStage(self.training_config, paths.run, (AS_IS,), self.evaluation, factors=factors)
        ]


def parts(change: str) -> list[Change]:
    """The single changes that a name joins; `InputError` names the nearest known one."""
    for name in change.split("+"):
        if name not in CHANGES:
            near = get_close_matches(name, CHANGES, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}? " if near else ""
            raise InputError(
                f"no change is called {name!r}: {hint}there are {', '.join(CHANGES)}, "
                "and several of them joined by +"
            )
    return [CHANGES[name] for name in change.split("+")]


def words(change: str) -> str:
    """A change as the page calls it."""
    return " + ".join(part.words for part in parts(change))


class FactorsConfig(TextConfig):
    """What the cells share, before any change; `english` is the corpus of the English row."""

    english: str = ""


def resolve(request: Request) -> Sweep:
    """One cell for each change, score and seed; `--variants` chooses changes.

    Raises `InputError` for an unknown change and for settings that a change makes impossible. The
    row of English text needs `--set factors.english=CORPUS` and is left out without it.
    """
    refuse_choices(request, NAME)
    english = str(request.changes.get("factors.english", ""))
    own = {k: v for k, v in request.changes.items() if k != "factors.english"}
    plain = Request(**{**vars(request), "changes": own})
    preset = opened(plain, NAME)
    ends = preset.evaluation.multiples[:: max(1, len(preset.evaluation.multiples) - 1)]
    config = FactorsConfig(
        preset=preset.name,
        training=shared_training(preset),
        evaluation=preset.evaluation.model_copy(update={"multiples": ends}),
        english=english,
    )
    changes, skipped = _changes(request, config)
    cells = [
        _cell(change, score, seed, config)
        for seed in seeds_of(request, preset)
        for change in changes
        for score in SCORES
    ]
    return Sweep(
        study=NAME,
        config=config,
        cells=tuple(cells),
        skipped=skipped,
        out=place_of(request, NAME, preset),
        describe=_describe,
        facts=config.facts,
    )


NO_ENGLISH = "no corpus of English text was named (--set factors.english=FOLDER)"


def _changes(
    request: Request, config: FactorsConfig
) -> tuple[tuple[str, ...], tuple[Omission, ...]]:
    """The changes to train; of all of them those that the preset cannot have are left out."""
    kept, skipped = [], []
    plain = [_cell(AS_PRESET, score, 0, config).training_config for score in SCORES]
    for change in dict.fromkeys(request.variants or CHANGES):
        try:
            configs = [_cell(change, score, 0, config).training_config for score in SCORES]
            if change != AS_PRESET and configs == plain:
                raise InputError(f"{change} changes nothing in the preset {config.preset}")
        except InputError as error:
            if request.variants:
                raise
            skipped.append(Omission(change, "", str(error)))
        else:
            kept.append(change)
    return tuple(kept), tuple(skipped)


def _cell(change: str, score: str, seed: int, config: FactorsConfig) -> FactorCell:
    return FactorCell(
        variant=f"{change}-{score}",
        seed=seed,
        change=change,
        row=score,
        training=changed(change, config),
        evaluation=config.evaluation,
    )


def changed(change: str, config: FactorsConfig) -> dict[str, Any]:
    """The training settings of a change; `InputError` for English text without a corpus."""
    training = dict(config.training)
    for part in parts(change):
        training = part.applied(training)
    if ENGLISH not in change.split("+"):
        return training
    if not config.english:
        raise InputError(NO_ENGLISH)
    return merged(training, {"data.corpus": config.english})


def _describe(cell: AnyCell, data: Any) -> Sequence[str]:
    assert isinstance(cell, FactorCell)
    length = cell.training_config.model.train_length
    return described(lambda read: evaluation_sets(read, length, cell.evaluation))(cell, data)


def collect(out: Any) -> pl.DataFrame:
    """What was measured; trainings too have the change and the score as factors."""
    return measured_below(out, factors=("change", "row"))


def rows(view: View) -> list[Row]:
    """The changes that were trained, the preset as it is first."""
    known = [name for name in view.values(CHANGE) if name is not None]
    order = {name: number for number, name in enumerate(CHANGES)}
    ranked = sorted(known, key=lambda name: (order.get(name, len(order)), name))
    return [Row(words(name), {CHANGE: name}) for name in ranked]


def _ends(view: View, change: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Where the last segment after the longest and after the shortest context is."""
    at = {CHANGE: change, "protocol": "last_segment", "method": ""}
    lengths = sorted(view.values("length", at))
    return {**at, "length": lengths[-1]}, {**at, "length": lengths[0]}


def change_terms(view: View, change: str, score: str, factor: float = 1.0) -> list[Term]:
    """The change of the last segment's accuracy from L to 8 L."""
    far, near = _ends(view, change)
    return [Term(factor, {**far, SCORE: score}), Term(-factor, {**near, SCORE: score})]


def columns(view: View) -> Sequence[Column]:
    """How good the models are at L, whether they copy, and what a longer context does."""
    found = []
    for score in SCORES:
        at_l = {"protocol": "train_length", SCORE: score}
        found.append(Column(f"{score}_at_l", f"{score} at L", ACCURACY, ((1.0, at_l),)))
        found.append(
            Column(f"{score}_copies", f"{score}, copies at L", SEEN, plain=_copying(score))
        )
    for score in SCORES:
        found.append(_of(f"{score}_change", f"change of {score}", {score: 1.0}))
    found.append(_of("gap", "change of KNA − of Baseline", {"KNA": 1.0, "Baseline": -1.0}))
    found.append(_of("effect", "effect on KNA's change", {"KNA": 1.0}, against=True))
    return found


def _copying(score: str) -> Callable[[View, Row], Cell]:
    """Tiled text within the training length, tokens whose answer stands earlier."""

    def cell(view: View, row: Row) -> Cell:
        at = {**row.where, "protocol": "repeated", SCORE: score}
        sums, lengths = view.sums(SEEN.name, at), view.values("train_length", at)
        if sums is None:
            return NOTHING
        within = [n for n, (*_, end) in enumerate(sums.bins) if end <= lengths[0]]
        return Column("", "", SEEN, ((1.0, at),), bins=within).cell(view, Row("", {}))

    return cell


def _of(key: str, title: str, factors: Mapping[str, float], against: bool = False) -> Column:
    """Σ factor · change of a score; `against`: minus the same of the preset as it is."""

    def cell(view: View, row: Row) -> Cell:
        change = row.where[CHANGE]
        if against and (change == AS_PRESET or not _comparable(view, change)):
            return NOTHING
        terms = _terms(view, change, factors, against)
        # The terms say all of where they are; the row's own place is not laid over them.
        overlay = tuple((term.factor, term.where) for term in terms)
        return Column(key, title, POINTS, overlay, signed=True).cell(view, Row("", {}))

    return Column(key, title, POINTS, plain=cell)


def _terms(
    view: View, change: str, factors: Mapping[str, float], against: bool = False
) -> list[Term]:
    terms: list[Term] = []
    for score, factor in factors.items():
        terms += change_terms(view, change, score, factor)
        if against:
            terms += change_terms(view, AS_PRESET, score, -factor)
    return terms


def _comparable(view: View, change: str) -> bool:
    """Whether the preset as it is was read too, in the same documents."""
    if AS_PRESET not in view.values(CHANGE):
        return False
    units = [
        set(view.values("unit", {CHANGE: name, "protocol": "last_segment"}))
        for name in (change, AS_PRESET)
    ]
    return bool(units[0] & units[1])


def claims(view: View) -> list[Claim]:
    """Of every change whether it takes away KNA's loss."""
    return [
        Claim(
            f"{row.label}: KNA loses less from L to the longest context",
            "asked here, as kexue 9859 differs",
            "change of KNA − its change in the preset as it is, last segment",
            POINTS,
            tuple(_terms(view, row.where[CHANGE], {"KNA": 1.0}, against=True)),
        )
        for row in rows(view)
        if row.where[CHANGE] != AS_PRESET and _comparable(view, row.where[CHANGE])
    ]


def figures(view: View) -> list[Figure]:
    """The change of either score under every change of the setting."""
    shown, made = rows(view), {column.key: column for column in columns(view)}
    panels = tuple(
        IntervalColumn(
            made[key].title, tuple(made[key].cell(view, row).estimate for row in shown), zero=True
        )
        for key in ("Baseline_change", "KNA_change", "gap")
    )
    title = "What the longest context takes from the last segment, in points of accuracy"
    return [Intervals("factors", title, tuple(row.label for row in shown), panels)]


PAGE = Page(
    title="Why KeyNorm decays",
    question="Which difference to the source's setting makes a small model with normalised keys "
    "lose accuracy past its training length?",
    sources=("kexue.fm/archives/9859",),
    tables=(
        Table(
            "table",
            "",
            rows,
            columns,
            head="change",
            intro="Token accuracy in %; change: the last segment after the longest context minus "
            "after L, in points, with 95 % intervals over documents and seeds.",
            notes=(
                "copies at L: tiled text within the training length, the tokens whose answer "
                "stands earlier. A model that copies no better than it reads has little to lose.",
                "effect: the change of KNA minus that in the preset as it is, paired over "
                "documents and seeds; none for a text that shares no document.",
            ),
        ),
    ),
    claims=claims,
    figures=figures,
)

STUDY = Study(
    name=NAME,
    help="Train Baseline and KNA with one change of the setting each; read after L and 8 L.\n\n"
    "One number is watched: what the longest context takes from the same last segment. --variants "
    "chooses changes, and joins several by +: " + ", ".join(CHANGES) + ".",
    resolve=resolve,
    cells=(FactorCell,),
    page=PAGE,
    variants="Changes, by commas, several at once joined by +. [default: all, one at a time]",
    examples=(
        ("--preset smoke --variants preset,no-tiling", "the whole path, small"),
        ("--seeds 3", "the study itself"),
        ("--seeds 3 --variants preset,gau+no-tiling+deepnorm", "several changes together"),
        ("--set factors.english=books/", "with the row of English text"),
    ),
    collect=collect,
)
