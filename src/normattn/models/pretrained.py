"""Saved models: config.json and model.safetensors, written completely or not at all."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel
from torch import nn

from normattn.errors import InputError
from normattn.io import check_digest, read_json, read_tensors, write_directory, write_tensors
from normattn.models.causal_lm import CausalLM
from normattn.models.classifier import Classifier
from normattn.models.masked_lm import MaskedLM
from normattn.models.translator import Translator
from normattn.models.utils import on_meta
from normattn.models.vision_transformer import VisionTransformer
from normattn.settings import first_difference

FORMATS: dict[str, Any] = {
    "normattn.causal_lm/1": CausalLM,
    "normattn.masked_lm/1": MaskedLM,
    "normattn.classifier/1": Classifier,
    "normattn.translator/1": Translator,
    "normattn.vision_transformer/1": VisionTransformer,
}
"""The model class of each format; its configuration is a `config_class`."""
Model = TypeVar("Model", bound=nn.Module)
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"


def save_model(model: nn.Module, directory: Path | str) -> None:
    """Write the configuration and weights of a model in `FORMATS` to `directory`.

    An inference-time method that is switched on is not saved. config.json holds `format`, the
    fields of the configuration under `config`, and the SHA-256 of configuration and weights. An
    existing directory is replaced as a whole if it is empty or holds a saved model. Raises
    `InputError` if it holds anything else, or cannot be written.
    """
    path = Path(directory)
    name = next((name for name, kind in FORMATS.items() if type(model) is kind), None)
    if name is None:
        known = ", ".join(kind.__name__ for kind in FORMATS.values())
        raise InputError(f"a {type(model).__name__} cannot be saved; there are {known}")
    if path.exists() and not path.is_dir():
        raise InputError(f"{path} is a file; a model is saved as a directory")
    extra = {entry.name for entry in path.iterdir()} if path.exists() else set()
    if extra := extra - {CONFIG_FILE, WEIGHTS_FILE}:
        raise InputError(
            f"{path} holds {min(extra)}, which is not part of a saved model; "
            "choose an empty or a new directory"
        )
    config = model.config
    assert isinstance(config, BaseModel)

    def fill(folder: Path) -> None:
        settings = config.model_dump(mode="json")
        description = {
            "format": name,
            "config": settings,
            "config_sha256": _digest(name, settings),
            "weights_sha256": write_tensors(folder / WEIGHTS_FILE, model.state_dict()),
        }
        text = json.dumps(description, indent=2, ensure_ascii=False, allow_nan=False)
        (folder / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")

    write_directory(path, fill, replace=True)


def load_model(directory: Path | str, expected: BaseModel | None = None) -> CausalLM:
    """Load a causal language model; otherwise as `load_any`."""
    return load_as(CausalLM, directory, expected)


def load_as(kind: type[Model], directory: Path | str, expected: BaseModel | None = None) -> Model:
    """Load a model as `load_any` does; `InputError` if it is not of this class."""
    model = load_any(directory, expected)
    if not isinstance(model, kind):
        raise InputError(
            f"{directory} holds a {type(model).__name__}, but a {kind.__name__} is needed here"
        )
    return model


def load_any(directory: Path | str, expected: BaseModel | None = None) -> nn.Module:
    """Load a model that `save_model` wrote, in training mode, on the CPU.

    `expected` is the configuration that the run was trained with. The model is built on the meta
    device and takes the tensors of the file in their dtypes; no random numbers are drawn. Raises
    `InputError` for a missing or damaged file, an unknown format or field, a configuration that is
    not the expected one or was changed since it was saved, and weights that do not fit it.

    Models saved before configurations had a digest are loaded without that check.
    """
    config_path, weights_path = Path(directory) / CONFIG_FILE, Path(directory) / WEIGHTS_FILE
    description = _read_description(config_path)
    name, settings = description["format"], description["config"]
    tensors = read_tensors(weights_path, description["weights_sha256"])
    if not isinstance(settings, dict):
        raise InputError(f"{config_path}: the field 'config' is not an object")
    try:
        with on_meta():
            config = FORMATS[name].config_class(**settings)
            model: nn.Module = FORMATS[name](config)
    except InputError as error:
        raise InputError(f"{config_path}: {error}") from error
    except (RuntimeError, TypeError) as error:  # a size that no tensor can have
        raise InputError(f"{config_path} has sizes that no model can have") from error
    try:
        model.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        problem = " ".join(str(error).split())
        raise InputError(f"{weights_path} does not fit {CONFIG_FILE}: {problem}") from error
    if expected is not None:
        run_fields, file_fields = (x.model_dump(mode="json") for x in (expected, config))
        if difference := first_difference(run_fields, file_fields):
            field, in_run, in_file = difference
            raise InputError(
                f"{config_path} is not of the model that the run describes: {field} is {in_file} "
                f"there and {in_run} in the run's configuration"
            )
    if description.get("config_sha256") not in (None, _digest(name, settings)):
        raise InputError(
            f"{config_path} was changed after the model was saved: its settings do not match their "
            "SHA-256"
        )
    return model


def check_weights(directory: Path | str) -> None:
    """Raise `InputError` if a saved model is missing or its weights changed; builds no model."""
    path = Path(directory)
    check_digest(path / WEIGHTS_FILE, _read_description(path / CONFIG_FILE)["weights_sha256"])


def _read_description(path: Path) -> dict[str, Any]:
    description = read_json(path)
    if not isinstance(description, dict) or description.get("format") not in list(FORMATS):
        raise InputError(
            f"{path} does not describe a model of a format known here: {', '.join(FORMATS)}"
        )
    unknown = sorted(set(description) - {"format", "config", "config_sha256", "weights_sha256"})
    missing = sorted({"config", "weights_sha256"} - set(description))
    if unknown or missing:
        problem = "has the unknown field" if unknown else "lacks the field"
        raise InputError(f"{path} {problem} {(unknown or missing)[0]!r}")
    return description


def _digest(name: str, config: dict[str, Any]) -> str:
    """The SHA-256 of a model's format and configuration, independent of the file's layout."""
    text = json.dumps([name, config], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()
