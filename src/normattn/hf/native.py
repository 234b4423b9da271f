"""What a saved configuration tells of a method, also in transformers' own words.

Every engine that reads `rope_parameters` (transformers itself, vLLM, SGLang, the converter of
llama.cpp) then applies it without normattn. The words are kept only where the model's own rotary
module, made of them, gives the angles that the method means.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normattn.errors import InputError
from normattn.hf.model_parts import ModelParts
from normattn.hf.rope_detection import Layer
from normattn.hf.rotation_tables import HeadRotation, method_frequencies
from normattn.score import ScoreSpec
from normattn.score.parts.rope_scaling import ABF, NTK, PI, YaRN

_FIELDS = ("rope_parameters", "max_position_embeddings")
FIELD, TRAINED = "normattn", "trained"
"""Where a saved configuration tells of its method, and there of the fields as they were."""


def native(parts: ModelParts, layers: Sequence[Layer], spec: ScoreSpec) -> dict[str, Any] | None:
    """The fields of the decoder's configuration that mean the method; None where none can."""
    try:
        return native_fields(parts, layers, spec)
    except InputError:
        return None


def native_fields(
    parts: ModelParts, layers: Sequence[Layer], spec: ScoreSpec, longest: int | None = None
) -> dict[str, Any]:
    """The fields of the decoder's configuration that mean the method, for texts of `longest`.

    Raises `InputError` as `said` and `words` do, and for families whose own rotary module makes
    something else of the fields.
    """
    turned = [layer for layer in layers if layer.rotation is not None]
    more = words(spec, turned[0].rotation if turned else None)
    assert spec.train_length is not None
    stretch = getattr(spec.rope_scaling, "stretch", 1.0)
    longer = int(spec.train_length * stretch) if longest is None else longest
    rope = said(parts, layers, spec, more)
    fields = {"rope_parameters": rope, "max_position_embeddings": longer}
    alike = {(id(layer.tables), _kind(parts, layer)): layer for layer in turned}
    if not all(_same(parts, layer, spec, fields) for layer in alike.values()):
        raise InputError(
            f"the rotary module of {parts.name} makes something else of rope_parameters than "
            f"{spec.method} means"
        )
    return fields


def said(
    parts: ModelParts, layers: Sequence[Layer], spec: ScoreSpec, more: Mapping[str, Any]
) -> dict[str, Any]:
    """The model's rope parameters with `more` in those of its layers that see everything.

    Raises `InputError` where there are none, where they say a scaling already, and where layers
    within a window share them.
    """
    turned = [layer for layer in layers if layer.rotation is not None]
    given = getattr(parts.config, "rope_parameters", None)
    if not turned or not isinstance(given, Mapping):
        raise InputError(f"{parts.name} keeps no rope_parameters that could say {spec.method}")
    scaled = {layer.rotation.scaled for layer in turned if layer.rotation is not None} - {None}
    if scaled:
        raise InputError(
            f"{parts.name} has {scaled.pop()} frequencies already, and rope_parameters hold one "
            f"kind of scaling: they cannot say {spec.method} on top"
        )
    own = [parts.rope(layer.module) for layer in turned]
    within = [layer for layer in layers if layer.sliding is not None]
    alone = given in own
    if within and (alone or any(parts.rope(layer.module) in own for layer in within)):
        raise InputError(
            f"the layers of {parts.name} within a window share their rope_parameters with those "
            f"that see everything: {spec.method} for the latter alone cannot be said there"
        )
    if alone:
        return {**given, **more}
    return {name: {**rope, **more} if rope in own else rope for name, rope in given.items()}


def words(spec: ScoreSpec, turning: HeadRotation | None) -> dict[str, Any]:
    """The rope parameters that say a method; `InputError` where transformers has none."""
    spectrum = spec.rope_scaling
    still = spec.remapping is None and not spec.blockwise
    if still and spec.logn is None and turning is not None:
        if isinstance(spectrum, PI):
            return {"rope_type": "linear", "factor": spectrum.stretch}
        if isinstance(spectrum, YaRN):
            return _yarn(spectrum, spec.train_length)
        if isinstance(spectrum, ABF):
            return {"rope_theta": spectrum.base}
        if isinstance(spectrum, NTK) and turning.base is not None:
            size = 2 * turning.frequencies.numel()
            return {"rope_theta": turning.base * spectrum.stretch ** (size / (size - 2))}
    raise InputError(
        f"transformers' rope_parameters have no words for {spec.method}: they say PI (linear), "
        "YaRN (yarn), NTK and ABF (rope_theta)"
    )


def _yarn(spectrum: YaRN, train_length: int | None) -> dict[str, Any]:
    """`factor` and the length, and what differs from YaRN's usual values."""
    usual = {field.name: field.default for field in dataclasses.fields(YaRN)}
    own = {
        name: getattr(spectrum, name)
        for name in ("beta_fast", "beta_slow", "truncate")
        if getattr(spectrum, name) != usual[name]
    }
    if spectrum.sharpness != usual["sharpness"]:
        own["attention_factor"] = spectrum.sharpness * math.log(spectrum.stretch) + 1
    length = {"original_max_position_embeddings": train_length}
    return {"rope_type": "yarn", "factor": spectrum.stretch, **length, **own}


def trained(config: Any) -> dict[str, Any]:
    """The fields as they are before `native` ones take their place."""
    return {name: copy.deepcopy(getattr(config, name, None)) for name in _FIELDS}


def put_fields(config: Any, fields: Mapping[str, Any]) -> None:
    """Write these fields into a configuration."""
    for name, value in fields.items():
        setattr(config, name, copy.deepcopy(value))


def _same(parts: ModelParts, layer: Layer, spec: ScoreSpec, fields: Mapping[str, Any]) -> bool:
    """Whether some rotary module of the model, made by these fields, makes what is meant."""
    tables, turning, given = layer.tables, layer.rotation, layer.probed.tables
    if tables is None or turning is None or spec.rope_scaling is None:
        return False
    config = copy.deepcopy(parts.config)
    put_fields(config, fields)
    ids = torch.arange(layer.probed.call.query.shape[2])[None]
    gain = spec.rope_scaling.gain(spec.train_length) ** 0.5
    theta = method_frequencies(spec, turning).abs()
    like = given.cpu() if isinstance(given, Tensor) else tuple(table.cpu() for table in given)
    meant = tables.make(ids, theta, tables.amplitude * gain, like)
    kind = _kind(parts, layer)
    return any(
        _equal(made, meant)
        for module in parts.decoder.modules()
        if any(name.endswith("inv_freq") for name in module._buffers)
        for made in _made(type(module), config, like, ids, kind)
    )


def _kind(parts: ModelParts, layer: Layer) -> str | None:
    """The type of a layer, where the configuration tells layers apart."""
    types = getattr(parts.config, "layer_types", None)
    index = getattr(layer.module, "layer_idx", None)
    return types[index] if types and isinstance(index, int) else None


def _made(rotary: Any, config: Any, like: Any, ids: Tensor, kind: str | None) -> list[Any]:
    """What a rotary module of this class makes; nothing where it cannot be made or called so."""
    first = like if isinstance(like, Tensor) else like[0]
    rows = torch.zeros(1, ids.shape[1], 1, dtype=first.real.dtype)
    made = []
    for more in ((), (kind,)):
        try:
            made.append(rotary(config)(rows, ids, *more))
        except Exception:  # another signature, or a kind that this family does not know
            continue
    return made


def _equal(made: Any, meant: Any) -> bool:
    ones = (made,) if isinstance(made, Tensor) else made
    others = (meant,) if isinstance(meant, Tensor) else meant
    return len(ones) == len(others) and all(
        one.shape == other.shape and bool((one - other).abs().max() < 1e-4)
        for one, other in zip(ones, others, strict=True)
    )


def record_of(config: Any, path: str | Path) -> dict[str, Any] | None:
    """The method that a configuration says its model was saved under; None where it says none.

    Keys: method, train_length, and `trained`, the fields as they were, where the configuration
    holds others. Raises `InputError` for a record that lacks something or has other types.
    """
    record = getattr(config, FIELD, None)
    if record is None:
        return None
    types = {"method": str, "train_length": int, TRAINED: dict}
    if (
        not isinstance(record, dict)
        or set(record) | {TRAINED} != set(types)
        or any(type(value) is not types[name] for name, value in record.items())
    ):
        raise InputError(
            f"the configuration of {path}: the field {FIELD!r} must hold a method, a name, and a "
            f"train_length, a whole number; {TRAINED!r} beside them holds fields"
        )
    return record


def take_record(config: Any, path: str | Path) -> dict[str, Any] | None:
    """Make a configuration that of the model as it was trained; what told of the method, or None.

    Raises as `record_of` does.
    """
    record = record_of(config, path)
    if record is not None:
        put_fields(config.get_text_config(), record.get(TRAINED, {}))
        delattr(config, FIELD)
    return record


def refuse_applied(config: Any) -> None:
    """Raise `InputError` where transformers has applied the method that a model was saved under.

    Its configuration then says longer texts and other frequencies than those of the training.
    """
    record = record_of(config, getattr(config, "name_or_path", "") or "this model")
    if record is not None and TRAINED in record:
        raise InputError(
            f"this model was saved under {record['method']}, and transformers has applied that: "
            "load it by normattn.from_pretrained, and remove() the extension first"
        )
