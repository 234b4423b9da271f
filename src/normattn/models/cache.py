"""The key-value cache of a whole model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from normattn.errors import InputError
from normattn.layers.cache import KeyValueCache, Room, refuse_overflow
from normattn.layers.checks import check_tensor
from normattn.layers.documents import documents_from_ends
from normattn.models.transformer import AttentionContext
from normattn.score import ScoreSpec

# Prompts and long rows are processed in chunks of this many tokens, with a cache.
CHUNK = 512


class ModelCache:
    """One `KeyValueCache` per layer, and the padding and documents of the cached tokens.

    `CausalLM.new_cache` makes it for the scores that are active then; switching a method on or off
    requires a new one. Layers with a sliding window drop keys that no later token sees, except with
    `ValueResidual` if windows differ. With `max_length` the other layers allocate all memory at the
    first token, and refuse more tokens.
    """

    def __init__(self, specs: Sequence[ScoreSpec], max_length: int | None = None) -> None:
        self.max_length = max_length
        self.length = 0
        self.layers: list[KeyValueCache] = []
        windows = {spec.window for spec in specs}
        for spec in specs:
            window, sink_tokens = spec.window
            # Layers that mix their values must hold the same tokens.
            mixes = spec.residual is not None and spec.residual.summed == "values"
            drops = window is not None and not sink_tokens and not (mixes and len(windows) > 1)
            cache = KeyValueCache(window=window) if drops else KeyValueCache(max_length)
            cache.claim(spec)
            self.layers.append(cache)
        separators = {spec.documents.separator for spec in specs if spec.documents is not None}
        self._separator = separators.pop() if separators else None
        # For all tokens, only if there is padding or a separator; `ends` marks separators.
        self._padding, self._documents, self._ends = Room(1), Room(1), Room(1)
        self._rooms = (self._padding, self._documents, self._ends)

    def extend(
        self, ids: Int[Tensor, "b t"], key_padding: Bool[Tensor, "b t"] | None = None
    ) -> AttentionContext:
        """Begin a forward of T new tokens, padded only on the left; `commit` ends it."""
        self.truncate(self.length)
        if self.max_length is not None:
            refuse_overflow(self.length, ids.shape[1], self.max_length)
        padded = self._padding.used > 0
        if key_padding is not None:
            check_tensor("key_padding", key_padding, "boolean", tuple(ids.shape))
            # Padding follows only padding, or nothing: whether the token before is padding.
            before = torch.full_like(key_padding[:, :1], self.length == 0)
            if self.length and padded:
                before = self._padding.view(self.length)[:, -1:]
            if bool((key_padding & ~torch.cat((before, key_padding[:, :-1]), -1)).any()):
                raise InputError(
                    "with a cache, padding is allowed only before a row's first token: pad on the "
                    "left"
                )
            padded = padded or bool(key_padding.any())
        padding = documents = None
        if self._separator is not None:
            # A separator belongs to the document it ends.
            ends = ids == self._separator
            numbers = documents_from_ends(ends)
            if self.length:
                last = self._documents.view(self.length) + self._ends.view(self.length)
                numbers = numbers + last[:, -1:]
            self._ends.append(ends)
            documents = self._documents.append(numbers)
        if padded:
            new = torch.zeros_like(ids, dtype=torch.bool) if key_padding is None else key_padding
            padding = self._padding.append(new)
        return AttentionContext(padding, documents=documents)

    def commit(self, tokens: int) -> None:
        """End a forward: all layers have processed the new tokens."""
        self.length += tokens

    def reorder(self, rows: Int[Tensor, " r"] | Sequence[int]) -> None:
        """Row i becomes the old row rows[i]; rows may repeat or be left out (beam search)."""
        self.truncate(self.length)
        chosen = torch.as_tensor(rows, dtype=torch.long)
        for layer in self.layers:
            layer.reorder(chosen)
        for room in self._rooms:
            room.choose(chosen)

    def truncate(self, length: int) -> None:
        """Drop tokens after the first `length`, also in layers that a failed call left ahead."""
        for layer in self.layers:
            layer.truncate(self.length)
        if length != self.length:
            for layer in self.layers:
                layer.check_cut(length)
            for layer in self.layers:
                layer.truncate(length)
        self.length = length
        for room in self._rooms:
            room.used = min(room.used, length)
