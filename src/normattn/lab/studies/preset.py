"""Presets: whole settings that a study can be run in, one TOML file each, or one of your own.

The studies of language models share their presets; the others have a folder of their own. Groups
of a shared file that one study alone reads (`[window]` …) are passed over by the others.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from functools import reduce
from importlib import resources
from importlib.resources.abc import Traversable
from operator import getitem
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, field_validator

from normattn.errors import InputError, unknown
from normattn.io import read_toml
from normattn.lab.sweep.config import merged, validated, value_at
from normattn.lab.sweep.run import Request
from normattn.lab.training.config import LoopConfig
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
Group = TypeVar("Group", bound=Settings)


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
    """What every preset says: its name, one line about it, how many seeds, and the training."""

    name: str
    summary: str
    seeds: int = Field(default=1, ge=1, le=1000)
    training: dict[str, Any]


class Preset(StudyPreset):
    """One whole setting of a study of language models; `training` holds fields of `TrainingConfig`.

    The score and the seed are no part of it: they are what a table varies.
    """

    evaluation: EvaluationSettings = EvaluationSettings()

    @field_validator("training")
    @classmethod
    def _no_varied_field(cls, value: dict[str, Any]) -> dict[str, Any]:
        model = value.get("model")
        if not isinstance(model, Mapping):
            given = "it is missing" if model is None else f"got {model!r}"
            raise ValueError(f"model must be a group of settings, as dim and layers; {given}")
        if "seed" in value or "score" in model:
            raise ValueError("the score and the seed are varied by the table, not set by a preset")
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

    Raises `InputError` for an unknown name (naming the nearest) and a file that cannot be read.
    """
    known = names(study)
    if name in known:
        packaged = _folder(study) / f"{name.replace('-', '_')}.toml"
        return name, tomllib.loads(packaged.read_text("utf-8"))
    if not name.endswith(".toml"):
        raise unknown(
            "preset", name, known, ", and a file of your own by its path, ending in .toml"
        )
    try:
        return Path(name).stem, read_toml(Path(name))
    except InputError as error:
        raise InputError(f"the preset file {error}") from error


def load(name: str) -> Preset:
    """The preset of the studies of language models called `name`, as `fields` finds it."""
    return opened(Request(preset=name), "keynorm")


def opened(
    request: Request,
    study: str,
    group: str = "",
    instead: Mapping[str, str] | None = None,
) -> Preset:
    """The shared preset with the request's changes, without the `group` that `own_group` reads.

    `instead` are settings of `evaluation` and of the group that the study does not read, and what
    decides in their place. Raises `InputError` for a change of a setting that this study does not
    read.
    """
    for name in request.changes:
        top = name.partition(".")[0]
        if top in {"name", *GROUPS} - {group}:
            raise InputError(f"--set {name}: reproduce {study} reads no {top} settings")
        own = (instead or {}).get(name.removeprefix("evaluation."))
        if own:
            raise InputError(f"--set {name}: reproduce {study} reads {own} instead")
    name, stored = fields(request.preset)
    changed = merged({"name": name, **stored}, request.changes)
    shared = {key: value for key, value in changed.items() if key not in GROUPS}
    return validated(Preset, shared, f"preset {name}")


def own_group(request: Request, group: str, kind: type[Group]) -> Group:
    """The group of settings that one study alone reads, with the request's changes."""
    name, stored = fields(request.preset)
    changed = merged(stored, request.changes).get(group, {})
    if not isinstance(changed, Mapping):
        raise InputError(f"{group} is a group of settings, got {changed!r}")
    return validated(kind, changed, f"preset {name}, {group}")


def opened_as(request: Request, study: str, kind: type[OwnPreset]) -> OwnPreset:
    """A study's own preset of that name with the request's changes, checked as a `kind`."""
    name, stored = fields(request.preset, study)
    changed = merged({"name": name, **stored}, request.changes)
    return validated(kind, changed, f"preset {name} of {study}")


def shared_training(
    kind: type[LoopConfig],
    fields: Mapping[str, Any],
    varied: Sequence[str],
    subject: str,
    fill: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Settings of a training with every default, less the seed and what else the study varies.

    `fill` stands in for varied settings that have no default. Raises `InputError` for settings
    that cannot be, and for a value of one that is varied.
    """
    refuse_varied(fields, varied, subject)
    whole = kind.parse(merged(fields, fill or {}), subject).model_dump(mode="json")
    for name in ("seed", *varied):
        *groups, last = name.split(".")
        del reduce(getitem, groups, whole)[last]
    return whole


def refuse_varied(fields: Mapping[str, Any], varied: Sequence[str], subject: str) -> None:
    """Raise `InputError` where a preset sets the seed, or what else the study varies."""
    for name in ("seed", *varied):
        if value_at(fields, name) is not None:
            raise InputError(f"{subject}: {name} is varied by the study, not set by a preset")


def typed(name: str, study: str) -> str:
    """How the preset of that name is typed: one that does not come with the package is a file."""
    known = names(study if _folder(study).is_dir() else None)
    return name if name in known else f"./{name}.toml"


def _folder(study: str | None) -> Traversable:
    shared = resources.files("normattn.lab.studies") / "presets"
    return shared if study is None else shared / study
