"""The text decoder of a transformers model, and the fields of its configuration."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from normattn.errors import InputError, NormattnError


@contextmanager
def explained(subject: str, why: str = "cannot be loaded by transformers") -> Iterator[None]:
    """Turn any error of transformers into an `InputError` with `subject`, `why` and its message."""
    try:
        yield
    except NormattnError:
        raise
    except Exception as error:
        message = " ".join(str(error).split())
        sentence = re.split(r"(?<=[^.][.])\s+(?=[A-Z])", message)[0][:300]
        prefix = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        raise InputError(f"{subject} {why}: {prefix}{sentence}") from error


@dataclass(frozen=True)
class ModelParts:
    """A transformers model, its decoder below the head, and that decoder's configuration."""

    model: Any
    config: Any
    decoder: nn.Module
    adapted: Any = None  # the PEFT model that wraps it, if any

    @property
    def name(self) -> str:
        """The model's class."""
        return type(self.model).__name__

    @property
    def ropes(self) -> tuple[Mapping[str, Any], ...]:
        """Every set of rope parameters in the configuration."""
        return tuple(leaf_mappings(getattr(self.config, "rope_parameters", None)))

    def rope(self, layer: nn.Module) -> Mapping[str, Any]:
        """The rope parameters of a layer; empty where the configuration has none."""
        return rope_of(self.config, getattr(layer, "layer_idx", None))


def rope_of(config: Any, index: int | None) -> Mapping[str, Any]:
    """The rope parameters of a layer in a configuration; empty where it has none."""
    ropes: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    rope = ropes.get(str(layer_type(config, index)))
    if isinstance(rope, Mapping):
        return rope
    return {} if any(isinstance(value, Mapping) for value in ropes.values()) else ropes


def layer_type(config: Any, index: int | None) -> str | None:
    """The type of a layer, if the configuration distinguishes layers."""
    types: Any = getattr(config, "layer_types", None)
    known = types and isinstance(index, int) and index < len(types)
    return str(types[index]) if known else None


def leaf_mappings(value: Any) -> Iterator[Mapping[str, Any]]:
    """The innermost mappings: rope parameters may be nested by layer type."""
    if isinstance(value, Mapping):
        inner = [item for item in value.values() if isinstance(item, Mapping)]
        for mapping in inner:
            yield from leaf_mappings(mapping)
        if not inner and value:
            yield value


def rope_type_of(rope: Mapping[str, Any]) -> str:
    """The rope_type of rope parameters, under its new or old name."""
    return str(rope.get("rope_type", rope.get("type", "default")))


def model_parts(model: Any) -> ModelParts:
    """The parts of a model, also if it is compiled or wrapped by PEFT.

    Raises `InputError` for anything but a decoder-only model of transformers.
    """
    try:
        from transformers import PreTrainedModel
    except ImportError:
        raise InputError("reading a model needs transformers: pip install normattn[hf]") from None
    model = getattr(model, "_orig_mod", model)  # unwrap torch.compile
    adapted = None
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        adapted, model = model, model.get_base_model()
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise InputError(f"this takes a model of transformers, but it is a {name}")
    if getattr(model.config, "is_encoder_decoder", False):
        raise InputError(f"{name} is an encoder-decoder: only causal language models are extended")
    decoder: Any = cast(Any, model).get_decoder()
    if not isinstance(decoder, PreTrainedModel):  # another module of that name
        decoder = model.base_model
    config = model.config.get_text_config()
    return ModelParts(model, config, decoder, adapted)


def known_length(parts: ModelParts) -> tuple[int, str]:
    """The training length of the configuration, and the field that has it.

    Raises `InputError` where it has no such field or two different ones.
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
