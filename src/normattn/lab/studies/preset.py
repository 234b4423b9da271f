"""Presets: complete settings of a study, one TOML file each, from the package or the user.

The studies of language models share their presets; each other study has its own folder. A study
ignores the groups of a shared file that belong to other studies (`[reading]` …).
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from functools import reduce
from importlib import resources
from importlib.resources.abc import Traversable
from operator import getitem
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, Field, field_validator, model_validator

from normattn.errors import InputError, unknown_name
from normattn.io import read_toml
from normattn.lab.data.tokens import GENERATED, TEXT_ONLY
from normattn.lab.sweep.config import flatten, merged, value_at
from normattn.lab.sweep.run import Request
from normattn.lab.training.config import LoopConfig
from normattn.models.config import BLOCK_SETTINGS
from normattn.settings import Settings

Protocol = Literal[
    "train_length", "non_repeated", "repeated", "last_segment", "by_position", "retrieval"
]
PROTOCOLS: tuple[Protocol, ...] = ("train_length", "non_repeated", "repeated", "last_segment")
"""The default protocols, which the table's columns show."""
GROUPS = ("continued", "mechanism", "reading")
"""Groups of settings that only one study of language models uses."""
AnyPreset = TypeVar("AnyPreset", bound="StudyPreset")
Positive = Annotated[float, Field(gt=0)]


def _check_rising(values: tuple[Any, ...], field: Any) -> tuple[Any, ...]:
    if not values or list(values) != sorted(set(values)):
        raise ValueError(f"{field.field_name} must rise, got {list(values)}")
    return values


RISING = AfterValidator(_check_rising)
"""Refuses a tuple of settings that is empty or does not rise."""


class EvaluationSettings(Settings):
    """How a trained language model is evaluated.

    - `multiples`: the tested lengths in units of the training length L. Same final tokens and
      retrieval are evaluated at each of them, other texts longer than L at the longest, whose
      positions show the shorter ones. It also sets the `factor` of every stretching method.
    - `max_windows`: the largest number of windows in a set.
    - `max_tokens`: the largest number of tokens in a batch; affects results only by rounding.
    - `precision`: "bf16" evaluates under autocast.
    - `split`: settings are chosen on "validation", tables made on "test".
    """

    protocols: tuple[Protocol, ...] = Field(default=PROTOCOLS, min_length=1)
    multiples: Annotated[tuple[Annotated[int, Field(ge=1)], ...], RISING] = (1, 2, 4, 8)
    max_windows: int = Field(default=128, ge=1)
    max_tokens: int = Field(default=16384, ge=1)
    precision: Literal["fp32", "bf16"] = "fp32"
    seed: int = Field(default=0, ge=0)
    split: Literal["test", "validation"] = "test"

    @property
    def factor(self) -> float:
        """The longest tested length over L, by which NTK and YaRN stretch."""
        return float(max(self.multiples))

    @property
    def ends(self) -> tuple[int, ...]:
        """The shortest and the longest of the tested lengths."""
        return self.multiples[:: max(1, len(self.multiples) - 1)]


class StudyPreset(Settings):
    """What every preset has: a name, a one-line summary, the number of seeds, and the training.

    `varied` has the settings, besides the seed, that the study itself varies, with placeholders for
    checking complete settings. No preset may set them.
    """

    varied: ClassVar[Mapping[str, Any]] = {}

    name: str
    summary: str
    seeds: int = Field(default=1, ge=1, le=1000)
    training: dict[str, Any]

    @model_validator(mode="after")
    def _refuse_varied(self) -> StudyPreset:
        for name in ("seed", *self.varied):
            if value_at(self.training, name) is not None:
                raise ValueError(f"training.{name} is varied by the study, not set by a preset")
        return self

    def whole_training(
        self, kind: type[LoopConfig], *more: Mapping[str, Any], subject: str = "training"
    ) -> dict[str, Any]:
        """The training settings with all defaults, overridden by `more`, without what varies."""
        placeholders = {"seed": 0, **self.varied}
        fields = merged(self.training, *more, placeholders)
        complete = kind.parse(fields, f"preset {self.name}, {subject}").model_dump(mode="json")
        for name in placeholders:
            *groups, last = name.split(".")
            del reduce(getitem, groups, complete)[last]
        return complete


class Preset(StudyPreset):
    """The preset of a study of language models; `training` holds `TrainingConfig` fields."""

    varied: ClassVar[Mapping[str, Any]] = {"model.score": "Baseline"}

    evaluation: EvaluationSettings = EvaluationSettings()

    @field_validator("training")
    @classmethod
    def _has_a_model(cls, value: dict[str, Any]) -> dict[str, Any]:
        model = value.get("model")
        if not isinstance(model, Mapping):
            problem = "it is missing" if model is None else f"got {model!r}"
            raise ValueError(f"model must be a group of settings, as dim and layers; {problem}")
        return value


def names(study: str | None = None) -> list[str]:
    """The names of the package's presets: a study's own, or those that studies share."""
    return sorted(
        item.name.removesuffix(".toml").replace("_", "-")
        for item in _folder(study).iterdir()
        if item.name.endswith(".toml")
    )


def fields(name: str, study: str | None = None) -> tuple[str, dict[str, Any]]:
    """The name and the settings of the preset `name`, or of the TOML file at the path `name`.

    A file that begins with `base = "NAME"` (or a path relative to the file) holds only what differs
    from that preset. Raises `InputError` for an unknown name (with the nearest), an unreadable
    file, and a base that leads back to the file.
    """
    known = names(study)
    layers: dict[str, dict[str, Any]] = {}  # by the preset's name, or the file's absolute path
    base, folder = name, Path()
    while base:
        source = base if base in known else str((folder / base).resolve())
        if source in layers:
            raise InputError(f"a preset cannot be its own base: {' -> '.join([*layers, source])}")
        if base in known:
            packaged = _folder(study) / f"{base.replace('-', '_')}.toml"
            layer = tomllib.loads(packaged.read_text("utf-8"))
        elif base.endswith(".toml"):
            try:
                layer = read_toml(folder / base)
            except InputError as error:
                raise InputError(f"the preset file {error}") from error
        else:
            raise unknown_name(
                "preset", base, known, ", and a file of your own by its path, ending in .toml"
            )
        layers[source], folder = layer, Path(source).parent
        base = str(layer.pop("base", ""))
    settings: dict[str, Any] = {}
    for layer in reversed(layers.values()):
        settings.pop("name", None)
        settings = overridden(settings, layer, training="training.")
    return name if name in known else Path(name).stem, settings


def overridden(
    preset: Mapping[str, Any], *layers: Mapping[str, Any], training: str = ""
) -> dict[str, Any]:
    """The settings of a preset, overridden by each layer in turn (as `merged`).

    The preset's settings of another kind of block are dropped, and its settings of text where a
    layer's corpus is generated. `training` is the dotted beginning of the training settings.
    """
    base, changes = merged(preset), merged({}, *layers)
    block, corpus = (value_at(changes, training + name) for name in ("model.block", "data.corpus"))
    kind = str(value_at(base, f"{training}model.block") or "mha")
    foreign = {
        "model": () if block in (None, kind) else BLOCK_SETTINGS.get(kind, ()),
        "data": TEXT_ONLY if str(corpus).startswith(GENERATED) else (),
    }
    for group, unused in foreign.items():
        settings = value_at(base, training + group)
        for name in unused if isinstance(settings, dict) else ():
            settings.pop(name, None)
    return merged(base, *layers)


def load(name: str) -> Preset:
    """The preset of the studies of language models called `name`, as `fields` finds it."""
    return load_preset(Request(preset=name), "keynorm", Preset)


def load_preset(
    request: Request, study: str, kind: type[AnyPreset], unused: Collection[str] = ()
) -> AnyPreset:
    """Load the preset of a request, with the request's changes, as a `kind`.

    Groups of a shared file that belong to other studies are ignored. Raises `InputError` for a
    change of a setting in these groups or in `unused`, and for one without its group.
    """
    own_folder = study if _folder(study).is_dir() else None
    ignored = {*GROUPS} - {*kind.model_fields}
    asked = merged({}, request.changes)
    given = [setting for setting in unused if value_at(asked, setting) is not None]
    for setting in (*given, *({*asked} & {"name", *ignored})):
        raise InputError(f"--set {setting}: reproduce {study} does not use that setting")
    name, stored = fields(request.preset, own_folder)
    for changed in request.changes:
        group = changed.partition(".")[0]
        if group in kind.model_fields or group in ignored:
            continue
        meant = [setting for setting in flatten(stored) if setting.endswith(f".{changed}")]
        if group in LoopConfig.model_fields:
            meant.insert(0, f"training.{changed}")
        if meant:
            nearest = " or ".join(dict.fromkeys(meant))
            raise InputError(f"--set {changed}: there is no such setting; did you mean {nearest}?")
    settings = overridden(stored, request.changes, training="training.")
    if own_folder is None:
        settings = {group: value for group, value in settings.items() if group not in ignored}
    for group in kind.model_fields.keys() & {*GROUPS, "evaluation", "training"}:
        if not isinstance(settings.get(group, {}), Mapping):
            raise InputError(f"{group} is a group of settings, got {settings[group]!r}")
    subject = f"preset {name} of {study}" if own_folder else f"preset {name}"
    return kind.parse({"name": name, **settings}, subject)


def preset_argument(name: str, study: str) -> str:
    """What to type for a preset: its name, or ./NAME.toml where the package lacks it."""
    known = names(study if _folder(study).is_dir() else None)
    return name if name in known else f"./{name}.toml"


def _folder(study: str | None) -> Traversable:
    shared = resources.files("normattn.lab.studies") / "presets"
    return shared if study is None else shared / study
