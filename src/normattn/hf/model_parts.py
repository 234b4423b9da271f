"""What a transformers model is made of: its text decoder, and what its configuration says."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from normattn.errors import InputError, NormattnError

ROPE_NAMES = {"rope_type", "type"}
ROPE_NUMBERS = {
    *("rope_theta", "factor", "original_max_position_embeddings", "attention_factor"),
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "partial_rotary_factor"),
    *("low_freq_factor", "high_freq_factor", "alpha"),
}
_NUMBERS = ROPE_NUMBERS | {
    *("rotary_emb_base", "rope_local_base_freq", "rotary_pct", "max_position_embeddings"),
    *("head_dim", "sliding_window", "query_pre_attn_scalar", "attn_logit_softcapping"),
    *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "qk_rope_head_dim"),
}
_LISTS = {"short_factor", "long_factor", "mrope_section"}
_ROPES = ("rope_parameters", "rope_scaling")
_DYNAMIC = {
    "dynamic": "set its rope_type to 'default' and take DynamicNTK",
    "longrope": "its frequencies change with the length of the text, and a cache then holds keys "
    "of both kinds",
}


@contextmanager
def explained(subject: str, why: str = "cannot be loaded by transformers") -> Iterator[None]:
    """Whatever transformers raises, the user gets a sentence: what cannot be, and its own words."""
    try:
        yield
    except NormattnError:
        raise
    except Exception as error:
        whole = " ".join(str(error).split())
        sentence = re.split(r"(?<=[^.][.])\s+(?=[A-Z])", whole)[0][:300]
        if isinstance(error, KeyError) and " " not in sentence:
            sentence = f"it names {sentence}, which is not known there"
        kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        raise InputError(f"{subject} {why}: {kind}{sentence}") from error


@dataclass(frozen=True)
class ModelParts:
    """The parts that an extension touches.

    Attributes:
        model: the model of transformers.
        config: the configuration of its text decoder.
        decoder: the module that reads tokens: the model itself, or what its head stands on.
        adapted: the PEFT model around it, where that was given.
    """

    model: Any
    config: Any
    decoder: nn.Module
    adapted: Any = None

    @property
    def name(self) -> str:
        """The model's class."""
        return type(self.model).__name__

    @property
    def ropes(self) -> tuple[Mapping[str, Any], ...]:
        """Every set of rope parameters in the configuration."""
        return tuple(innermost(getattr(self.config, "rope_parameters", None)))

    def rope(self, layer: nn.Module) -> Mapping[str, Any]:
        """The rope parameters of a layer; none where the configuration does not say."""
        return rope_of(self.config, getattr(layer, "layer_idx", None))


def rope_of(config: Any, index: int | None) -> Mapping[str, Any]:
    """The rope parameters that a configuration has for a layer; empty where it has none."""
    given: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    own = given.get(str(layer_type(config, index)))
    if isinstance(own, Mapping):
        return own
    return {} if any(isinstance(value, Mapping) for value in given.values()) else given


def layer_type(config: Any, index: int | None) -> str | None:
    """The type of a layer, where the configuration tells layers apart."""
    types: Any = getattr(config, "layer_types", None)
    known = types and isinstance(index, int) and index < len(types)
    return str(types[index]) if known else None


def innermost(given: Any) -> Iterator[Mapping[str, Any]]:
    """The innermost mappings: rope parameters may stand under the types of layers."""
    if isinstance(given, Mapping):
        inner = [value for value in given.values() if isinstance(value, Mapping)]
        for mapping in inner:
            yield from innermost(mapping)
        if not inner and given:
            yield given


def kind_of(rope: Mapping[str, Any]) -> str:
    """The type of rope parameters."""
    return str(rope.get("rope_type", rope.get("type", "default")))


def model_parts(model: Any) -> ModelParts:
    """The parts of a model, also of one that is compiled or wrapped by PEFT.

    Raises `InputError` with the reason where it cannot be extended.
    """
    try:
        from transformers import PreTrainedModel
    except ImportError:
        raise InputError("reading a model needs transformers: pip install normattn[hf]") from None
    model = getattr(model, "_orig_mod", model)  # what torch.compile has wrapped
    adapted = None
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        adapted, model = model, model.get_base_model()
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise InputError(f"this takes a model of transformers, but it is a {name}")
    if getattr(model.config, "is_encoder_decoder", False):
        raise InputError(f"{name} is an encoder-decoder: only causal language models are extended")
    whole: Any = model
    decoder = whole.get_decoder()
    if not isinstance(decoder, PreTrainedModel):  # a head of that name
        decoder = model.base_model
    config = model.config.get_text_config()
    refuse_odd_values(config.to_dict(), f"the configuration of {name}")
    return ModelParts(model, config, decoder, adapted)


def length_dependent(parts: ModelParts) -> list[str]:
    """The kinds of the model's own frequencies that change with the length of the text."""
    return [kind for kind in _DYNAMIC if any(rope.get("rope_type") == kind for rope in parts.ropes)]


def refuse_length_dependent(parts: ModelParts, layer: nn.Module) -> None:
    """Raise `InputError` for a layer whose own frequencies change with the length of the text."""
    kind = parts.rope(layer).get("rope_type")
    if kind in _DYNAMIC:
        raise InputError(f"{parts.name} has a {kind} rotary spectrum of its own: {_DYNAMIC[kind]}")


def known_length(parts: ModelParts) -> tuple[int, str]:
    """The training length that the configuration names, and where it says so.

    Raises `InputError` that asks for `train_length` where it names none, or two.
    """
    longest = getattr(parts.config, "max_position_embeddings", None)
    originals = {rope.get("original_max_position_embeddings") for rope in parts.ropes}
    originals -= {None, longest}
    if originals:
        raise InputError(
            f"the configuration names two lengths, max_position_embeddings={longest} and "
            f"original_max_position_embeddings={originals.pop()}: say train_length=…, the length "
            "that these weights were trained to read"
        )
    if not isinstance(longest, int):
        raise InputError(
            "the configuration does not say how long the texts of the training were: say "
            "train_length=…"
        )
    return longest, "max_position_embeddings"


def refuse_odd_values(fields: Mapping[str, Any], where: str, inside: bool = False) -> None:
    """Raise `InputError` for a value of positions of another type than transformers computes with.

    Numbers must be finite, names text, and lists hold finite numbers; None is always allowed.
    transformers checks few of these, and would fail later in whatever computes with them first.
    `inside`: these are rope parameters, which may stand under the types of layers.
    """
    for name, value in fields.items():
        good, wanted = True, ""
        if name in _NUMBERS:
            good, wanted = _is_number(value), "a finite number"
        elif name in _LISTS:
            good = isinstance(value, list | tuple) and all(map(_is_number, value))
            wanted = "a list of finite numbers"
        elif inside and name in ROPE_NAMES:
            good, wanted = isinstance(value, str), "a name such as 'yarn'"
        elif name == "layer_types":
            good = isinstance(value, list | tuple) and all(type(x) is str for x in value)
            wanted = "a list of names"
        elif name in _ROPES or (inside and isinstance(value, Mapping)):
            good, wanted = isinstance(value, Mapping), "an object"
            if good:
                refuse_odd_values(value, f"{where}: {name}", inside=True)
        if not good and value is not None:
            raise InputError(f"{where}: {name} must be {wanted}, not {value!r}")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
