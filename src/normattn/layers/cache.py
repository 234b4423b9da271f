"""The key-value cache of one attention layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from normattn.errors import InputError, require_sizes
from normattn.kernels.inputs import Selection
from normattn.kernels.numerics import at_least_float32
from normattn.score import ScoreSpec

_SMALLEST = 64


class Room:
    """A tensor buffer that grows along one axis; a full one is doubled.

    So appending token by token copies each element a constant number of times. With a `limit` the
    whole size is allocated at once.
    """

    def __init__(self, axis: int, limit: int | None = None) -> None:
        self.axis = axis
        self.limit = limit
        self.used = 0
        self.data: Tensor | None = None

    def append(self, x: Tensor) -> Tensor:
        """Append `x` and return a view of all stored tokens."""
        count = x.shape[self.axis]
        end = self.used + count
        data = self.data
        if data is None or end > data.shape[self.axis]:
            # One token more than the limit: a view of the whole buffer would compile another graph.
            size = self.limit + 1 if self.limit else max(_SMALLEST, 1 << (end - 1).bit_length())
            data = self._allocate(x, size, x.shape[0])
            if self.data is not None:
                data.narrow(self.axis, 0, self.used).copy_(self.view(self.used))
            self.data = data
        data.narrow(self.axis, self.used, count).copy_(x)
        self.used = end
        return data.narrow(self.axis, 0, end)

    def view(self, end: int) -> Tensor:
        """A view of the first `end` tokens."""
        assert self.data is not None
        return self.data.narrow(self.axis, 0, end)

    def choose(self, rows: Int[Tensor, " r"]) -> None:
        """Batch row i becomes the old row rows[i]."""
        if self.data is None:
            return
        # Only used tokens are copied, in place: beam search does this at every step, where
        # allocating costs more than copying.
        chosen = self.view(self.used).index_select(0, rows.to(self.data.device))
        if len(rows) > self.data.shape[0]:
            self.data = self._allocate(self.data, self.data.shape[self.axis], len(rows))
        self.data = self.data[: len(rows)]
        self.view(self.used).copy_(chosen)

    def drop(self, count: int, capacity: int) -> None:
        """Drop the first `count` tokens, and allocate `capacity` for the others."""
        remaining = self.view(self.used).narrow(self.axis, count, self.used - count)
        self.data, self.used = self._allocate(remaining, capacity, remaining.shape[0]), 0
        self.append(remaining)

    def _allocate(self, like: Tensor, size: int, rows: int) -> Tensor:
        shape = list(like.shape)
        shape[0], shape[self.axis] = rows, size
        # An ordinary tensor even when allocated in inference mode, as later calls write to it.
        with torch.inference_mode(False):
            return torch.empty(shape, dtype=like.dtype, device=like.device)


class KeyValueCache:
    """Keys (of `Score.cache_keys`) and values of the tokens that one layer has processed.

    Memory grows by doubling. `max_length` allocates it at the first token and refuses more tokens.
    With a sliding `window`, keys that no later token can see are dropped: about 2·window tokens (64
    at first) and the last call are held at most. A cache works with the score that filled it, and
    for inference only: tensors that require a gradient raise an error.

    `length` counts the tokens processed; keys of the first `dropped` are no longer held.
    """

    def __init__(self, max_length: int | None = None, *, window: int | None = None) -> None:
        for name, size in (("max_length", max_length), ("window", window)):
            if size is not None:
                require_sizes("cache", **{name: size})
        self.max_length, self.window = max_length, window
        self.length = 0
        self.dropped = 0
        # Rotated copies of the keys from a first one on, by the name of the rotation.
        self._rotated: dict[int | str, tuple[int, Room]] = {}
        # Sums of `Selective` (B, S), by the length of the cache: now, and one call before.
        self._selected: dict[int, Tensor] = {}
        self._keys, self._values = Room(2, max_length), Room(2, max_length)
        self._spec: ScoreSpec | None = None
        # Shapes and dtype of the last keys and values that passed the checks.
        self._checked: tuple[object, ...] = ()

    def claim(self, spec: ScoreSpec) -> None:
        """Raise `InputError` if another score has filled this cache."""
        if self._spec is spec:
            return
        if self._spec is not None and self.length and self._spec != spec:
            raise InputError(
                f"this cache holds keys of {self._spec}, which {spec} cannot use: make a new "
                "cache after switching methods"
            )
        self._spec = spec

    def append(
        self, k: Float[Tensor, "b g t d"], v: Float[Tensor, "b g t e"]
    ) -> tuple[Float[Tensor, "b g s d"], Float[Tensor, "b g s e"]]:
        """Append the keys and values of T tokens and return those of all held tokens."""
        # A view of a leaf requires a gradient even where gradients are off.
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise InputError(
                "a cache keeps no gradients: use it under torch.no_grad() or torch.inference_mode()"
            )
        shapes = k.shape, v.shape, k.dtype
        if shapes != self._checked:
            for name, new, held in (("keys", k, self._keys.data), ("values", v, self._values.data)):
                if held is None:
                    continue
                (rows, heads, _, size), dtype = held.shape, held.dtype
                if (*new.shape[:2], new.shape[3], new.dtype) != (rows, heads, size, dtype):
                    raise InputError(
                        f"this cache holds {name} of {rows} rows and {heads} heads of size {size} "
                        f"in {dtype}, but {name} of {tuple(new.shape)} in {new.dtype} were added"
                    )
            self._checked = shapes
        self._drop_unseen(k.shape[2])
        keys, values = self._keys.append(k), self._values.append(v)
        self.length += k.shape[2]
        return keys, values

    def rotated(
        self, name: int | str, start: int, end: int, rotate: Callable[[int, int], Tensor]
    ) -> Float[Tensor, "b g s wide"]:
        """Held keys from `start` to `end` in the rotation of this name, which is cached.

        `rotate(first, last)` rotates those that are not cached yet.
        """
        first, room = self._rotated.get(name, (start, Room(2)))
        if not first <= start <= first + room.used:
            first, room = start, Room(2)
        elif start - first > end - start + 64:
            room.drop(start - first, 2 * (end - start) + 65)
            first = start
        if first + room.used < end:
            room.append(rotate(first + room.used, end))
        self._rotated[name] = first, room
        return room.view(end - first)[:, :, start - first :]

    def forget_rotated(self, kept: set[int]) -> None:
        """Drop the rotated keys of all names but the `kept` ones."""
        self._rotated = {name: keys for name, keys in self._rotated.items() if name in kept}

    def selection(self, first: int, keys: Tensor, padding: Tensor | None) -> Selection:
        """What the first `first` tokens have selected of the held keys; 0 for later keys."""
        dtype = at_least_float32(keys.dtype)
        sums = keys.new_zeros(keys.shape[0], keys.shape[2], dtype=dtype)
        if first:
            if first not in self._selected:
                raise InputError(
                    f"this cache lacks what its first {first} tokens have selected, because an "
                    "earlier call failed: make a new cache"
                )
            before = self._selected[first]
            sums[:, : before.shape[1]] = before
        return Selection(sums, padding)

    def keep_selection(self, first: int, selection: Selection) -> None:
        """Keep the selection after all tokens and, to allow cutting, after the `first` ones."""
        assert selection.after is not None
        before = selection.before[:, : self._keys.used - (self.length - first)]
        self._selected = {first: before, self.length: selection.after.detach()}

    def reorder(self, rows: Int[Tensor, " r"]) -> None:
        """Row i becomes the old row rows[i]; rows may repeat or be left out (beam search)."""
        self._checked = ()
        for room in (self._keys, self._values, *(room for _, room in self._rotated.values())):
            room.choose(rows)
        for length, sums in self._selected.items():
            self._selected[length] = sums.index_select(0, rows.to(sums.device))

    def truncate(self, length: int) -> None:
        """Drop all tokens after the first `length`."""
        if length == self.length:
            return
        if not 0 <= length <= self.length:
            raise InputError(
                f"a cache of {self.length} tokens cannot be cut to {length}; give 0 … {self.length}"
            )
        self.check_cut(length)
        for room in (self._keys, self._values):
            room.used = max(0, length - self.dropped)
        for first, room in self._rotated.values():
            room.used = max(0, min(room.used, self._keys.used - first))
        self._selected = {n: sums for n, sums in self._selected.items() if n <= length}
        self.length = length

    def check_cut(self, length: int) -> None:
        """Raise `InputError` if tokens after `length` need keys that are dropped."""
        if self._selected and length and length not in self._selected:
            raise InputError(
                f"what the tokens after token {length} have selected cannot be undone: run the "
                "text again"
            )
        if self.window is not None and self.dropped and length - self.window + 1 < self.dropped:
            raise InputError(
                f"a layer with a window of {self.window} has forgotten the keys before token "
                f"{self.dropped}, which rows after token {length} need: run the text again"
            )

    @property
    def croppable(self) -> bool:
        """Whether any number of the last tokens can be cut off."""
        return self.window is None and (self._spec is None or self._spec.selection is None)

    def _drop_unseen(self, tokens: int) -> None:
        """Check `max_length` and, when full, drop keys outside the window, before `tokens` more."""
        if self.max_length is not None:
            refuse_overflow(self.length, tokens, self.max_length)
        data, used = self._keys.data, self._keys.used
        if self.window is None or data is None or used + tokens <= data.shape[2]:
            return
        count = max(0, used - self.window + 1)
        if count:
            capacity = max(2 * self.window, used - count + tokens)
            for room in (self._keys, self._values):
                room.drop(count, capacity)
            self._selected = {n: sums[:, count:] for n, sums in self._selected.items()}
            self._rotated.clear()  # They are indexed as the keys were before.
            self.dropped += count


def refuse_overflow(length: int, tokens: int, max_length: int) -> None:
    """Raise `InputError` if `tokens` more do not fit."""
    if length + tokens > max_length:
        raise InputError(
            f"the cache has room for {max_length} tokens, and {length} of it are taken: {tokens} "
            "more do not fit; give a larger max_length, or none for a cache that grows"
        )
