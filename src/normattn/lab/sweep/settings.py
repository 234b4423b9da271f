"""A preset's settings: how cells are trained and measured; and layers of settings, merged."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError, field_validator

from normattn.errors import InputError
from normattn.settings import Settings, refuse_beyond

Model = TypeVar("Model", bound=BaseModel)
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
"""What is measured unless said: what the columns of the table hold."""


class EvaluationSettings(Settings):
    """How a trained run is measured.

    `multiples` are the tested lengths in units of the training length L: the last segment is read
    after each, retrieval is asked at each, repeated, non-repeated and
    by-position text read at the longest one (its shorter readings are its positions), which also
    sets the `factor` of every stretching method, for the whole table.
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


STUDY_GROUPS = ("window", "continued", "mechanism", "reading")
"""Groups of a preset's file that one study alone reads; the others pass over them."""


class StudyPreset(Settings):
    """What every preset says: its name, one line about it, and how many seeds are trained."""

    name: str
    summary: str
    seeds: int = Field(default=1, ge=1, le=1000)


class Preset(StudyPreset):
    """One whole setting of a study of language models; `training` holds fields of `TrainingConfig`.

    The score and the seed are no part of it: they are what a table varies. A study with settings
    of its own adds them as a group in a subclass.
    """

    training: dict[str, Any]
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


def validated(model: type[Model], fields: Mapping[str, Any], subject: str) -> Model:
    """`model` filled with `fields`; what is wrong with them comes as one `InputError` sentence."""
    refuse_beyond(fields, subject)
    try:
        return model.model_validate(dict(fields))
    except ValidationError as error:
        raise InputError(explain(error, model, subject)) from error


def explain(error: ValidationError, model: type[BaseModel], subject: str) -> str:
    """A validation error of `model` as one sentence: each field, what is wrong, and what it got."""
    return f"{subject}: " + "; ".join(_one(dict(item), model) for item in error.errors())


def _one(item: dict[str, Any], model: type[BaseModel]) -> str:
    path = [str(part) for part in item["loc"]]
    name = ".".join(path)
    if item["type"] == "extra_forbidden":
        return unknown_field(path, model)
    if item["type"] == "missing":
        return f"{name} is missing"
    message = str(item["msg"]).removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    given = item.get("input")
    shown = f" (got {given!r})" if isinstance(given, int | float | str | bool) else ""
    said = f"{message}{'' if repr(given) in message else shown}"
    return f"{name}: {said}" if name else said


def unknown_field(path: list[str], model: type[BaseModel]) -> str:
    """The sentence for a field that `model` does not have, with the nearest that it has."""
    known = list(field_paths(model))
    name = ".".join(path)
    same_end = [field for field in known if field.rsplit(".", 1)[-1] == path[-1]]
    near = (same_end or get_close_matches(name, known, n=3, cutoff=0.5))[:3]
    siblings = [field for field in known if field.rpartition(".")[0] == name.rpartition(".")[0]]
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(siblings)}"
    return f"there is no setting {name}; {hint}"


def field_paths(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Every dotted path of a field in `model`, groups of fields opened."""
    paths = []
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            paths += field_paths(kind, f"{prefix}{name}.")
        else:
            paths.append(f"{prefix}{name}")
    return paths


def merged(base: Mapping[str, Any], *layers: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the nested or dotted settings of each layer laid over it.

    A dotted key is a path: `{"model.dim": 64}` changes one field of `model`. Raises `InputError`
    where a value would replace a group of settings, or a group go below a value.
    """
    result = _copy(base)
    for layer in layers:
        for key, value in layer.items():
            _put(result, key.split("."), value, key)
    return result


def value_at(fields: Mapping[str, Any], name: str) -> Any:
    """The value at a dotted name of nested settings; None where there is none."""
    value: Any = fields
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _put(target: dict[str, Any], path: list[str], value: Any, key: str) -> None:
    *parents, last = path
    for name in parents:
        # None stands where a group is switched off, as a run's `continued`.
        inner = target[name] = {} if target.get(name) is None else target[name]
        if not isinstance(inner, dict):
            raise InputError(f"{key} cannot be set: {name} is a value, not a group of settings")
        target = inner
    group = target.get(last)
    if isinstance(value, Mapping) and isinstance(group, dict):
        for name, inner_value in value.items():
            _put(group, [name], inner_value, f"{key}.{name}")
    elif isinstance(group, dict) and value is not None:
        raise InputError(
            f"{key} cannot be {value!r}: it is a group of settings ({', '.join(group)})"
        )
    else:
        target[last] = _copy(value) if isinstance(value, Mapping) else value


def _copy(value: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _copy(v) if isinstance(v, Mapping) else v for k, v in value.items()}
