"""Presets: whole settings that a study can be run in, one TOML file each, or the user's file.

The studies of language models share their presets; the others have a folder of their own. Groups
of a shared file that one study alone reads (`[window]` …) are passed over by the others.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from functools import reduce
from importlib import resources
from importlib.resources.abc import Traversable
from operator import getitem
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import Field, field_validator, model_validator

from normattn.errors import InputError, unknown_name
from normattn.io import read_toml
from normattn.lab.sweep.config import flat, merged, value_at
from normattn.lab.sweep.run import Request
from normattn.lab.training.config import LoopConfig
from normattn.models.config import without_foreign
from normattn.settings import Settings

Protocol = Literal[
    "train_length",
    "non_repeated",
    "repeated",
    "last_segment",
    "by_position",
    "retrieval",
]
MOST_MULTIPLES = 1 << 20
PROTOCOLS: tuple[Protocol, ...] = ("train_length", "non_repeated", "repeated", "last_segment")
"""What is measured by default: what the columns of the table hold."""
GROUPS = ("window", "continued", "mechanism", "reading", "factors")
"""Groups of settings that one study of language models alone reads."""
OwnPreset = TypeVar("OwnPreset", bound="StudyPreset")


class EvaluationSettings(Settings):
    """How a trained language model is measured.

    `multiples` are the tested lengths in units of the training length L: the last segment is read
    after each, retrieval is asked at each, repeated, non-repeated and by-position text read at the
    longest one (its shorter readings are its positions), which also sets the `factor` of every
    stretching method, for the whole table.
    `max_windows` bounds each set of windows, `max_tokens` the tokens a batch of them holds (memory,
    never a result). `precision` "bf16" scores under autocast. `split` is the documents: settings
    are chosen on "validation", tables made on "test".
    """

    protocols: tuple[Protocol, ...] = PROTOCOLS
    multiples: tuple[int, ...] = (1, 2, 4, 8)
    max_windows: int = Field(default=128, ge=1)
    max_tokens: int = Field(default=16384, ge=1)
    precision: Literal["fp32", "bf16"] = "fp32"
    seed: int = Field(default=0, ge=0)
    split: Literal["test", "validation"] = "test"

    @field_validator("multiples")
    @classmethod
    def _rising(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if not value or list(value) != sorted(set(value)) or value[0] < 1:
            raise ValueError(f"multiples must rise and start at 1 or above, got {list(value)}")
        if value[-1] > MOST_MULTIPLES:
            raise ValueError(f"multiples are at most {MOST_MULTIPLES:,}, got {value[-1]:,}")
        return value

    @field_validator("protocols")
    @classmethod
    def _some(cls, value: tuple[Protocol, ...]) -> tuple[Protocol, ...]:
        if not value or len(set(value)) != len(value):
            raise ValueError(f"name at least one protocol, each once, got {list(value)}")
        return value

    @property
    def factor(self) -> float:
        """The longest tested length over L: what NTK and YaRN stretch by."""
        return float(max(self.multiples))

    @property
    def ends(self) -> tuple[int, ...]:
        """The shortest and the longest of the tested lengths."""
        return self.multiples[:: max(1, len(self.multiples) - 1)]


class StudyPreset(Settings):
    """What every preset says: its name, one line about it, how many seeds, and the training.

    `varied` are the settings that the study varies itself, besides the seed, with values that
    replace them where whole settings are checked. No preset sets one of them.
    """

    varied: ClassVar[Mapping[str, Any]] = {}

    name: str
    summary: str
    seeds: int = Field(default=1, ge=1, le=1000)
    training: dict[str, Any]

    @property
    def layers(self) -> dict[str, Mapping[str, Any]]:
        """Every group of training settings, by its dotted name."""
        return {"training": self.training}

    @model_validator(mode="after")
    def _refuse_varied(self) -> StudyPreset:
        for group, layer in self.layers.items():
            for name in ("seed", *self.varied):
                if value_at(layer, name) is not None:
                    raise ValueError(f"{group}.{name} is varied by the study, not set by a preset")
        return self

    def whole_training(
        self, kind: type[LoopConfig], *more: Mapping[str, Any], subject: str = "training"
    ) -> dict[str, Any]:
        """The training settings with every default and `more` laid over, less what is varied."""
        stand_in = {"seed": 0, **self.varied}
        fields = merged(self.training, *more, stand_in)
        whole = kind.parse(fields, f"preset {self.name}, {subject}").model_dump(mode="json")
        for name in stand_in:
            *groups, last = name.split(".")
            del reduce(getitem, groups, whole)[last]
        return whole


class Preset(StudyPreset):
    """One whole setting of a study of language models; `training` holds `TrainingConfig` fields."""

    varied: ClassVar[Mapping[str, Any]] = {"model.score": "Baseline"}

    evaluation: EvaluationSettings = EvaluationSettings()

    @field_validator("training")
    @classmethod
    def _has_a_model(cls, value: dict[str, Any]) -> dict[str, Any]:
        model = value.get("model")
        if not isinstance(model, Mapping):
            given = "it is missing" if model is None else f"got {model!r}"
            raise ValueError(f"model must be a group of settings, as dim and layers; {given}")
        return value


def names(study: str | None = None) -> list[str]:
    """The presets that come with the package, by name; those of one study where it has its own."""
    return sorted(
        item.name.removesuffix(".toml").replace("_", "-")
        for item in _folder(study).iterdir()
        if item.name.endswith(".toml")
    )


def fields(name: str, study: str | None = None) -> tuple[str, dict[str, Any]]:
    """The name and the settings of the preset `name`, or of the TOML file at the path `name`.

    A file that begins with `base = "NAME"` (or a path, from its own folder) says only what differs
    from that preset. Raises `InputError` for an unknown name (naming the nearest), a file that
    cannot be read, and a base that leads back to the file.
    """
    layers, places, folder, base = list[dict[str, Any]](), list[str](), Path(), name
    while base:
        try:
            place, written = _written(base, study, folder)
        except InputError as error:
            if not places:
                raise
            raise InputError(f"the base of {places[-1]}: {error}") from error
        if place in places:
            raise InputError(f"a preset cannot be its own base: {' -> '.join([*places, place])}")
        base, folder = written.pop("base", ""), Path(place).parent
        if not isinstance(base, str):
            raise InputError(f"base in {place} must be a preset or a path, got {base!r}")
        layers.append(written)
        places.append(place)
    whole: dict[str, Any] = {}
    for layer in reversed(layers):
        model, changed = (value_at(each, "training.model") for each in (whole, layer))
        if isinstance(model, Mapping) and isinstance(changed, Mapping):
            # Settings of one kind of block mean nothing to another.
            whole["training"]["model"] = without_foreign(model, changed.get("block"))
        whole.pop("name", None)
        whole = merged(whole, layer)
    return name if name in names(study) else Path(name).stem, whole


def _written(name: str, study: str | None, folder: Path) -> tuple[str, dict[str, Any]]:
    """Where a preset is, its name or its whole path, and the settings that are written there."""
    known = names(study)
    if name in known:
        packaged = _folder(study) / f"{name.replace('-', '_')}.toml"
        return name, tomllib.loads(packaged.read_text("utf-8"))
    if not name.endswith(".toml"):
        raise unknown_name(
            "preset", name, known, ", and a file of your own by its path, ending in .toml"
        )
    try:
        return str((folder / name).resolve()), read_toml(folder / name)
    except InputError as error:
        raise InputError(f"the preset file {error}") from error


def load(name: str) -> Preset:
    """The preset of the studies of language models called `name`, as `fields` finds it."""
    return opened(Request(preset=name), "keynorm", Preset)


def opened(
    request: Request,
    study: str,
    kind: type[OwnPreset],
    instead: Mapping[str, str] | None = None,
) -> OwnPreset:
    """The preset that a request names with its changes, as the `kind` that the study reads.

    Groups of a shared file that other studies read are passed over. `instead` are settings that the
    study does not read, without their `evaluation.`, and what decides in their place. Raises
    `InputError` for a change of a setting that this study does not read.
    """
    own = study if _folder(study).is_dir() else None
    others = {*GROUPS} - {*kind.model_fields}
    for setting in request.changes:
        if (top := setting.partition(".")[0]) in {"name", *others}:
            raise InputError(f"--set {setting}: reproduce {study} reads no {top} settings")
        elsewhere = (instead or {}).get(setting.removeprefix("evaluation."))
        if elsewhere:
            raise InputError(f"--set {setting}: reproduce {study} reads {elsewhere} instead")
    name, stored = fields(request.preset, own)
    changed = _changed(stored, request, {*kind.model_fields, *others})
    read = {group: value for group, value in changed.items() if own or group not in others}
    for group in kind.model_fields.keys() & {*GROUPS, "evaluation", "training"}:
        if not isinstance(read.get(group, {}), Mapping):
            raise InputError(f"{group} is a group of settings, got {read[group]!r}")
    subject = f"preset {name} of {study}" if own else f"preset {name}"
    return kind.parse({"name": name, **read}, subject)


def _changed(stored: Mapping[str, Any], request: Request, known: Collection[str]) -> dict[str, Any]:
    """The stored settings with the request's changes.

    Raises `InputError` for a setting of a group that was not named, and names the group.
    """
    for name in request.changes:
        if name.partition(".")[0] in known:
            continue
        inside = [each for each in flat(stored) if each.endswith(f".{name}")]
        if name.partition(".")[0] in LoopConfig.model_fields:
            inside = list(dict.fromkeys((f"training.{name}", *inside)))
        if inside:
            named = " or ".join(inside)
            raise InputError(f"--set {name}: there is no such setting; did you mean {named}?")
    return merged(stored, request.changes)


def typed(name: str, study: str) -> str:
    """How the preset of that name is typed: one that does not come with the package is a file."""
    known = names(study if _folder(study).is_dir() else None)
    return name if name in known else f"./{name}.toml"


def _folder(study: str | None) -> Traversable:
    shared = resources.files("normattn.lab.studies") / "presets"
    return shared if study is None else shared / study
