"""Save a method in a model's configuration: as a record, and as `rope_parameters` where possible.

Every engine that reads `rope_parameters` (transformers itself, vLLM, SGLang, the converter of
llama.cpp) then applies it without normattn. They are written only where the model's own rotary
module computes the method's angles from them.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.hf.model_parts import ModelParts, explained, layer_type
from normattn.hf.probe import Layer, rotary_buffers
from normattn.hf.rotations import read_tables
from normattn.io import write_json
from normattn.score import ScoreSpec
from normattn.score.parts.rope_scaling import ABF, NTK, PI, Llama3, YaRN

FIELD, TRAINED = "normattn", "trained"
"""The field of a configuration that records the method; the record's key for original fields."""
ADAPTER_FILE = "normattn.json"
"""The file of the record next to a PEFT adapter, whose folder has no model configuration."""


def native_fields(
    parts: ModelParts, layers: Sequence[Layer], spec: ScoreSpec, max_length: int | None = None
) -> dict[str, Any]:
    """The fields of the decoder's configuration that express a method, for texts of `max_length`.

    Raises `InputError` where the model's rotary module does not compute the method from them.
    """
    scaling, changes = spec.rope_scaling, None
    rotated = {layer: layer.rotation for layer in layers if layer.rotation is not None}
    rotation = next(iter(rotated.values()), None)
    frequencies_alone = spec.remapping is None and not spec.blockwise and spec.logn is None
    if frequencies_alone and rotation is not None:
        if isinstance(scaling, PI | YaRN | Llama3):
            changes = scaling_fields(scaling, spec.train_length)
        elif isinstance(scaling, ABF):
            changes = {"rope_theta": scaling.base}
        elif isinstance(scaling, NTK) and rotation.base is not None:
            size = 2 * rotation.frequencies.numel()
            changes = {"rope_theta": rotation.base * scaling.stretch ** (size / (size - 2))}
    if changes is None:
        raise InputError(
            f"transformers' rope_parameters cannot express {spec.method}, only PI (linear), YaRN "
            "(yarn), Llama3 (llama3), NTK and ABF (rope_theta)"
        )
    assert spec.train_length is not None
    if max_length is None:
        max_length = int(spec.train_length * getattr(scaling, "stretch", 1.0))
    fields = {
        "rope_parameters": merged_rope_parameters(parts, layers, spec, changes),
        "max_position_embeddings": max_length,
    }
    kinds = {(id(y.tables), layer_type(parts.config, x.index)): x for x, y in rotated.items()}
    if not all(_computes_method(parts, layer, spec, fields) for layer in kinds.values()):
        raise InputError(
            f"the rotary module of {parts.name} computes something else from rope_parameters "
            f"than {spec.method} defines"
        )
    return fields


def merged_rope_parameters(
    parts: ModelParts, layers: Sequence[Layer], spec: ScoreSpec, changes: Mapping[str, Any]
) -> dict[str, Any]:
    """The rope parameters with `changes` for full attention; `InputError` where these cannot be."""
    rotated = {layer: layer.rotation for layer in layers if layer.rotation is not None}
    ropes = getattr(parts.config, "rope_parameters", None)
    if not rotated or not isinstance(ropes, Mapping):
        raise InputError(f"{parts.name} has no rope_parameters that could express {spec.method}")
    scaled = next((rotation.scaled for rotation in rotated.values() if rotation.scaled), None)
    if scaled is not None:
        raise InputError(
            f"{parts.name} has {scaled} frequencies already, and rope_parameters hold one kind "
            f"of scaling: they cannot express {spec.method} on top"
        )
    full = [parts.rope(layer.module) for layer in rotated]
    windowed = [parts.rope(layer.module) for layer in layers if layer.sliding_window is not None]
    if windowed and (ropes in full or any(rope in full for rope in windowed)):
        raise InputError(
            f"the layers of {parts.name} within a window share their rope_parameters with the "
            f"layers of full attention: they cannot express {spec.method} for the latter alone"
        )
    if ropes in full:
        return copy.deepcopy({**ropes, **changes})
    by_type = {name: {**rope, **changes} if rope in full else rope for name, rope in ropes.items()}
    return copy.deepcopy(by_type)


def scaling_fields(scaling: PI | YaRN | Llama3, train_length: int | None) -> dict[str, Any]:
    """The rope parameters of a scaling that has a rope_type, without default values."""
    length = {"original_max_position_embeddings": train_length}
    if isinstance(scaling, PI):
        return {"rope_type": "linear", "factor": scaling.stretch}
    if isinstance(scaling, Llama3):
        ends = {"low_freq_factor": scaling.low, "high_freq_factor": scaling.high}
        return {"rope_type": "llama3", "factor": scaling.stretch, **ends, **length}
    defaults = {field.name: field.default for field in dataclasses.fields(YaRN)}
    values = {name: getattr(scaling, name) for name in ("beta_fast", "beta_slow", "truncate")}
    changed = {name: value for name, value in values.items() if value != defaults[name]}
    if scaling.sharpness != defaults["sharpness"]:
        changed["attention_factor"] = scaling.sharpness * math.log(scaling.stretch) + 1
    return {"rope_type": "yarn", "factor": scaling.stretch, **length, **changed}


def _computes_method(
    parts: ModelParts, layer: Layer, spec: ScoreSpec, fields: Mapping[str, Any]
) -> bool:
    """Whether one of the model's rotary modules computes the method from these fields."""
    assert layer.rotation is not None
    expected, spectrum = layer.rotation.tables, layer.rotation.spectrum(spec)
    config = copy.deepcopy(parts.config)
    _set_fields(config, fields)
    first = layer.tables if isinstance(layer.tables, Tensor) else layer.tables[0]
    ids = torch.arange(first.shape[1])[None]
    x = torch.zeros(1, ids.shape[1], 1, dtype=first.real.dtype)
    rotary = {type(module) for module in parts.decoder.modules() if rotary_buffers(module)}
    for rotary_class, args in itertools.product(rotary, ((), (layer_type(config, layer.index),))):
        try:
            tables = read_tables(rotary_class(config)(x, ids, *args), [spectrum])
        except Exception:  # another signature, or an unknown layer type
            continue
        if tables and (tables.layout, tables.amplitude) == (expected.layout, spectrum[1]):
            return True
    return False


def _set_fields(config: Any, fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        setattr(config, name, copy.deepcopy(value))


def record_of(config: Any, path: str | Path) -> dict[str, Any] | None:
    """The record of a model's saved method, or None; `InputError` for an invalid one."""
    record = getattr(config, FIELD, None)
    if record is not None:
        check_record(record, f"the configuration of {path}: the field {FIELD!r}")
    return record


def check_record(record: Any, where: str) -> None:
    """Raise `InputError` for an invalid record of a method."""
    types = {"method": str, "train_length": int}
    if not isinstance(record, dict) or any(type(record.get(x)) is not types[x] for x in types):
        raise InputError(f"{where} must hold a method, a name, and a train_length, a whole number")


def take_record(config: Any, path: str | Path) -> dict[str, Any] | None:
    """Restore the original configuration; return the record of the method, or None."""
    record = record_of(config, path)
    if record is not None:
        with explained(f"the configuration of {path}: the field {FIELD!r}"):
            _set_fields(config.get_text_config(), record.get(TRAINED, {}))
        delattr(config, FIELD)
    return record


def refuse_applied(config: Any) -> None:
    """Raise `InputError` where transformers has applied the method that a model was saved with."""
    record = record_of(config, getattr(config, "name_or_path", "") or "this model")
    if record is not None and TRAINED in record:
        raise InputError(
            f"this model was saved under {record['method']}, and transformers has applied it: "
            "load the model with normattn.from_pretrained and remove() the extension first"
        )


def save_with_method(
    parts: ModelParts, layers: Sequence[Layer], spec: ScoreSpec
) -> Callable[[], object]:
    """Let `save_pretrained` write a method, with PEFT next to the adapter; return the undo.

    An adapter that was added to an extended model raises `InputError` when it is saved, because
    PEFT would save its weights without the method.
    """
    model, adapted = parts.model, parts.adapted

    def saving(model: Any, config: Any, save: Callable[..., Any]) -> Callable[..., Any]:
        def save_pretrained(*args: Any, **kwargs: Any) -> Any:
            before = model.__dict__["config"]
            model.__dict__["config"] = _recorded(config, parts, layers, spec)
            try:
                return save(*args, **kwargs)
            finally:
                model.__dict__["config"] = before

        return save_pretrained

    undo = ExitStack()
    for each in dict.fromkeys((model, parts.decoder)):
        save = saving(each, each.__dict__["config"], each.save_pretrained)
        each.__dict__["save_pretrained"] = save
        undo.callback(each.__dict__.pop, "save_pretrained", None)
    if adapted is None:
        refuse = partial(_refuse_adapter_alone, spec)
        undo.callback(model.register_state_dict_pre_hook(refuse).remove)
        return undo.close
    save_adapter = adapted.save_pretrained

    def save_adapter_with_method(
        save_directory: Any,
        safe_serialization: bool = True,
        selected_adapters: Sequence[str] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        result = save_adapter(
            save_directory, safe_serialization, selected_adapters, *args, **kwargs
        )
        record = {"method": spec.method_text, "train_length": spec.train_length}
        for name in selected_adapters or adapted.peft_config:  # PEFT's folders
            folder = Path(save_directory, "" if name == "default" else name)
            write_json(folder / ADAPTER_FILE, record)
        return result

    adapted.__dict__["save_pretrained"] = save_adapter_with_method
    undo.callback(adapted.__dict__.pop, "save_pretrained", None)
    return undo.close


def _recorded(config: Any, parts: ModelParts, layers: Sequence[Layer], spec: ScoreSpec) -> Any:
    """A copy of the configuration that records a method, where possible as native fields too."""
    config, fields = copy.deepcopy(config), dict[str, Any]()
    text = config.get_text_config()
    record: dict[str, Any] = {"method": spec.method_text, "train_length": spec.train_length}
    with suppress(InputError):  # rope_parameters cannot express it
        fields = native_fields(parts, layers, spec)
        record[TRAINED] = {name: copy.deepcopy(getattr(text, name, None)) for name in fields}
    _set_fields(text, fields)
    setattr(config, FIELD, record)
    return config


def _refuse_adapter_alone(spec: ScoreSpec, module: nn.Module, *_: Any) -> None:
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is not None and any(isinstance(x, tuners.BaseTunerLayer) for x in module.modules()):
        raise InputError(
            f"the adapter of this model would be saved without the method {spec.method_text} "
            "that it was trained under: extend the PEFT model itself, "
            "normattn.extend(get_peft_model(...), ...), whose save_pretrained writes the "
            "method, or remove() the extension first"
        )
