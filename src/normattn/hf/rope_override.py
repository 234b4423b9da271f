"""Other rotary frequencies for the layers of a model, until they are given back.

Where layers have a rotary module for themselves, its `inv_freq` and `attention_scaling` change, and
everything of the model's own code stays. Where they share it with layers that are left alone, or
the tables are not made of what a module holds, each layer has a hook that gives it other tables.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.hf.attention_fn import ForwardMemory
from normattn.hf.probe import find_tables, rotary_buffers, unrotated, with_argument
from normattn.hf.rope_detection import Layer, Spectrum
from normattn.score import ScoreSpec

Undo = Callable[[], object]


def spectrum_of(layer: Layer, spec: ScoreSpec) -> Spectrum | None:
    """The spectrum that a method gives a layer, None where it keeps its own.

    Where the method rotates inside of attention, one that rotates nothing.
    """
    if layer.rotation is None:
        return None
    if spec.remapping is not None or spec.blockwise:
        return torch.zeros_like(layer.rotation.frequencies), 1.0
    if spec.rope_scaling is None:
        return None
    return layer.spectrum(spec)


def override_buffers(
    layers: Sequence[Layer], spec: ScoreSpec, apart: Collection[Layer]
) -> tuple[list[Undo], list[Layer]]:
    """Change the buffers of the rotary modules; what undoes it, and the layers that need a hook.

    `apart` are layers whose position embeddings must stay the model's own.
    """
    users: dict[tuple[nn.Module, str], list[tuple[Layer, Spectrum | None]]] = {}
    hooked: list[Layer] = []
    for layer in layers:
        place = _buffer_of(layer)
        changed = layer.sliding is None and layer not in apart
        wanted = spectrum_of(layer, spec) if changed else None
        if place is not None:
            users.setdefault(place, []).append((layer, wanted))
        elif wanted is not None:
            hooked.append(layer)
    undo: list[Undo] = []
    for (module, name), sharing in users.items():
        first = sharing[0][1]
        if first is not None and all(_same(first, wanted) for _, wanted in sharing):
            undo.append(_override(module, name, first))
        else:
            hooked += [layer for layer, wanted in sharing if wanted is not None]
    return undo, hooked


def _same(one: Spectrum, other: Spectrum | None) -> bool:
    return other is not None and one[1] == other[1] and torch.equal(one[0], other[0])


def _buffer_of(layer: Layer) -> tuple[nn.Module, str] | None:
    """The module and its frequencies of which a layer's tables are made, where that is known."""
    if layer.rotary is None:
        return None
    module, kind = layer.rotary
    names = rotary_buffers(module)
    own = f"{kind}_inv_freq"
    name = own if own in names else names[0] if len(names) == 1 else None
    if name is None or not hasattr(module, _scaling_of(name)):
        return None
    held: Any = module._buffers[name]
    other = layer.made_of is not None and held.numel() != layer.made_of.frequencies.numel()
    return None if other else (module, name)


def _scaling_of(name: str) -> str:
    return name.removesuffix("inv_freq") + "attention_scaling"


def _override(module: nn.Module, name: str, spectrum: Spectrum) -> Undo:
    """Put a spectrum into a rotary module, in float32 whatever the model is cast to."""
    own: Any = module._buffers[name]
    scaling = getattr(module, _scaling_of(name))
    wide = spectrum[0].view(own.shape).float()
    apply: Callable[..., Any] = module._apply

    def apply_and_keep(*given: Any, **more: Any) -> Any:
        """`module.to(…)` moves the frequencies, but does not round them."""
        made = apply(*given, **more)
        moved = module._buffers[name]
        if moved is not None and not moved.is_meta:
            module._buffers[name] = wide.to(moved.device)
        return made

    def undo() -> None:
        moved = module._buffers[name]
        module.__dict__.pop("_apply", None)
        module._buffers[name] = own if moved is None else own.to(moved.device)
        setattr(module, _scaling_of(name), scaling)

    module._buffers[name] = wide.to(own.device)
    setattr(module, _scaling_of(name), spectrum[1])
    module.__dict__["_apply"] = apply_and_keep
    return undo


def layer_hook(
    layer: Layer, spectrum: Spectrum | None, memory: ForwardMemory, keep_mask: bool
) -> Callable[..., Any]:
    """A hook before a layer: it gets other position embeddings, and what it needs itself is kept.

    `spectrum` is what its position embeddings are made of; None leaves them as they are. `memory`
    keeps them for all layers of a forward, and those that the layer was given; with `keep_mask`
    also the mask of every pair, before the layer selects keys.
    """

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mask, argument = kwargs.get("attention_mask"), layer.argument
        if keep_mask and isinstance(mask, Tensor) and mask.dtype == torch.bool:
            memory.keep("mask", mask)
        if spectrum is None or argument is None:
            return None
        given = kwargs.get(argument) if isinstance(argument, str) else args[argument]
        if given is None:
            raise InputError(f"layer {layer.index} was called without its position embeddings")
        if not spectrum[0].any():
            memory.keep("own tables", given)
            return with_argument(args, kwargs, argument, unrotated(given))
        ids, tables = kwargs.get("position_ids"), layer.made_of
        if ids is None or ids.dim() != 2:
            raise InputError(
                f"layer {layer.index} does not receive the tokens' position_ids (batch, tokens), "
                "so its positions cannot be changed"
            )
        assert tables is not None
        name = f"tables {id(tables)} {(given if isinstance(given, Tensor) else given[0]).dtype}"
        made = memory.remember(name, (ids,), lambda: tables.make(ids, spectrum, given))
        return with_argument(args, kwargs, argument, made)

    return hook


def own_tables(memory: ForwardMemory) -> Callable[..., Any]:
    """A hook before a part of a layer that gets no rotation: an indexer keeps the model's own."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        argument, own = find_tables(args, kwargs), memory.get("own tables")
        known = argument is not None and own is not None
        return with_argument(args, kwargs, argument, own) if known else None  # type: ignore[arg-type]

    return hook


def refuse_images(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook before a rotary module: raise `InputError` for positions of several dimensions.

    Our attention counts the tokens, and an image's tokens are not counted one by one.
    """
    for value in (*kwargs.values(), *args):
        if not isinstance(value, Tensor) or value.dtype != torch.int64 or value.dim() != 3:
            continue
        if not torch.compiler.is_compiling() and bool((value != value[:1]).any()):
            raise InputError(
                "an image's tokens have positions of several dimensions in this model: with "
                "this method it takes only text"
            )
