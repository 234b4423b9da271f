"""Replace the rotary frequencies of a model's layers, until the change is undone.

Where all layers that use a rotary module change alike, its `inv_freq` and `attention_scaling` are
set and the model's code computes the tables. Where unchanged layers share it, or it recomputes its
frequencies, a hook before each layer replaces its tables.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.hf.attention_fn import ForwardMemory
from normattn.hf.probe import Layer, find_tables, identity_tables, replace_argument, rotary_buffers
from normattn.hf.rotations import Spectrum, read_tables
from normattn.score import ScoreSpec

Undo = Callable[[], object]


def spectrum_of(layer: Layer, spec: ScoreSpec) -> Spectrum | None:
    """A layer's spectrum under a method; None where it keeps its own.

    It rotates nothing where the method rotates inside attention.
    """
    if layer.rotation is None:
        return None
    if spec.remapping is not None or spec.blockwise:
        return torch.zeros_like(layer.rotation.frequencies), 1.0
    if spec.rope_scaling is None:
        return None
    return layer.spectrum(spec)


def override_buffers(
    layers: Sequence[Layer], spec: ScoreSpec, excluded: Collection[Layer]
) -> tuple[list[Undo], list[Layer]]:
    """Set the buffers of the rotary modules; the undo functions, and the layers that need a hook.

    `excluded` are layers whose buffers must stay as they are. So does a layer without a known
    rotary module, which the check of the extended model then refuses.
    """
    users: dict[tuple[nn.Module, str], list[tuple[Layer, Spectrum | None]]] = {}
    to_hook: list[Layer] = []
    for layer in layers:
        changes = layer.sliding_window is None and layer not in excluded
        spectrum = spectrum_of(layer, spec) if changes else None
        if layer.rotary is not None:
            users.setdefault(_buffer_of(*layer.rotary), []).append((layer, spectrum))
    undo: list[Undo] = []
    for (module, name), sharing in users.items():
        first = sharing[0][1]
        if first is not None and all(_equal(first, spectrum) for _, spectrum in sharing):
            restore = _override(module, name, first)
            if _uses_buffer(sharing[0][0], first):
                undo.append(restore)
                continue
            restore()
        to_hook += [layer for layer, spectrum in sharing if spectrum is not None]
    return undo, to_hook


def _uses_buffer(layer: Layer, spectrum: Spectrum) -> bool:
    """Whether the layer's rotary module makes tables of the spectrum in its buffer.

    Some modules (Phi-3.5-MoE's) recompute their frequencies in every forward.
    """
    tables = layer.tables_at(torch.arange(layer.call.q.shape[2])[None])
    return read_tables(tables, [spectrum]) is not None


def _equal(first: Spectrum, second: Spectrum | None) -> bool:
    return second is not None and first[1] == second[1] and torch.equal(first[0], second[0])


def _buffer_of(module: nn.Module, layer_type: str) -> tuple[nn.Module, str]:
    """The module and name of the buffer of the frequencies of these layers."""
    names, typed_name = rotary_buffers(module), f"{layer_type}_inv_freq"
    return module, typed_name if typed_name in names else names[0]


def _scaling_field(name: str) -> str:
    return name.removesuffix("inv_freq") + "attention_scaling"


def _override(module: nn.Module, name: str, spectrum: Spectrum) -> Undo:
    """Put a spectrum into a rotary module; it stays in float32 when the model is cast."""
    buffer: Any = module._buffers[name]
    scaling = getattr(module, _scaling_field(name), 1.0)
    frequencies = spectrum[0].view(buffer.shape).float()
    apply: Callable[..., Any] = module._apply

    def apply_without_cast(*args: Any, **kwargs: Any) -> Any:
        """Let `module.to(…)` move the frequencies without rounding them."""
        result = apply(*args, **kwargs)
        moved = module._buffers[name]
        if moved is not None and not moved.is_meta:
            module._buffers[name] = frequencies.to(moved.device)
        return result

    def undo() -> None:
        moved = module._buffers[name]
        module.__dict__.pop("_apply", None)
        module._buffers[name] = buffer if moved is None else buffer.to(moved.device)
        setattr(module, _scaling_field(name), scaling)

    module._buffers[name] = frequencies.to(buffer.device)
    setattr(module, _scaling_field(name), spectrum[1])
    module.__dict__["_apply"] = apply_without_cast
    return undo


def layer_hook(
    layer: Layer, spectrum: Spectrum | None, memory: ForwardMemory, keep_mask: bool
) -> Callable[..., Any]:
    """A hook before a layer that replaces its position embeddings by those of `spectrum`.

    None leaves them as they are. `memory` keeps them for all layers of a forward, together with the
    model's own; with `keep_mask` also the pair mask before the layer selects keys.
    """

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mask, argument = kwargs.get("attention_mask"), layer.argument
        if keep_mask and isinstance(mask, Tensor) and mask.dtype == torch.bool:
            memory.keep("mask", mask)
        if spectrum is None or argument is None:
            return None
        own = kwargs.get(argument) if isinstance(argument, str) else args[argument]
        if own is None:
            raise InputError(f"layer {layer.index} was called without its position embeddings")
        if not spectrum[0].any():
            memory.keep("own tables", own)
            return replace_argument(args, kwargs, argument, identity_tables(own))
        ids, table_format = kwargs.get("position_ids"), layer.table_format
        if ids is None or ids.dim() != 2:
            raise InputError(
                f"layer {layer.index} does not receive the tokens' position_ids (batch, tokens), "
                "so its positions cannot be changed"
            )
        assert table_format is not None
        name = f"tables {id(table_format)} {(own if isinstance(own, Tensor) else own[0]).dtype}"
        replaced = memory.remember(name, (ids,), lambda: table_format.make(ids, spectrum, own))
        return replace_argument(args, kwargs, argument, replaced)

    return hook


def own_tables_hook(memory: ForwardMemory) -> Callable[..., Any]:
    """A hook before a submodule, such as an indexer, that restores the model's own tables."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        argument, tables = find_tables(args, kwargs), memory.get("own tables")
        if argument is None or tables is None:
            return None
        return replace_argument(args, kwargs, argument, tables)

    return hook


def refuse_images(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook before a rotary module that raises `InputError` for positions of several dimensions.

    normattn's attention numbers tokens one by one, and image tokens are not numbered so.
    """
    for value in (*kwargs.values(), *args):
        if not isinstance(value, Tensor) or value.dtype != torch.int64 or value.dim() != 3:
            continue
        if not torch.compiler.is_compiling() and bool((value != value[:1]).any()):
            raise InputError(
                "an image's tokens have positions of several dimensions in this model: with "
                "this method it takes only text"
            )
