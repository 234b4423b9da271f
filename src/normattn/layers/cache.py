"""What one attention layer keeps of the tokens that it has read: their keys and values.

Legend: B batch, G key heads, T new tokens, S tokens in all, D key size, E value size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from normattn.errors import InputError
from normattn.kernels.inputs import Selection
from normattn.kernels.numerics import at_least_float32
from normattn.score import ScoreSpec

_SMALLEST = 64


class Room:
    """A tensor that is filled along one axis; where it is full, its size is doubled.

    So appending one by one copies each element a constant number of times. With a `limit` all
    room is taken at once and never more.
    """

    def __init__(self, axis: int, limit: int | None = None) -> None:
        self.axis = axis
        self.limit = limit
        self.used = 0
        self.data: Tensor | None = None

    def append(self, x: Tensor) -> Tensor:
        """Append `x` to the stored tokens and return a view of all of them."""
        count = x.shape[self.axis]
        end = self.used + count
        data = self.data
        if data is None or end > data.shape[self.axis]:
            data = self._enlarge(x, end)
        data.narrow(self.axis, self.used, count).copy_(x)
        self.used = end
        return data.narrow(self.axis, 0, end)

    def view(self, end: int) -> Tensor:
        """The first `end` places."""
        assert self.data is not None
        return self.data.narrow(self.axis, 0, end)

    def choose(self, rows: Int[Tensor, " r"]) -> None:
        """Batch row i becomes the old row rows[i]."""
        if self.data is None:
            return
        # Only what is used is moved, and in place: a beam search does this at every step, where
        # fresh memory costs more than the copy.
        chosen = self.view(self.used).index_select(0, rows.to(self.data.device))
        if len(rows) > self.data.shape[0]:
            self.data = self._fresh(self.data, self.data.shape[self.axis], len(rows))
        self.data = self.data[: len(rows)]
        self.view(self.used).copy_(chosen)

    def drop(self, count: int, capacity: int) -> None:
        """Forget the first `count` places, and hold room for `capacity`."""
        kept = self.view(self.used).narrow(self.axis, count, self.used - count)
        self.data, self.used = self._fresh(kept, capacity, kept.shape[0]), 0
        self.append(kept)

    @property
    def nbytes(self) -> int:
        """Bytes taken, used or not."""
        # Of the whole storage: rows that are left behind stay in it.
        return 0 if self.data is None else self.data.untyped_storage().nbytes()

    def _enlarge(self, x: Tensor, wanted: int) -> Tensor:
        # One place is never used: a view of all of them would be a graph of its own to a compiler.
        room = self.limit + 1 if self.limit else max(_SMALLEST, 1 << (wanted - 1).bit_length())
        fresh = self._fresh(x, room, x.shape[0])
        if self.data is not None:
            fresh.narrow(self.axis, 0, self.used).copy_(self.view(self.used))
        self.data = fresh
        return fresh

    def _fresh(self, like: Tensor, size: int, rows: int) -> Tensor:
        shape = list(like.shape)
        shape[0], shape[self.axis] = rows, size
        # An ordinary tensor even when first filled in inference mode: later calls write to it.
        with torch.inference_mode(False):
            return torch.empty(shape, dtype=like.dtype, device=like.device)


class KeyValueCache:
    """Keys, as `Score.cache_keys` makes them, and values of the tokens that one layer has read.

    Memory grows by doubling. With `max_length` it is taken at the first token, and more tokens are
    refused; with a sliding `window`, keys that no later row can see are forgotten: it holds at most
    about 2·window tokens beside those of the last call. A cache belongs to the score that filled it
    and to inference: tensors that want a gradient are refused.

    `length` counts the tokens read, of which the first `dropped` are forgotten.
    """

    def __init__(self, max_length: int | None = None, *, window: int | None = None) -> None:
        if max_length is not None and max_length < 1:
            raise InputError(f"max_length is {max_length}; it must be at least 1")
        self.max_length, self.window = max_length, window
        self.length = 0
        self.dropped = 0
        # Kept keys as some rows read them, from a first one on.
        self._rotated: dict[int | str, tuple[int, Room]] = {}
        # What queries took from each key (B, S), by the tokens read then: now, and a call before.
        self._selected: dict[int, Tensor] = {}
        self._keys, self._values = Room(2, max_length), Room(2, max_length)
        self._spec: ScoreSpec | None = None
        # Shapes and type of the last keys and values that were found to fit.
        self._fitting: tuple[object, ...] = ()

    def claim(self, spec: ScoreSpec) -> None:
        """Refuse keys of another score than the one that filled this cache."""
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
        """Add the keys and values of T tokens and return those of all that are kept."""
        # A view of a leaf says that it wants a gradient even where gradients are off.
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise InputError(
                "a cache keeps no gradients: use it under torch.no_grad() or torch.inference_mode()"
            )
        kind = k.shape, v.shape, k.dtype
        if kind != self._fitting:
            self._check_kind(k, v)
            self._fitting = kind
        self._make_room(k.shape[2])
        keys, values = self._keys.append(k), self._values.append(v)
        self.length += k.shape[2]
        return keys, values

    def _check_kind(self, k: Tensor, v: Tensor) -> None:
        """Refuse keys and values of other rows, heads, sizes or types than those that are held."""
        held = self._keys.data
        if held is not None and (held.shape[:2] != k.shape[:2] or held.dtype != k.dtype):
            raise InputError(
                f"this cache holds {held.shape[0]} rows of {held.shape[1]} key heads in "
                f"{held.dtype}, but keys of {tuple(k.shape)} in {k.dtype} were added"
            )
        values = self._values.data
        for name, new, kept in (("keys", k, held), ("values", v, values)):
            if kept is not None and (new.shape[1], new.shape[3]) != (kept.shape[1], kept.shape[3]):
                raise InputError(
                    f"this cache holds {name} of {kept.shape[1]} heads of size {kept.shape[3]}, "
                    f"but {name} of {tuple(new.shape)} were added"
                )

    def rotated(
        self, name: int | str, start: int, end: int, rotate: Callable[[int, int], Tensor]
    ) -> Float[Tensor, "b g s wide"]:
        """Kept keys from `start` to `end` as the rows of that name read them.

        `rotate(first, last)` makes those that no call before has made.
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
        """Forget the rotated keys of all other names."""
        self._rotated = {name: held for name, held in self._rotated.items() if name in kept}

    def selection(self, first: int, keys: Tensor, padding: Tensor | None) -> Selection:
        """What the first tokens took from all of the kept keys; of those after them, nothing."""
        wide = at_least_float32(keys.dtype)
        taken = keys.new_zeros(keys.shape[0], keys.shape[2], dtype=wide)
        if first:
            if first not in self._selected:
                raise InputError(
                    f"this cache lacks what its first {first} tokens have selected, because an "
                    "earlier call failed: make a new cache"
                )
            before = self._selected[first]
            taken[:, : before.shape[1]] = before
        return Selection(taken, padding)

    def keep_selection(self, first: int, selection: Selection) -> None:
        """Keep what all tokens have selected, and, to take them back, what the first had."""
        assert selection.after is not None
        before = selection.before[:, : self._keys.used - (self.length - first)]
        self._selected = {first: before, self.length: selection.after.detach()}

    def reorder(self, rows: Int[Tensor, " r"]) -> None:
        """Row i becomes the old row rows[i], as beam search asks; rows may repeat or lack."""
        self._fitting = ()
        for room in self._rooms():
            room.choose(rows)
        for length, taken in self._selected.items():
            self._selected[length] = taken.index_select(0, rows.to(taken.device))

    def truncate(self, length: int) -> None:
        """Forget all tokens after the first `length`."""
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
        self._selected = {at: taken for at, taken in self._selected.items() if at <= length}
        self.length = length

    def check_cut(self, length: int) -> None:
        """Raise `InputError` where what rows after `length` must see is forgotten."""
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
        """Whether any number of the last tokens can be taken back."""
        return self.window is None and (self._spec is None or self._spec.selection is None)

    @property
    def rows(self) -> int:
        """Rows of the batch; 0 before anything was read."""
        return 0 if self._keys.data is None else self._keys.data.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of memory held, used or not."""
        taken = sum(tensor.nbytes for tensor in self._selected.values())
        return taken + sum(room.nbytes for room in self._rooms())

    def _rooms(self) -> tuple[Room, ...]:
        return self._keys, self._values, *(room for _, room in self._rotated.values())

    def _make_room(self, tokens: int) -> None:
        """Refuse more than `max_length` tokens; forget all but the last window − 1 when full."""
        if self.max_length is not None:
            refuse_overflow(self.length, tokens, self.max_length)
        data, used = self._keys.data, self._keys.used
        if self.window is None or data is None or used + tokens <= data.shape[2]:
            return
        gone = max(0, used - self.window + 1)
        if gone:
            capacity = max(2 * self.window, used - gone + tokens)
            for room in (self._keys, self._values):
                room.drop(gone, capacity)
            self._selected = {at: taken[:, gone:] for at, taken in self._selected.items()}
            self._rotated.clear()  # Their columns were those of the keys before.
            self.dropped += gone


def refuse_overflow(length: int, tokens: int, max_length: int) -> None:
    """Raise `InputError` where `tokens` more do not fit."""
    if length + tokens > max_length:
        raise InputError(
            f"the cache has room for {max_length} tokens, and {length} of it are taken: {tokens} "
            "more do not fit; give a larger max_length, or none for a cache that grows"
        )
