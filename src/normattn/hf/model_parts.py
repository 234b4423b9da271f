"""What a transformers model is made of: its text decoder, and what its configuration says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from normattn.errors import InputError
from normattn.hf.config_values import refuse_odd_values

_MOVING = {
    "dynamic": "set its rope_type to 'default' and take DynamicNTK",
    "longrope": "its frequencies change with the length of what is read, and a cache then holds "
    "keys of both kinds",
}


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
        return tuple(_nested(getattr(self.config, "rope_parameters", None)))

    def rope(self, layer: nn.Module) -> Mapping[str, Any]:
        """The rope parameters of a layer; none where the configuration does not say."""
        given = getattr(self.config, "rope_parameters", None) or {}
        types = getattr(self.config, "layer_types", None)
        index = getattr(layer, "layer_idx", None)
        if types and isinstance(index, int) and index < len(types):
            own = given.get(types[index])
            if isinstance(own, Mapping):
                return own
        return {} if any(isinstance(value, Mapping) for value in given.values()) else given


def _nested(given: Any) -> Iterator[Mapping[str, Any]]:
    """The innermost mappings: rope parameters may stand under the types of layers."""
    if isinstance(given, Mapping):
        inner = [value for value in given.values() if isinstance(value, Mapping)]
        for mapping in inner:
            yield from _nested(mapping)
        if not inner and given:
            yield given


def model_parts(model: Any) -> ModelParts:
    """The parts of a model, also of one that is compiled or wrapped by PEFT.

    Raises `InputError` with the reason where it cannot be extended.
    """
    try:
        from transformers import PreTrainedModel
    except ImportError:
        raise InputError("extending a model needs transformers: pip install normattn[hf]") from None
    model = getattr(model, "_orig_mod", model)  # what torch.compile has wrapped
    adapted = None
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        adapted, model = model, model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise InputError(
            f"extend() takes a model of transformers, but this is a {type(model).__name__}"
        )
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise InputError(f"{name} is an encoder-decoder: only causal language models are extended")
    whole: Any = model
    decoder = whole.get_decoder()
    if not isinstance(decoder, PreTrainedModel):  # a head of that name
        decoder = model.base_model
    config = model.config.get_text_config()
    refuse_odd_values(config.to_dict(), f"the configuration of {name}")
    return ModelParts(model, config, decoder, adapted)


def moving(parts: ModelParts) -> list[str]:
    """The kinds of the model's own frequencies that change with the length of what is read."""
    return [kind for kind in _MOVING if any(rope.get("rope_type") == kind for rope in parts.ropes)]


def refuse_moving(parts: ModelParts, layers: list[nn.Module]) -> None:
    """Raise `InputError` for layers whose own frequencies change with what is read."""
    for kind in [parts.rope(layer).get("rope_type") for layer in layers]:
        if kind in _MOVING:
            raise InputError(
                f"{parts.name} has a {kind} rotary spectrum of its own: {_MOVING[kind]}"
            )


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
