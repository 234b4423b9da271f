"""Detect how each layer of a probed model rotates and how far it sees, or say why not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.hf.model_parts import ModelParts
from normattn.hf.probe import KNOWN, AttentionCall, ProbedLayer
from normattn.hf.rope_tables import EmbeddingTables, read_tables, spectra_of
from normattn.hf.rotation_fit import fit_rotation
from normattn.hf.rotation_tables import HeadRotation
from normattn.score.parts import rope_frequencies

_ABSOLUTE = {"wpe", "embed_positions", "position_embeddings", "position_embedding"}
_DIVISIBLE = ("linear", "llama3")


@dataclass(frozen=True)
class Layer:
    """What one attention layer does.

    Attributes:
        module: the layer.
        index: its number.
        sliding: the window outside of which it sees nothing, or None.
        rotation: how its heads are rotated; None for one without positions, or with a window.
        tables: how the model writes its position embeddings.
        probed: what was seen of it.
        keys_of: the layer whose keys it reads, where not its own.
    """

    module: nn.Module
    index: int
    sliding: int | None
    probed: ProbedLayer
    rotation: HeadRotation | None = None
    tables: EmbeddingTables | None = None
    keys_of: nn.Module | None = None

    @property
    def masked(self) -> bool:
        """Whether transformers makes its mask, so that ours can be put in its place."""
        return self.probed.call.window is not None

    @property
    def unserved(self) -> tuple[str, ...]:
        """What the layer asks of its attention that ours does not do."""
        more = self.probed.call.more
        given = {name: value for name, value in more.items() if value is not None}
        names = [name for name, value in given.items() if name not in KNOWN and value is not False]
        # As transformers has it: what a call does not say, the layer itself does.
        causal = given.get("is_causal", getattr(self.module, "is_causal", True))
        return (*names, *(["is_causal=False"] if causal is False else []))


def refuse_absolute_positions(parts: ModelParts) -> None:
    """Raise `InputError` for a model that adds a vector to each position instead of rotating."""
    names = {name.rpartition(".")[2] for name, _ in parts.decoder.named_modules()}
    if names & _ABSOLUTE and not _rotates(parts.model):
        raise InputError(
            f"{parts.name} is not a rotary model: each position has a vector of its own"
        )


def detect_layers(parts: ModelParts, probed: Mapping[nn.Module, ProbedLayer]) -> tuple[Layer, ...]:
    """What each layer does. Raises `InputError` for what is not understood."""
    if not probed:
        raise InputError(_unreached(parts))
    spectra = spectra_of(parts.model)
    layers: list[Layer] = []
    for position, (module, one) in enumerate(probed.items()):
        index = getattr(module, "layer_idx", None)
        index = index if isinstance(index, int) else position
        layer = _layer(parts, module, index, one, spectra, list(probed.values()))
        alike = (
            earlier.tables
            for earlier in layers
            if layer.tables and layer.tables.alike(earlier.tables)
        )
        layers.append(replace(layer, tables=next(alike, layer.tables)))
    return tuple(layers)


def _unreached(parts: ModelParts) -> str:
    if _rotates(parts.model):
        return (
            f"{parts.name} has attention code of its own: no layer takes its attention function "
            "from transformers' AttentionInterface, so its rotary positions cannot be reached"
        )
    return f"{parts.name} is not a rotary model, and its attention cannot be reached"


def _rotates(model: nn.Module) -> bool:
    """Whether a module holds rotary tables or frequencies, by the names that transformers gives."""
    names = [name for name, _ in (*model.named_modules(), *model.named_buffers())]
    told = any(name.endswith("inv_freq") or "rotary" in name for name in names)
    held = any(
        hasattr(module, "rotary_dim") or hasattr(module, "rotary") for module in model.modules()
    )
    return told or held or "RoFormer" in type(model).__name__


def _layer(
    parts: ModelParts,
    module: nn.Module,
    index: int,
    one: ProbedLayer,
    spectra: Sequence[tuple[Tensor, float]],
    all_probed: Sequence[ProbedLayer],
) -> Layer:
    who = f"layer {index} of this model ({type(module).__name__})"
    if one.call.key.shape[2] != one.call.query.shape[2]:
        raise InputError(
            f"{who} reads {one.call.key.shape[2]} keys of {one.call.query.shape[2]} tokens: its "
            "keys are compressed or not its own, so their positions are not known"
        )
    sliding = _sliding(one.call)
    if sliding is not None:
        return Layer(module, index, sliding, one)
    if one.unrotated is None:
        if _rotates(module):
            raise InputError(
                f"{who} makes its rotary positions itself, where they cannot be replaced"
            )
        return Layer(module, index, None, one)
    if _same(one.unrotated.query, one.call.query) and _same(one.unrotated.key, one.call.key):
        return Layer(module, index, None, one)
    tables = read_tables(one.tables, spectra)
    if tables is None:
        raise InputError(
            f"{who} is given position embeddings that are not made of rotary frequencies which the "
            "model holds, so they cannot be replaced"
        )
    keys = _keys(one, all_probed)
    rotation = None if keys is None else _rotation(parts, module, one, keys, tables)
    if keys is None or rotation is None:
        raise InputError(
            f"{who} does not rotate the first or the last features of its queries and keys as RoPE "
            "does, so its positions cannot be replaced"
        )
    other = None if keys is one else keys.call.module
    return Layer(module, index, None, one, rotation, tables, other)


def _sliding(heard: AttentionCall) -> int | None:
    given = heard.more.get("sliding_window")
    return int(given) if given is not None else heard.window or None


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def _keys(one: ProbedLayer, all_probed: Sequence[ProbedLayer]) -> ProbedLayer | None:
    """Whose keys a layer reads: its own, or those of the first layer that has the same ones."""
    assert one.unrotated is not None
    if not _same(one.unrotated.key, one.call.key):
        return one
    return next(
        (
            other
            for other in all_probed
            if other is not one
            and other.unrotated is not None
            and _same(other.call.key, one.call.key)
            and not _same(other.unrotated.key, other.call.key)
        ),
        None,
    )


def _rotation(
    parts: ModelParts,
    module: nn.Module,
    one: ProbedLayer,
    keys: ProbedLayer,
    tables: EmbeddingTables,
) -> HeadRotation | None:
    assert one.unrotated is not None
    assert one.doubled is not None
    assert keys.unrotated is not None
    base, scaled = _base(parts, module, tables.frequencies)
    normed = not _doubles(one.unrotated.query, one.doubled.query)
    like = HeadRotation(
        frequencies=tables.frequencies,
        base=base,
        interleaved=False,
        amplitude=1.0 if normed else tables.amplitude,
        head_dim=one.unrotated.query.shape[-1],
        scaled=scaled,
        normed=normed,
    )
    heard = (one.unrotated.query, one.call.query, keys.unrotated.key, keys.call.key)
    return fit_rotation(like, *heard)


def _doubles(plain: Tensor, doubled: Tensor) -> bool:
    """Whether some feature of every token and head doubles with its position embeddings."""
    close = 1e-3 if plain.dtype in (torch.float32, torch.float64) else 2e-2
    off = (doubled - 2 * plain).abs() <= close * plain.abs()
    return bool((off & (plain != 0)).flatten(0, 2).all(0).any())


def _base(parts: ModelParts, module: nn.Module, theta: Tensor) -> tuple[float | None, str | None]:
    """The base of frequencies, and the kind of scaling that they were trained with.

    Plain ones are powers of a base that the configuration names, or 0 from some pair on. Of scaled
    ones only the kinds of `_DIVISIBLE` keep their base: a method then scales what is there.
    """
    own = parts.rope(module)
    named = [own.get("rope_theta"), *(rope.get("rope_theta") for rope in parts.ropes)]
    listed: Any = getattr(parts.config, "layer_rope_theta", None)
    named += list(listed) if isinstance(listed, list | tuple) else []
    turning = int((theta != 0).sum())
    for base in dict.fromkeys(float(value) for value in named if value):
        plain = rope_frequencies(2 * theta.numel(), base)
        if torch.allclose(theta[:turning], plain[:turning], rtol=2e-2, atol=0):
            return base, None
    kind = own.get("rope_type")
    if kind in _DIVISIBLE and own.get("rope_theta"):
        return float(own["rope_theta"]), str(kind)
    return None, None if kind is None else str(kind)
