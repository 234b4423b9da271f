"""Keys that a method has rotated, kept from token to token beside transformers' cache.

That cache holds keys as a layer projects them, and a decode step would rotate them all again. Its
`DynamicLayer` makes a new tensor of those it held and the new ones. So where it held the very
tensor that the call before was given, or an untouched front part, only what is new is rotated.

Legend: B batch, G key heads, S keys, D head dimension.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from normattn.layers.cache import Room


class RotatedKeyCache:
    """The rotated keys of one layer; a hook before that layer, which sees its cache.

    They take as much memory as the keys themselves, and are let go with the cache's last tensor.
    Nothing is kept of other caches than transformers' `DynamicCache`, in inference mode, where
    torch does not say whether a tensor was written to, where gradients are wanted, or while a
    compiler traces.
    """

    def __init__(self) -> None:
        self._cache: Any = None
        self._before: Tensor | None = None
        self._source: weakref.ref[Tensor] | None = None
        self._version = 0
        self._rooms: dict[Hashable, Room] = {}
        self.open = False

    def __call__(self, module: nn.Module, _: Any, kwargs: dict[str, Any]) -> None:
        """See what the cache of the layer holds before its forward."""
        cache = None if torch.compiler.is_compiling() else kwargs.get("past_key_values")
        self._cache = _dynamic(cache, module)
        self._before = None if self._cache is None else self._cache.keys

    def begin(self, k: Float[Tensor, "b g s d"], new: int, whole: bool) -> None:
        """Attention is given these keys, the last `new` of which were not there before.

        `whole` is whether all rows of the batch are rotated at once. `open` says afterwards whether
        rotated keys are kept in this call.
        """
        cache, before = self._cache, self._before
        self._cache = self._before = None
        first = k.shape[2] - new
        held = before is not None and cache is not None and cache.keys is k
        self.open = whole and first > 0 and held and not (k.is_inference() or k.requires_grad)
        if not self.open or before is None:
            self._forget()
            return
        if before.shape[2] == first and self._continues(before):
            for room in self._rooms.values():
                room.used = min(room.used, first)
        else:
            self._rooms.clear()
        self._source, self._version = weakref.ref(k, self._forget), k._version

    def rotated(
        self, name: Hashable, k: Float[Tensor, "b g s d"], rotate: Callable[[int], Tensor]
    ) -> Float[Tensor, "b g s d"]:
        """All keys, rotated in the way of that name; `rotate(first)` does those from `first` on."""
        room = self._rooms.get(name)
        if room is None:
            # Another block of DynamicNTK rotates all keys otherwise.
            self._rooms = {name: (room := Room(2))}
        if room.used < k.shape[2]:
            room.append(rotate(room.used))
        return room.view(k.shape[2])

    def _continues(self, before: Tensor) -> bool:
        """Whether the cache held what the last call was given, or the front of it."""
        source = None if self._source is None else self._source()
        if source is None or source._version != self._version:
            return False
        same_place = before._base is source and before.data_ptr() == source.data_ptr()
        same_shape = before.stride() == source.stride() and before.shape[:2] == source.shape[:2]
        return before is source or (same_place and same_shape)

    def _forget(self, _: object = None) -> None:
        self._source = None
        self._rooms.clear()


def _dynamic(cache: Any, module: nn.Module) -> Any:
    """The layer's part of a `DynamicCache` whose `update` is transformers' own; else None."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    index = getattr(module, "layer_idx", None)
    if type(cache) is not DynamicCache or index is None or index >= len(cache.layers):
        return None
    layer = cache.layers[index]
    return layer if type(layer) is DynamicLayer and layer.is_initialized else None
