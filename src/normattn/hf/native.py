"""What a saved model says of a method: a record, and transformers' own words where it has them.

Every engine that reads `rope_parameters` (transformers itself, vLLM, SGLang, the converter of
llama.cpp) then applies it without normattn. The words are kept only where the model's own rotary
module, made of them, gives the angles that the method means.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.hf.model_parts import ModelParts, layer_type
from normattn.hf.probe import rotary_buffers
from normattn.hf.rope_detection import (
    HeadRotation,
    Layer,
    read_tables,
)
from normattn.io import write_json
from normattn.score import ScoreSpec
from normattn.score.parts.rope_scaling import ABF, NTK, PI, Llama3, YaRN

_FIELDS = ("rope_parameters", "max_position_embeddings")
FIELD, TRAINED = "normattn", "trained"
"""Where a saved configuration stores its method, and the original fields."""
ADAPTER_FILE = "normattn.json"
"""The record next to an adapter of PEFT, whose folder holds no configuration of the model."""


def native_fields(
    parts: ModelParts, layers: Sequence[Layer], spec: ScoreSpec, longest: int | None = None
) -> dict[str, Any]:
    """The fields of the decoder's configuration that mean the method, for texts of `longest`.

    Raises `InputError` as `merged_rope_parameters` and `words` do, and for families whose own rotary module
    makes something else of the fields.
    """
    rotated = [layer for layer in layers if layer.rotation is not None]
    more = words(spec, rotated[0].rotation if rotated else None)
    assert spec.train_length is not None
    stretch = getattr(spec.rope_scaling, "stretch", 1.0)
    longer = int(spec.train_length * stretch) if longest is None else longest
    fields = {
        "rope_parameters": merged_rope_parameters(parts, layers, spec, more),
        "max_position_embeddings": longer,
    }
    kinds = {(id(x.made_of), layer_type(parts.config, x.index)): x for x in rotated}
    if not all(_is_meant(parts, layer, spec, fields) for layer in kinds.values()):
        raise InputError(
            f"the rotary module of {parts.name} computes something else from rope_parameters "
            f"than {spec.method} defines"
        )
    return fields


def merged_rope_parameters(
    parts: ModelParts, layers: Sequence[Layer], spec: ScoreSpec, more: Mapping[str, Any]
) -> dict[str, Any]:
    """The model's rope parameters with `more` in those of its layers that see everything.

    Raises `InputError` where there are none, where they say a scaling already, and where layers
    within a window share them.
    """
    rotated = [layer for layer in layers if layer.rotation is not None]
    given = getattr(parts.config, "rope_parameters", None)
    if not rotated or not isinstance(given, Mapping):
        raise InputError(f"{parts.name} has no rope_parameters that could express {spec.method}")
    scaled = next((x.rotation.scaled for x in rotated if x.rotation and x.rotation.scaled), None)
    if scaled is not None:
        raise InputError(
            f"{parts.name} has {scaled} frequencies already, and rope_parameters hold one kind "
            f"of scaling: they cannot express {spec.method} on top"
        )
    own = [parts.rope(layer.module) for layer in rotated]
    within = [parts.rope(layer.module) for layer in layers if layer.sliding is not None]
    if within and (given in own or any(rope in own for rope in within)):
        raise InputError(
            f"the layers of {parts.name} within a window share their rope_parameters with the "
            f"layers of full attention: they cannot express {spec.method} for the latter alone"
        )
    if given in own:
        return copy.deepcopy({**given, **more})
    nested = {name: {**rope, **more} if rope in own else rope for name, rope in given.items()}
    return copy.deepcopy(nested)


def words(spec: ScoreSpec, rotation: HeadRotation | None) -> dict[str, Any]:
    """The rope parameters that say a method; `InputError` where transformers has none."""
    scaling = spec.rope_scaling
    frequencies_alone = spec.remapping is None and not spec.blockwise and spec.logn is None
    if frequencies_alone and rotation is not None:
        if isinstance(scaling, PI | YaRN | Llama3):
            return scaling_fields(scaling, spec.train_length)
        if isinstance(scaling, ABF):
            return {"rope_theta": scaling.base}
        if isinstance(scaling, NTK) and rotation.base is not None:
            size = 2 * rotation.frequencies.numel()
            return {"rope_theta": rotation.base * scaling.stretch ** (size / (size - 2))}
    raise InputError(
        f"transformers' rope_parameters cannot express {spec.method}, only PI (linear), YaRN "
        "(yarn), Llama3 (llama3), NTK and ABF (rope_theta)"
    )


def scaling_fields(scaling: PI | YaRN | Llama3, train_length: int | None) -> dict[str, Any]:
    """The rope parameters of a scaling that has a rope_type: what differs from the usual values."""
    length = {"original_max_position_embeddings": train_length}
    if isinstance(scaling, PI):
        return {"rope_type": "linear", "factor": scaling.stretch}
    if isinstance(scaling, Llama3):
        ends = {"low_freq_factor": scaling.low, "high_freq_factor": scaling.high}
        return {"rope_type": "llama3", "factor": scaling.stretch, **ends, **length}
    usual = {field.name: field.default for field in dataclasses.fields(YaRN)}
    names = ("beta_fast", "beta_slow", "truncate")
    own = {name: getattr(scaling, name) for name in names if getattr(scaling, name) != usual[name]}
    if scaling.sharpness != usual["sharpness"]:
        own["attention_factor"] = scaling.sharpness * math.log(scaling.stretch) + 1
    return {"rope_type": "yarn", "factor": scaling.stretch, **length, **own}


def _is_meant(parts: ModelParts, layer: Layer, spec: ScoreSpec, fields: Mapping[str, Any]) -> bool:
    """Whether some rotary module of the model, made by these fields, makes what is meant."""
    tables, given, meant = layer.made_of, layer.tables, layer.spectrum(spec)
    assert tables is not None
    config = copy.deepcopy(parts.config)
    _put_fields(config, fields)
    first = given if isinstance(given, Tensor) else given[0]
    ids = torch.arange(first.shape[1])[None]
    rows = torch.zeros(1, ids.shape[1], 1, dtype=first.real.dtype)
    for kind in {type(module) for module in parts.decoder.modules() if rotary_buffers(module)}:
        for more in ((), (layer_type(parts.config, layer.index),)):
            try:
                made = read_tables(kind(config)(rows, ids, *more), [meant])
            except Exception:  # another signature, or a type of layer that it does not know
                continue
            if made is not None and made.layout == tables.layout and made.amplitude == meant[1]:
                return True
    return False


def _put_fields(config: Any, fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        setattr(config, name, copy.deepcopy(value))


def record_method(config: Any, parts: ModelParts, layers: Sequence[Layer], spec: ScoreSpec) -> None:
    """Write a method into a configuration that is about to be saved.

    Also in transformers' own format, where it has one; what it replaces is kept as well.
    """
    record: dict[str, Any] = {"method": spec.method_text, "train_length": spec.train_length}
    try:
        fields = native_fields(parts, layers, spec)
    except InputError:
        fields = {}
    text = config.get_text_config()
    if fields:
        record[TRAINED] = {name: copy.deepcopy(getattr(text, name, None)) for name in _FIELDS}
    _put_fields(text, fields)
    setattr(config, FIELD, record)


def record_of(config: Any, path: str | Path) -> dict[str, Any] | None:
    """The method that a configuration says its model was saved under; None where it says none.

    Keys: method, train_length, and `trained`, the fields as they were, where the configuration
    holds others. Raises `InputError` for a record that lacks something or has other types.
    """
    record = getattr(config, FIELD, None)
    if record is not None:
        check_record(record, f"the configuration of {path}: the field {FIELD!r}")
    return record


def check_record(record: Any, where: str) -> None:
    """Raise `InputError` for what is no record of a method."""
    types = {"method": str, "train_length": int, TRAINED: dict}
    if (
        not isinstance(record, dict)
        or set(record) | {TRAINED} != set(types)
        or any(type(value) is not types[name] for name, value in record.items())
    ):
        raise InputError(
            f"{where} must hold a method, a name, and a train_length, a whole number; {TRAINED!r} "
            "next to them holds fields"
        )


def take_record(config: Any, path: str | Path) -> dict[str, Any] | None:
    """Restore the configuration of the trained model; return the method's entry, or None.

    Raises as `record_of` does.
    """
    record = record_of(config, path)
    if record is not None:
        _put_fields(config.get_text_config(), record.get(TRAINED, {}))
        delattr(config, FIELD)
    return record


def refuse_applied(config: Any) -> None:
    """Raise `InputError` where transformers has applied the method that a model was saved under.

    Its configuration then says longer texts and other frequencies than those of the training.
    """
    record = record_of(config, getattr(config, "name_or_path", "") or "this model")
    if record is not None and TRAINED in record:
        raise InputError(
            f"this model was saved under {record['method']}, and transformers has applied it: "
            "load the model with normattn.from_pretrained and remove() the extension first"
        )


def save_with_method(
    parts: ModelParts, layers: Sequence[Layer], spec: ScoreSpec
) -> Callable[[], object]:
    """Let `save_pretrained` write a method, for PEFT next to the adapter; returns what undoes it.

    Of an adapter that was put on an extended model PEFT would save the weights alone: that raises
    `InputError`.
    """
    model, adapted = parts.model, parts.adapted
    own, save = model.__dict__["config"], model.save_pretrained

    def save_pretrained(*given: Any, **more: Any) -> Any:
        before = model.__dict__["config"]
        model.__dict__["config"] = copy.deepcopy(own)
        record_method(model.config, parts, layers, spec)
        try:
            return save(*given, **more)
        finally:
            model.__dict__["config"] = before

    undo = ExitStack()
    model.__dict__["save_pretrained"] = save_pretrained
    undo.callback(model.__dict__.pop, "save_pretrained", None)
    if adapted is None:
        hook = model.register_state_dict_pre_hook(_refuse_adapter_alone(spec))
        undo.callback(hook.remove)
        return undo.close
    save_adapter = adapted.save_pretrained

    def save_adapter_with_method(save_directory: Any, *given: Any, **more: Any) -> Any:
        made = save_adapter(save_directory, *given, **more)
        record = {"method": spec.method_text, "train_length": spec.train_length}
        write_json(Path(save_directory) / ADAPTER_FILE, record)
        return made

    adapted.__dict__["save_pretrained"] = save_adapter_with_method
    undo.callback(adapted.__dict__.pop, "save_pretrained", None)
    return undo.close


def _refuse_adapter_alone(spec: ScoreSpec) -> Callable[..., None]:
    def hook(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        tuners = sys.modules.get("peft.tuners.tuners_utils")
        if tuners is not None and any(
            isinstance(part, tuners.BaseTunerLayer) for part in module.modules()
        ):
            raise InputError(
                f"the adapter of this model would be saved without the method {spec.method_text} "
                "that it was trained under: extend the PEFT model itself, "
                "normattn.extend(get_peft_model(...), ...), whose save_pretrained writes the "
                "method, or remove() the extension first"
            )

    return hook
