"""What a transformers model is made of: its decoder, its rotary positions, its attention layers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from normattn.errors import InputError

_MOVING = {
    "dynamic": "set its rope_type to 'default' and take DynamicNTK",
    "longrope": "its frequencies change with the length of what is read, and a cache then holds "
    "keys of both kinds",
}


@dataclass(frozen=True)
class Anatomy:
    """The parts that an extension touches.

    Attributes:
        model: the model as given.
        config: the configuration of its text decoder.
        decoder: the module that owns the rotary positions and makes the masks.
        rotary: the module that makes cos and sin.
        layers: the attention modules in order.
    """

    model: Any
    config: Any
    decoder: nn.Module
    rotary: nn.Module
    layers: tuple[nn.Module, ...]

    def layer_type(self, layer: nn.Module) -> str | None:
        """The name of the layer's rope parameters where layers have different ones."""
        types = getattr(self.config, "layer_types", None)
        return None if types is None else types[layer.layer_idx]

    @property
    def per_type(self) -> bool:
        """Whether each type of layer has rope parameters of its own."""
        given = self.config.rope_parameters
        return bool(given) and all(
            isinstance(each, Mapping) or each is None for each in given.values()
        )

    def rope(self, layer: nn.Module) -> Mapping[str, Any]:
        """The rope parameters of a layer."""
        given: Mapping[str, Any] = self.config.rope_parameters
        if not self.per_type:
            return given
        own: Mapping[str, Any] = given[str(self.layer_type(layer))] or {}
        return own


def anatomy(model: Any) -> Anatomy:
    """The parts of a model. Raises `InputError` with the reason where it cannot be extended."""
    try:
        from transformers import PreTrainedModel
    except ImportError:
        raise InputError("extending a model needs transformers: pip install normattn[hf]") from None
    if not isinstance(model, PreTrainedModel):
        raise InputError(
            f"extend() takes a model of transformers, but this is a {type(model).__name__}"
        )
    name = type(model).__name__
    config = model.config.get_text_config()
    if getattr(model.config, "is_encoder_decoder", False):
        raise InputError(f"{name} is an encoder-decoder: only causal language models are extended")
    owners = [each for each in model.modules() if "rotary_emb" in each._modules]
    if not owners or not getattr(config, "rope_parameters", None):
        raise InputError(
            f"{name} is not a rotary model: it has no rotary_emb that its layers share, so there "
            "are no positions to extend"
        )
    if len(owners) > 1:
        raise InputError(
            f"{name} has {len(owners)} modules with rotary positions of their own; a model with one"
            " for all layers was expected"
        )
    decoder = owners[0]
    layers = tuple(each for each in decoder.modules() if _attends(each))
    if not layers:
        raise InputError(
            f"{name} cannot be extended: no attention layer of it takes position_embeddings, so its"
            " rotary positions are made elsewhere"
        )
    found = Anatomy(model, config, decoder, decoder.rotary_emb, layers)  # type: ignore[arg-type]
    for layer in layers:
        kind = found.rope(layer).get("rope_type")
        if kind in _MOVING:
            raise InputError(f"{name} has a {kind} rotary spectrum of its own: {_MOVING[kind]}")
    return found


def _attends(module: nn.Module) -> bool:
    if not (hasattr(module, "layer_idx") and hasattr(module, "is_causal")):
        return False
    return "position_embeddings" in inspect.signature(module.forward).parameters


def known_length(found: Anatomy) -> tuple[int, str]:
    """The training length that the configuration names, and where it says so.

    Raises `InputError` that asks for `train_length` where it names none, or two.
    """
    longest = getattr(found.config, "max_position_embeddings", None)
    originals = {found.rope(each).get("original_max_position_embeddings") for each in found.layers}
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
