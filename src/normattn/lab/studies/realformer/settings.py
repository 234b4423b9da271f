"""What the RealFormer study trains: the rows of its table, and what a preset says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from normattn.errors import InputError
from normattn.lab.sweep.settings import StudyPreset, merged
from normattn.lab.training.tasks.text import MaskedConfig
from normattn.models.config import NORMLESS, Placement
from normattn.settings import Settings


class Row(Settings):
    """A row of the table: where norms stand, how scores are carried, and what else differs.

    `start` is the row whose trained weights initialise this one.
    """

    placement: Placement
    score: str = "Baseline"
    shared: bool = False
    half: bool = False
    start: str | None = None


_POSTLN, _PRELN = Row(placement="PostLN"), Row(placement="PreLN")
_REALFORMER = Row(placement="PostLN", score="Baseline-RealFormer")
ROWS: dict[str, Row] = {
    "PreLN": _PRELN,
    "PostLN": _POSTLN,
    "RealFormer": _REALFORMER,
    "RealFormer-half": _REALFORMER.model_copy(update={"half": True}),
    "RealFormer-mean": Row(placement="PostLN", score="Baseline-RealFormer(running_mean=true)"),
    "RealFormer-PreLN": Row(placement="PreLN", score="Baseline-RealFormer"),
    "ResidualQK": Row(placement="PostLN", score="Baseline-ResidualQK"),
    "ResidualQKV": Row(placement="PostLN", score="Baseline-ResidualQKV"),
    "DeepNorm": Row(placement="DeepNorm"),
    "ReZero": Row(placement="ReZero"),
    "ReZeroNoNorm": Row(placement="ReZeroNoNorm"),
    "FixedScale": Row(placement="FixedScale"),
    "PostLN-shared": _POSTLN.model_copy(update={"shared": True}),
    "RealFormer-shared": _REALFORMER.model_copy(update={"shared": True}),
    "PostLN-continued": _POSTLN.model_copy(update={"half": True, "start": "PostLN"}),
    "RealFormer-from-PostLN": _REALFORMER.model_copy(update={"half": True, "start": "PostLN"}),
}
"""Every row in the order of the table. "half": half the steps, with a schedule that ends there."""

RowName = Annotated[str, Field(min_length=1)]


class SizeSettings(Settings):
    """One size of model: what differs in `training`, its rows, and its seeds (None: the preset's).

    `rows` None stands for every row, `[]` for none of this size. `rates`: the learning rate of a
    row, where it is another than that of `training`.
    """

    training: dict[str, Any]
    rows: tuple[RowName, ...] | None = None
    # Left out of a dump where it is empty: runs that were made before it stay the same.
    rates: dict[RowName, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict, exclude_if=lambda rates: not rates
    )
    seeds: int | None = Field(default=None, ge=1)

    @field_validator("rows")
    @classmethod
    def _known(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return None if value is None else checked_rows(value, "rows")

    @field_validator("rates")
    @classmethod
    def _known_rates(cls, value: dict[str, float]) -> dict[str, float]:
        checked_rows(tuple(value), "rates")
        return value


class GridSettings(Settings):
    """The robustness grid: each of `rows`, of the size `size`, at every rate and dropout.

    `warmup_steps` are those of the runs with warm-up; every setting is trained without one too.
    No row: no grid.
    """

    size: str
    rows: tuple[RowName, ...] = ("PreLN", "PostLN", "RealFormer")
    rates: tuple[Annotated[float, Field(gt=0)], ...] = Field(min_length=1)
    dropouts: tuple[Annotated[float, Field(ge=0, lt=1)], ...] = Field(min_length=1)
    steps: int = Field(ge=1)
    warmup_steps: int = Field(ge=1)
    seeds: int = Field(default=1, ge=1)

    @field_validator("rows")
    @classmethod
    def _known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        rows = checked_rows(value, "rows")
        for row in rows:
            if ROWS[row].start is not None:
                raise ValueError(
                    f"rows: {row} starts from a trained {ROWS[row].start}, which the grid does not"
                )
        return rows


class LookSettings(Settings):
    """What a trained encoder is scored and looked into on: windows of held-out text.

    `max_tokens` bounds what is read at once (memory; gradients are those of batches of so many).
    """

    max_windows: int = Field(default=256, ge=2)
    max_tokens: int = Field(default=2048, ge=1)
    seed: int = Field(default=0, ge=0)
    split: Literal["test", "validation"] = "test"


class RealFormerPreset(StudyPreset):
    """One whole setting of the study; `training` holds fields of `MaskedConfig`.

    The placement, the score, the shared layers and the seed are what the table varies.
    """

    training: dict[str, Any]
    sizes: dict[str, SizeSettings] = Field(min_length=1)
    grid: GridSettings
    evaluation: LookSettings = LookSettings()

    @field_validator("training")
    @classmethod
    def _no_varied_field(cls, value: dict[str, Any]) -> dict[str, Any]:
        return refuse_varied(value)

    @field_validator("sizes")
    @classmethod
    def _no_varied_size(cls, value: dict[str, SizeSettings]) -> dict[str, SizeSettings]:
        for size in value.values():
            refuse_varied(size.training)
        return value


def refuse_varied(training: dict[str, Any]) -> dict[str, Any]:
    """`training` itself; `ValueError` where it sets what the rows of the table differ in."""
    model = training.get("model", {})
    varied = {"score", "placement", "shared_layers", "exits"} & set(model)
    if "seed" in training or varied:
        raise ValueError(
            f"{', '.join(sorted(varied)) or 'seed'} is varied by the table, not set by a preset"
        )
    return training


def checked_rows(names: tuple[str, ...], subject: str) -> tuple[str, ...]:
    """The rows in the order of the table; `ValueError` for a name that is none, or comes twice."""
    for name in names:
        if name not in ROWS:
            raise ValueError(f"{subject}: there is no row {name!r}; there are {', '.join(ROWS)}")
    if len(set(names)) < len(names):
        raise ValueError(f"{subject} names a row twice: {', '.join(names)}")
    return tuple(name for name in ROWS if name in names)


def whole_training(preset: RealFormerPreset, size: str) -> dict[str, Any]:
    """The training settings of a size with every default filled in, less what the table varies."""
    subject = f"preset {preset.name}, size {size}"
    fields = MaskedConfig.parse(merged(preset.training, preset.sizes[size].training), subject)
    whole = fields.model_dump(mode="json")
    del whole["seed"]
    for name in ("score", "placement", "shared_layers", "exits"):
        del whole["model"][name]
    return whole


def row_training(
    training: Mapping[str, Any], name: str, rates: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """The training settings of a row of the table, all but its seed and its start.

    `rates` are learning rates of rows; one with a start has that of its start, unless it has its
    own. Where there are no norms, those of the preset are left out. Raises `InputError` for a half
    of the steps that is shorter than the warm-up.
    """
    row = ROWS[name]
    changes: dict[str, Any] = {
        "model.placement": row.placement,
        "model.score": row.score,
        "model.shared_layers": row.shared,
        "model.exits": training["model"]["layers"] > 1,
    }
    own = [rate for rate in map((rates or {}).get, (name, row.start or name)) if rate is not None]
    if own:
        changes["optimiser.lr"] = own[0]
    if row.half:
        changes["steps"] = max(1, training["steps"] // 2)
        if training["schedule"]["warmup_steps"] > changes["steps"]:
            raise InputError(f"half of {training['steps']} steps is less than their warm-up")
    whole = merged(training, changes)
    if row.placement in NORMLESS:
        for field in ("norm", "norm_gain", "norm_eps"):
            del whole["model"][field]
    return whole
