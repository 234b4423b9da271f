"""The 32-row table of KeyNorm and length extrapolation (kexue.fm/archives/9859), as data.

Eight scores are trained (Baseline, QNA, KNA and CosA, each with and without log-n scaling), and
each reads on past its training length in four ways: as it is, and with NTK, YaRN or ReRoPE.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from normattn.errors import InputError
from normattn.recipes import presets
from normattn.recipes.merging import merged
from normattn.recipes.settings import EvaluationSettings, Preset, Settings, validated
from normattn.score import ScoreSpec
from normattn.training import TrainingConfig

KIND = "keynorm"
VARIANTS = tuple(
    f"{base}{logn}" for base in ("Baseline", "QNA", "KNA", "CosA") for logn in ("", "-logn")
)
AS_IS = "as is"
METHODS = (AS_IS, "NTK", "YaRN", "ReRoPE")


class SweepConfig(Settings):
    """What every row of one table shares; rows may be added, but this may not change.

    `training` is a whole `TrainingConfig` without the score and the seed.
    """

    preset: str
    training: dict[str, Any]
    evaluation: EvaluationSettings


class CellConfig(Settings):
    """One trained run and the ways it is read: `variant` trained with `seed`, then each method."""

    variant: str
    seed: int
    methods: tuple[str, ...]
    training: dict[str, Any]
    evaluation: EvaluationSettings

    @property
    def training_config(self) -> TrainingConfig:
        """The settings of this cell's training run."""
        varied = {"seed": self.seed, "model.score": self.variant}
        return TrainingConfig.parse(merged(self.training, varied), f"the settings of {self.name}")

    @property
    def name(self) -> str:
        """How progress and errors call this cell."""
        return f"{self.variant} seed {self.seed}"


@dataclass(frozen=True)
class Request:
    """What the command line asks for; None leaves a choice to the preset.

    `changes` are settings by dotted name, as `{"training.steps": 100}`.
    """

    preset: str = "laptop"
    variants: tuple[str, ...] | None = None
    methods: tuple[str, ...] | None = None
    seeds: tuple[int, ...] | None = None
    jobs: int | None = None
    out: Path | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sweep:
    """A resolved request: the shared settings, the cells to run, and the rows left out and why."""

    config: SweepConfig
    cells: tuple[CellConfig, ...]
    skipped: tuple[str, ...]
    out: Path


def resolve(request: Request) -> Sweep:
    """Every choice made and checked, before anything is written or trained.

    Raises `InputError` for an unknown preset, score, method or setting, and for values out of
    range. A method that makes no sense for one of several scores leaves out that row, and says so.
    """
    preset = _changed(presets.load(request.preset), request.changes)
    config = SweepConfig(
        preset=preset.name, training=_resolved(preset), evaluation=preset.evaluation
    )
    variants = _canonical(request.variants or VARIANTS, config)
    methods = _checked_methods(request.methods or METHODS, config)
    cells, skipped = [], []
    for seed in request.seeds or tuple(range(preset.seeds)):
        for variant in variants:
            usable, reasons = _usable(variant, methods, config)
            skipped += [reason for reason in reasons if reason not in skipped]
            cells.append(
                CellConfig(
                    variant=variant,
                    seed=seed,
                    methods=usable,
                    training=config.training,
                    evaluation=config.evaluation,
                )
            )
    out = request.out or Path("runs") / f"keynorm-{preset.name}"
    return Sweep(config, tuple(cells), tuple(skipped), out)


def _changed(preset: Preset, changes: Mapping[str, Any]) -> Preset:
    return validated(Preset, merged(preset.model_dump(), changes), f"preset {preset.name}")


def _resolved(preset: Preset) -> dict[str, Any]:
    """The preset's training settings with every default filled in, less what the table varies."""
    what = f"preset {preset.name}, training"
    varied = {"seed": 0, "model.score": "Baseline"}
    whole = TrainingConfig.parse(merged(preset.training, varied), what)
    fields = whole.model_dump(mode="json")
    del fields["seed"], fields["model"]["score"]
    return fields


def _train_length(config: SweepConfig) -> int:
    return int(config.training["model"]["train_length"])


def _canonical(variants: Sequence[str], config: SweepConfig) -> tuple[str, ...]:
    """The scores to train, by their printed names; each must be whole and trainable here."""
    found = []
    for variant in variants:
        spec = ScoreSpec.parse(variant)
        if spec.method:
            raise InputError(
                f"{variant} holds {spec.method}, which is applied after training; "
                f"name {spec.variant_name} among --variants and {spec.method} among --methods"
            )
        found.append(str(spec).partition("@")[0])
    if len(set(found)) != len(found):
        raise InputError(f"--variants names a score twice: {', '.join(variants)}")
    for name in found:
        cell = CellConfig(variant=name, seed=0, methods=(), **_shared(config))
        _ = cell.training_config
    return tuple(found)


def _shared(config: SweepConfig) -> dict[str, Any]:
    return {"training": config.training, "evaluation": config.evaluation}


def _checked_methods(methods: Sequence[str], config: SweepConfig) -> tuple[str, ...]:
    """The methods by their printed names; an unknown one is refused with the nearest named."""
    plain = ScoreSpec.parse("Baseline", train_length=_train_length(config))
    found = []
    for method in methods:
        if method.lower() in ("", "as is", "as-is"):
            found.append(AS_IS)
            continue
        applied = plain.with_method(method).method
        if not applied:
            raise InputError(f"{method} changes nothing after training; it is no --methods entry")
        found.append(applied)
    return tuple(dict.fromkeys(found))


def _usable(
    variant: str, methods: Sequence[str], config: SweepConfig
) -> tuple[tuple[str, ...], list[str]]:
    """The methods that can be applied to a score, and a sentence for each that cannot."""
    usable, reasons = [], []
    spec = ScoreSpec.parse(variant, train_length=_train_length(config))
    for method in methods:
        try:
            spec.with_method("" if method == AS_IS else method).resolve(
                train_length=_train_length(config), factor=config.evaluation.factor
            )
        except InputError as error:
            reasons.append(f"{variant} with {method} is left out: {error}")
        else:
            usable.append(method)
    return tuple(usable), reasons
