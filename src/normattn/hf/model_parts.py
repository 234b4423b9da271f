"""What a transformers model is made of: its text decoder, and what its configuration says."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from normattn.errors import InputError, NormattnError

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
        decoder: the module that takes tokens: the model itself, or the module below its head.
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
        return tuple(leaf_mappings(getattr(self.config, "rope_parameters", None)))

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
    """The type of a layer, if the configuration distinguishes layers."""
    types: Any = getattr(config, "layer_types", None)
    known = types and isinstance(index, int) and index < len(types)
    return str(types[index]) if known else None


def leaf_mappings(given: Any) -> Iterator[Mapping[str, Any]]:
    """The mappings that hold no mapping: rope parameters may be nested by layer type."""
    if isinstance(given, Mapping):
        inner = [value for value in given.values() if isinstance(value, Mapping)]
        for mapping in inner:
            yield from leaf_mappings(mapping)
        if not inner and given:
            yield given


def rope_type_of(rope: Mapping[str, Any]) -> str:
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
    return ModelParts(model, config, decoder, adapted)


def refuse_length_dependent(parts: ModelParts, layer: nn.Module) -> None:
    """Raise `InputError` for a layer whose own frequencies change with the length of the text."""
    kind = parts.rope(layer).get("rope_type")
    if kind in _DYNAMIC:
        raise InputError(f"{parts.name} has a {kind} rotary spectrum already: {_DYNAMIC[kind]}")


def known_length(parts: ModelParts) -> tuple[int, str]:
    """The training length that the configuration names, and where it says so.

    Raises `InputError` that asks for `train_length` where it names none, or two.
    """
    longest = getattr(parts.config, "max_position_embeddings", None)
    originals = {rope.get("original_max_position_embeddings") for rope in parts.ropes}
    originals -= {None, longest}
    if originals:
        raise InputError(
            f"the configuration gives two lengths, max_position_embeddings={longest} and "
            f"original_max_position_embeddings={originals.pop()}: pass train_length=…, the "
            "length on which these weights were trained"
        )
    if not isinstance(longest, int):
        raise InputError("the configuration does not give the training length: pass train_length=…")
    return longest, "max_position_embeddings"
