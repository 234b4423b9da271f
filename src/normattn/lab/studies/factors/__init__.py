"""Which difference to the source's setting makes KeyNorm decay past the training length?

The source's 100M GAU with KNA reads 8 L about as well as L (kexue 9859); the small MHA model of the
preset `laptop` does not. Baseline and KNA are trained in the preset's setting and with one change
each, and one number is watched: what the longest context takes from the same last L tokens,

    change = accuracy(last segment after 8 L) − accuracy(last segment after L)

Changes are joined by "+": `gau+no-tiling`. Seeds and everything else stay the preset's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import polars as pl

from normattn.errors import InputError
from normattn.lab.studies.factors.changes import AS_PRESET, CHANGES, ENGLISH, parts
from normattn.lab.studies.factors.page import PAGE, SCORES
from normattn.lab.sweep.collect import measured_below
from normattn.lab.sweep.language import CausalCell, TextConfig, described, opened
from normattn.lab.sweep.layout import CellPaths
from normattn.lab.sweep.measuring import evaluation_sets
from normattn.lab.sweep.methods import Omission
from normattn.lab.sweep.reading import AS_IS, ReadStage
from normattn.lab.sweep.settings import Preset, merged
from normattn.lab.sweep.stages import Stage
from normattn.lab.sweep.study import Cell as AnyCell
from normattn.lab.sweep.study import Request, Study, Sweep, refuse_choices, seeds_of, sweep_of
from normattn.lab.training import TrainingConfig

NAME = "factors"


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
    preset = opened(plain, NAME, Preset)
    ends = preset.evaluation.multiples[:: max(1, len(preset.evaluation.multiples) - 1)]
    config = FactorsConfig.of_text(preset, {"multiples": ends}, english=english)
    changes, skipped = _changes(request, config)
    cells = [
        _cell(change, score, seed, config)
        for seed in seeds_of(request, preset)
        for change in changes
        for score in SCORES
    ]
    return sweep_of(request, NAME, config, cells, _describe, config.facts, skipped)


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
