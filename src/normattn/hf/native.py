"""A method in transformers' own words, so that a saved model needs nobody else to apply it.

PI is `linear`, YaRN is `yarn`. What a configuration with those words makes is computed by the
model's own rotary module and compared with what the method means, before anything is written.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from normattn.hf.anatomy import Anatomy
from normattn.hf.folding import stretched
from normattn.hf.understanding import Layer
from normattn.score import ScoreSpec
from normattn.score.parts.pi import PI
from normattn.score.parts.yarn import YaRN

_FIELDS = ("rope_parameters", "max_position_embeddings")


def native(found: Anatomy, layers: Sequence[Layer], spec: ScoreSpec) -> dict[str, Any] | None:
    """The fields of the decoder's configuration that mean the method; None where none can.

    They cannot for methods that transformers has not, for frequencies that are scaled already, for
    layers within a window that share the rope parameters, and for families whose own rotary module
    makes something else of them.
    """
    spectrum = spec.spectrum
    if spec.regime is not None or spec.logn is not None or not isinstance(spectrum, PI | YaRN):
        return None
    turned = [each for each in layers if each.turning is not None]
    given = getattr(found.config, "rope_parameters", None)
    plain = all(each.turning is not None and each.turning.scaled is None for each in turned)
    if not plain or not isinstance(given, Mapping) or spec.train_length is None:
        return None
    more: dict[str, Any] = {"rope_type": "linear", "factor": spectrum.stretch}
    if isinstance(spectrum, YaRN):
        more |= {"rope_type": "yarn", "original_max_position_embeddings": spec.train_length}
    own = [found.rope(each.module) for each in turned]
    if given in own:
        if any(each.sliding is not None for each in layers):
            return None
        meant: dict[str, Any] = {**given, **more}
    else:
        meant = {name: {**each, **more} if each in own else each for name, each in given.items()}
        if any(found.rope(each.module) in own for each in layers if each.sliding is not None):
            return None
    longer = int(spec.train_length * spectrum.stretch)
    fields = {"rope_parameters": meant, "max_position_embeddings": longer}
    return fields if all(_same(found, each, spec, fields) for each in turned) else None


def trained(config: Any) -> dict[str, Any]:
    """The fields as they are before `native` ones take their place."""
    return {name: copy.deepcopy(getattr(config, name, None)) for name in _FIELDS}


def put_fields(config: Any, fields: Mapping[str, Any]) -> None:
    """Write these fields into a configuration."""
    for name, value in fields.items():
        setattr(config, name, copy.deepcopy(value))


def _same(found: Anatomy, layer: Layer, spec: ScoreSpec, fields: Mapping[str, Any]) -> bool:
    """Whether some rotary module of the model, made by these fields, makes what is meant."""
    tables, turning, given = layer.tables, layer.turning, layer.heard.tables
    if tables is None or turning is None or spec.spectrum is None:
        return False
    config = copy.deepcopy(found.config)
    put_fields(config, fields)
    ids = torch.arange(layer.heard.as_is.query.shape[2])[None]
    gain = spec.spectrum.gain(spec.train_length) ** 0.5
    theta = stretched(spec, turning).abs()
    like = given.cpu() if isinstance(given, Tensor) else tuple(each.cpu() for each in given)
    meant = tables.make(ids, theta, tables.amplitude * gain, like)
    types = getattr(found.config, "layer_types", None)
    index = getattr(layer.module, "layer_idx", None)
    kind = types[index] if types and isinstance(index, int) else None
    return any(
        _equal(made, meant)
        for module in found.decoder.modules()
        if any(name.endswith("inv_freq") for name in module._buffers)
        for made in _made(type(module), config, like, ids, kind)
    )


def _made(rotary: Any, config: Any, like: Any, ids: Tensor, kind: str | None) -> list[Any]:
    """What a rotary module of this class makes; nothing where it cannot be made or called so."""
    first = like if isinstance(like, Tensor) else like[0]
    rows = torch.zeros(1, ids.shape[1], 1, dtype=first.real.dtype)
    found = []
    for more in ((), (kind,)):
        try:
            found.append(rotary(config)(rows, ids, *more))
        except Exception:  # another signature, or a kind that this family does not know
            continue
    return found


def _equal(made: Any, meant: Any) -> bool:
    ones = (made,) if isinstance(made, Tensor) else made
    others = (meant,) if isinstance(meant, Tensor) else meant
    return len(ones) == len(others) and all(
        one.shape == other.shape and bool((one - other).abs().max() < 1e-4)
        for one, other in zip(ones, others, strict=True)
    )
