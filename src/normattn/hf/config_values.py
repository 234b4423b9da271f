"""Refuse values that no configuration of positions can have, before anything computes with them.

transformers checks few of these values. An infinite factor, a list for a number or a text for a
list would end in an exception of whatever computes with it first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from normattn.errors import InputError

ROPE_NUMBERS = {
    *("rope_theta", "factor", "original_max_position_embeddings", "attention_factor"),
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "partial_rotary_factor"),
    *("low_freq_factor", "high_freq_factor", "alpha"),
}
ROPE_NAMES = {"rope_type", "type"}
ROPE_LISTS = {"short_factor", "long_factor", "mrope_section"}
_NUMBERS = {
    *("rope_theta", "rotary_emb_base", "rope_local_base_freq", "partial_rotary_factor"),
    *("rotary_pct", "max_position_embeddings", "original_max_position_embeddings", "head_dim"),
    *("sliding_window", "query_pre_attn_scalar", "attn_logit_softcapping", "rms_norm_eps"),
    *("layer_norm_eps", "layer_norm_epsilon", "norm_eps", "qk_rope_head_dim", "attention_factor"),
}
_ROPES = ("rope_parameters", "rope_scaling")


def refuse_odd_values(fields: Mapping[str, Any], where: str) -> None:
    """Raise `InputError` for a value of positions in `fields`, a configuration's, of another type.

    Numbers must be finite, names text, and lists hold finite numbers; None is always allowed. The
    rope parameters may stand under the names of layer types.
    """
    for name in sorted(_NUMBERS & fields.keys()):
        _refuse_number(fields[name], name, where)
    types = fields.get("layer_types")
    if types is not None and not _is_list(types, str):
        raise InputError(f"{where}: layer_types must be a list of names, not {types!r}")
    for name in _ROPES:
        rope = fields.get(name)
        if rope is not None and not isinstance(rope, Mapping):
            raise InputError(f"{where}: {name} must be an object, not {rope!r}")
        for path, parameters in _mappings(rope or {}, name):
            refuse_odd_rope(parameters, f"{where}: {path}")


def refuse_odd_rope(rope: Mapping[str, Any], where: str) -> None:
    """Raise `InputError` for a rope parameter of another type than transformers computes with."""
    for name, value in rope.items():
        if value is None:
            continue
        if name in ROPE_NAMES and not isinstance(value, str):
            raise InputError(f"{where}: {name} must be a name such as 'yarn', not {value!r}")
        if name in ROPE_NUMBERS:
            _refuse_number(value, name, where)
        if name in ROPE_LISTS and not _is_list(value, int, float):
            raise InputError(f"{where}: {name} must be a list of finite numbers, not {value!r}")


def _mappings(given: Mapping[str, Any], path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield path, given
    for name, value in given.items():
        if isinstance(value, Mapping):
            yield from _mappings(value, f"{path}.{name}")


def _refuse_number(value: Any, name: str, where: str) -> None:
    if value is not None and not _is_number(value):
        raise InputError(f"{where}: {name} must be a finite number, not {value!r}")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_list(value: Any, *kinds: type) -> bool:
    """Whether the value is a list of these types, whose numbers are finite."""
    return isinstance(value, list | tuple) and all(
        type(item) in kinds and (type(item) is str or math.isfinite(item)) for item in value
    )
