"""A model as two files: config.json and model.safetensors, written whole or not at all."""

from __future__ import annotations

import hashlib
import json
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel
from torch import Tensor, nn

from normattn import io
from normattn.errors import InputError
from normattn.io import check_digest, read_json, read_tensors, write_tensors
from normattn.models.causal_lm import CausalLM
from normattn.models.utils import on_meta
from normattn.settings import first_difference

# A class is made from its `config` alone, which is of its `config_class`.
FORMATS = {
    "normattn.causal_lm/1": ("causal_lm", "CausalLM"),
    "normattn.masked_lm/1": ("masked_lm", "MaskedLM"),
    "normattn.classifier/1": ("classifier", "Classifier"),
    "normattn.translator/1": ("translator", "Translator"),
    "normattn.vision_transformer/1": ("vision_transformer", "VisionTransformer"),
}
"""The module of `normattn.models` and the class of each kind of saved model."""
Model = TypeVar("Model", bound=nn.Module)
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"


def save_model(model: nn.Module, directory: Path | str) -> None:
    """Write the trained model, of one of `FORMATS`, to `directory`: its settings and its weights.

    A post-hoc method that is switched on is no part of the trained model and is not saved.
    config.json holds `format`, the settings under `config`, and the SHA-256 of settings and
    weights. A directory that stands there is replaced as a whole if it holds a saved model or
    nothing. Raises `InputError` when it holds anything else, when the disk is full or cannot be
    written.
    """
    path, name = Path(directory), type(model).__name__
    formats = {each: kind for kind, (_, each) in FORMATS.items()}
    if name not in formats or not isinstance(model, _class_of(formats[name])):
        raise InputError(f"a {name} cannot be saved; there are {', '.join(formats)}")
    if path.exists() and not path.is_dir():
        raise InputError(f"{path} is a file; a model is saved as a directory")
    others = {entry.name for entry in path.iterdir()} if path.exists() else set()
    if others := others - {CONFIG_FILE, WEIGHTS_FILE}:
        raise InputError(
            f"{path} holds {sorted(others)[0]}, which is not part of a saved model; "
            "choose an empty or a new directory"
        )
    config = model.config
    assert isinstance(config, BaseModel)

    def fill(folder: Path) -> None:
        settings = config.model_dump(mode="json")
        description = {
            "format": formats[name],
            "config": settings,
            "config_sha256": _digest(formats[name], settings),
            "weights_sha256": write_tensors(folder / WEIGHTS_FILE, model.state_dict()),
        }
        text = json.dumps(description, indent=2, ensure_ascii=False, allow_nan=False)
        (folder / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")

    io.write_directory(path, fill, replace=True)


def load_model(directory: Path | str, expected: BaseModel | None = None) -> CausalLM:
    """Read a causal language model that `save_model` wrote; as `load_any`, of that one class."""
    return load_as(CausalLM, directory, expected)


def load_as(kind: type[Model], directory: Path | str, expected: BaseModel | None = None) -> Model:
    """Read a model of one class as `load_any` does; `InputError` when another is saved there."""
    model = load_any(directory, expected)
    if not isinstance(model, kind):
        raise InputError(
            f"{directory} holds a {type(model).__name__}, but a {kind.__name__} is needed here"
        )
    return model


def check_weights(directory: Path | str) -> None:
    """`InputError` where a saved model is missing or its weights are not as `save_model` left them.

    Quick beside `load_any`: no model is made.
    """
    path = Path(directory)
    check_digest(path / WEIGHTS_FILE, _read_description(path / CONFIG_FILE)["weights_sha256"])


def load_any(directory: Path | str, expected: BaseModel | None = None) -> nn.Module:
    """Read a model that `save_model` wrote; the result is in training mode, on the CPU.

    `expected` are the settings that the run says it was trained with. Nothing is drawn: the model
    is made without memory and given the tensors of the file, in their types. Raises `InputError`
    for a missing or damaged file, an unknown format or setting, settings that are not the expected
    ones or were changed since they were saved, and weights that are not those of the configuration.

    Models saved before the settings had a digest are read without that check; where `expected` is
    given, as it is for every run, they are compared with it all the same.
    """
    described, stored = Path(directory) / CONFIG_FILE, Path(directory) / WEIGHTS_FILE
    description = _read_description(described)
    settings = description["config"]
    kind: Any = _class_of(description["format"])
    tensors = read_tensors(stored, description["weights_sha256"])
    if not isinstance(settings, dict):
        raise InputError(f"{described}: the field 'config' is not an object")
    _refuse_layers(settings, len(tensors), described)
    try:
        with on_meta():
            config: BaseModel = kind.config_class(**settings)
            model: nn.Module = kind(config)
    except InputError as error:
        raise InputError(f"{described}: {error}") from error
    except (RuntimeError, TypeError) as error:  # a size that no tensor can have
        raise InputError(f"{described} has sizes that no model can have") from error
    _check_tensors(model, tensors, stored)
    _check_settings(config, expected, description, described)
    model.load_state_dict(tensors, assign=True)
    return model


def _check_settings(
    config: BaseModel, expected: BaseModel | None, description: dict[str, Any], path: Path
) -> None:
    """Other settings make another model of the same weights, and no size need tell."""
    difference = None
    if expected is not None:
        wanted, found = (each.model_dump(mode="json") for each in (expected, config))
        difference = first_difference(wanted, found)
    if difference is not None:
        field, one, other = difference
        raise InputError(
            f"{path} is not of the model that the run describes: {field} is {other} there "
            f"and {one} in the run's configuration"
        )
    digest = description.get("config_sha256")
    if digest is not None and digest != _digest(description["format"], description["config"]):
        raise InputError(
            f"{path} was changed after the model was saved: its settings do not match their SHA-256"
        )


def _digest(kind: str, config: dict[str, Any]) -> str:
    """The SHA-256 of a model's format and settings, however the file is laid out."""
    text = json.dumps([kind, config], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _class_of(name: str) -> type[nn.Module]:
    module, kind = FORMATS[name]
    model_class: type[nn.Module] = getattr(import_module(f"normattn.models.{module}"), kind)
    return model_class


def _read_description(path: Path) -> dict[str, Any]:
    description = read_json(path)
    if not isinstance(description, dict) or description.get("format") not in list(FORMATS):
        raise InputError(
            f"{path} does not describe a model of a format known here: {', '.join(FORMATS)}"
        )
    unknown = sorted(set(description) - {"format", "config", "config_sha256", "weights_sha256"})
    missing = sorted({"config", "weights_sha256"} - set(description))
    if unknown or missing:
        what = "has the unknown field" if unknown else "lacks the field"
        raise InputError(f"{path} {what} {(unknown or missing)[0]!r}")
    return description


def _refuse_layers(values: dict[str, Any], tensors: int, path: Path) -> None:
    """Refuse more layers than tensors: each is an object, even without memory."""
    for name, value in values.items():
        if isinstance(value, dict):
            _refuse_layers(value, tensors, path)
        counted = "layers" in name and type(value) is int and not values.get("shared_layers")
        if counted and value > tensors:
            raise InputError(f"{path}: {name} is {value:,}, but the weights are {tensors} tensors")


def _check_tensors(model: nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    expected = model.state_dict()
    for problem, names in (
        ("lacks", set(expected) - set(tensors)),
        ("has", set(tensors) - set(expected)),
    ):
        if names:
            raise InputError(
                f"{path} {problem} the tensor {min(names)}, unlike the model that {CONFIG_FILE} "
                "describes"
            )
    for name, value in expected.items():
        found = tensors[name]
        if found.shape != value.shape or found.is_floating_point() != value.is_floating_point():
            raise InputError(
                f"{path}: {name} is {found.dtype} of {tuple(found.shape)}, but {CONFIG_FILE} asks "
                f"for {value.dtype} of {tuple(value.shape)}"
            )
