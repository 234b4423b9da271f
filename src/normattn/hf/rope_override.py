"""Other rotary frequencies for the layers of a model, until they are given back.

Where layers have a rotary module for themselves, its `inv_freq` and `attention_scaling` change, and
everything of the model's own code stays. Where they share it with layers that are left alone, or
the tables are not made of what a module holds, each layer has a hook that gives it other tables.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.hf.attention_fn import MASK_BEFORE, OWN_TABLES, ForwardMemory
from normattn.hf.probe import rotary_buffers, with_argument
from normattn.hf.rope_detection import Layer
from normattn.hf.rope_tables import find_tables, unrotated
from normattn.hf.rotation_tables import method_frequencies
from normattn.score import ScoreSpec

Undo = Callable[[], object]


@dataclass(frozen=True)
class Frequencies:
    """What a rotary module makes its tables of: θ (P,) in float64, and the factor of cos and sin.

    A θ of 0 everywhere and a factor of 1 rotate nothing.
    """

    theta: Tensor
    scaling: float


def frequencies_of(layer: Layer, spec: ScoreSpec) -> Frequencies | None:
    """The frequencies that a method gives a layer, None where it keeps its own.

    Nothing turns where the method rotates inside of attention.
    """
    assert layer.rotation is not None
    assert layer.tables is not None
    if spec.remapping is not None or spec.blockwise:
        return Frequencies(torch.zeros_like(layer.rotation.frequencies), 1.0)
    if spec.rope_scaling is None:
        return None
    gain = spec.rope_scaling.gain(spec.train_length) ** 0.5
    return Frequencies(
        method_frequencies(spec, layer.rotation).abs(), gain * layer.tables.amplitude
    )


def override_buffers(
    layers: Sequence[Layer], spec: ScoreSpec, but: Collection[Layer]
) -> tuple[list[Undo], list[Layer]]:
    """Change the buffers of the rotary modules; what undoes it, and the layers that need a hook.

    `but` are layers whose position embeddings must stay the model's own.
    """
    wanted: dict[tuple[nn.Module, str], list[tuple[Layer, Frequencies | None]]] = {}
    hooked: list[Layer] = []
    for layer in layers:
        place = _buffer_of(layer)
        served = layer.rotation is not None and layer.sliding is None and layer not in but
        other = frequencies_of(layer, spec) if served else None
        if served and place is None and other is not None:
            hooked.append(layer)
        elif place is not None:
            wanted.setdefault(place, []).append((layer, other))
    undo: list[Undo] = []
    for (module, name), users in wanted.items():
        found = [other for _, other in users]
        first = found[0]
        if all(other is None for other in found):
            continue
        if first is None or not all(_same(first, other) for other in found):
            hooked += [layer for layer, other in users if other is not None]
            continue
        undo.append(_override(module, name, first))
    return undo, hooked


def _buffer_of(layer: Layer) -> tuple[nn.Module, str] | None:
    """The module and its frequencies of which a layer's tables are made, where that is known."""
    if layer.probed.rotary is None:
        return None
    module, kind = layer.probed.rotary
    names = rotary_buffers(module)
    own = f"{kind}_inv_freq"
    name = own if own in names else names[0] if len(names) == 1 else None
    if name is None or not hasattr(module, _scaling_of(name)):
        return None
    if layer.tables is not None:
        held = module._buffers[name]
        assert held is not None
        theta = held.detach().double().cpu().flatten()
        if theta.shape != layer.tables.frequencies.shape:
            return None
    return module, name


def _scaling_of(name: str) -> str:
    return name.removesuffix("inv_freq") + "attention_scaling"


def _same(one: Frequencies, other: Frequencies | None) -> bool:
    return (
        other is not None and one.scaling == other.scaling and torch.equal(one.theta, other.theta)
    )


def _override(module: nn.Module, name: str, other: Frequencies) -> Undo:
    """Put other frequencies into a rotary module, in float32 whatever the model is cast to."""
    own, scaling = module._buffers[name], getattr(module, _scaling_of(name))
    assert own is not None
    wide = other.theta.view(own.shape).float()
    apply: Callable[..., Any] = module._apply

    def put(like: Tensor) -> None:
        module._buffers[name] = wide.to(like.device)

    def apply_and_keep(*given: Any, **more: Any) -> Any:
        """`module.to(…)` moves the frequencies, but does not round them."""
        made = apply(*given, **more)
        moved = module._buffers[name]
        if moved is not None and not moved.is_meta:
            put(moved)
        return made

    def undo() -> None:
        moved = module._buffers[name]
        module.__dict__.pop("_apply", None)
        module._buffers[name] = own if moved is None else own.to(moved.device)
        setattr(module, _scaling_of(name), scaling)

    put(own)
    setattr(module, _scaling_of(name), other.scaling)
    module.__dict__["_apply"] = apply_and_keep
    return undo


class LayerTables:
    """A hook before a layer: it gets position embeddings of its own instead of the model's."""

    def __init__(self, layer: Layer, other: Frequencies, memory: ForwardMemory) -> None:
        assert layer.probed.argument is not None
        assert layer.tables is not None
        self._argument, self._index = layer.probed.argument, layer.index
        self._tables, self._memory, self._other = layer.tables, memory, other
        self._still = not bool(other.theta.any())

    def __call__(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with other position embeddings."""
        argument = self._argument
        before = kwargs.get(argument) if isinstance(argument, str) else args[argument]
        if before is None:
            raise InputError(f"layer {self._index} was called without its position embeddings")
        if self._still:
            self._memory.keep(OWN_TABLES, (), before)
            return with_argument(args, kwargs, argument, unrotated(before))
        ids = kwargs.get("position_ids")
        if ids is None or ids.dim() != 2:
            raise InputError(
                f"layer {self._index} is not told the tokens' position_ids (batch, tokens), so its "
                "positions cannot be stretched"
            )
        return with_argument(args, kwargs, argument, self._made(before, ids))

    def _made(self, before: Any, ids: Tensor) -> Any:
        """The tables of these positions, made once for all layers of a forward."""
        dtype = before.dtype if isinstance(before, Tensor) else before[0].dtype
        name, given = f"tables {id(self._tables)} {dtype}", (ids,)
        tables = self._memory.get(name, given)
        if tables is None:
            tables = self._tables.make(ids, self._other.theta, self._other.scaling, before)
            self._memory.keep(name, given, tables)
        return tables


class KeepMask:
    """A hook before a layer that chooses among its keys: the mask before it does is kept."""

    def __init__(self, memory: ForwardMemory) -> None:
        self._memory = memory

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep a mask of every pair."""
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dtype == torch.bool:
            self._memory.keep(MASK_BEFORE, (), mask)


class OwnTables:
    """A hook before a part of a layer that gets no rotation: an indexer keeps the model's own."""

    def __init__(self, memory: ForwardMemory) -> None:
        self._memory = memory

    def __call__(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments with the position embeddings that the layer was given."""
        argument, own = find_tables(args, kwargs), self._memory.get(OWN_TABLES, ())
        no = argument is None or own is None
        return None if no else with_argument(args, kwargs, argument, own)  # type: ignore[arg-type]


def refuse_images(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook before a rotary module: raise `InputError` for positions of several dimensions.

    Our attention counts the tokens, and an image's tokens are not counted one by one.
    """
    for value in (*kwargs.values(), *args):
        if not isinstance(value, Tensor) or value.dtype != torch.int64 or value.dim() != 3:
            continue
        if not torch.compiler.is_compiling() and bool((value != value[:1]).any()):
            raise InputError(
                "an image's tokens have positions of several dimensions in this model: with this "
                "method an extended model reads text alone"
            )
