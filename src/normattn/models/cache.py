"""What a whole model remembers of the tokens that it has read.

Legend: B batch, T new tokens, S tokens in all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from normattn.errors import InputError
from normattn.layers.cache import KeyValueCache, Room, refuse_overflow
from normattn.layers.documents import documents_from_ends
from normattn.models.transformer import AttentionContext
from normattn.score import ScoreSpec

# Longer rows, and prompts, are read this many tokens at a time, which a cache remembers.
CHUNK = 512


class ModelCache:
    """One `KeyValueCache` per layer, and which tokens are padding or of another document.

    Made by `CausalLM.new_cache` for the scores that are active then: after a method is switched
    on or off, a new one is needed. Layers with a sliding window forget what no later row sees.
    With `max_length` all memory of the other layers is taken at the first token, and more tokens
    are refused.
    """

    def __init__(self, specs: Sequence[ScoreSpec], max_length: int | None = None) -> None:
        self.max_length = max_length
        self.length = 0
        self.layers: list[KeyValueCache] = []
        for spec in specs:
            window, kept = spec.window
            forgets = window is not None and not kept
            cache = KeyValueCache(window=window) if forgets else KeyValueCache(max_length)
            cache.claim(spec)
            self.layers.append(cache)
        separators = {spec.documents.separator for spec in specs if spec.documents is not None}
        self._separator = separators.pop() if separators else None
        # Of all tokens, where they are more than simply counted; `ends` marks separators.
        self._padding, self._positions, self._documents, self._ends = (Room(1) for _ in range(4))
        self._rooms = (self._padding, self._positions, self._documents, self._ends)

    def read(
        self, ids: Int[Tensor, "b t"], key_padding: Bool[Tensor, "b t"] | None = None
    ) -> AttentionContext:
        """Take note of T new tokens, which the layers read next; `done` ends their reading.

        `key_padding` is that of the new tokens; padding may come before a row's first token only.
        """
        self.truncate(self.length)
        if self.max_length is not None:
            refuse_overflow(self.length, ids.shape[1], self.max_length)
        padded = self._padding.used > 0
        if key_padding is not None:
            self._refuse_padding(ids, key_padding)
            padded = padded or bool(key_padding.any())
        if not padded and self._separator is None:
            return AttentionContext()
        padding, documents = None, None
        numbers = ids.new_zeros(ids.shape[0], self.length + ids.shape[1])
        if self._separator is not None:
            numbers = documents = self._number_documents(ids == self._separator)
        if padded:
            new = torch.zeros_like(ids, dtype=torch.bool) if key_padding is None else key_padding
            padding = self._padding.append(new)
            numbers = numbers.masked_fill(padding, -1)
        positions = self._positions.append(_count_from(numbers, self._positions, self.length))
        return AttentionContext(padding, positions, documents)

    def done(self, tokens: int) -> None:
        """All layers have read the new tokens."""
        self.length += tokens

    def reorder(self, rows: Int[Tensor, " r"] | Sequence[int]) -> None:
        """Row i becomes the old row rows[i], as beam search asks; rows may repeat or lack."""
        self.truncate(self.length)
        chosen = torch.as_tensor(rows, dtype=torch.long)
        for layer in self.layers:
            layer.reorder(chosen)
        for room in self._rooms:
            room.choose(chosen)

    def truncate(self, length: int) -> None:
        """Forget all tokens after the first `length` of every row.

        Layers that a call which failed half-way left ahead of the others are cut as well.
        """
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

    @property
    def nbytes(self) -> int:
        """Bytes of memory held, used or not."""
        layers = sum(layer.nbytes for layer in self.layers)
        return layers + sum(room.nbytes for room in self._rooms)

    def _number_documents(self, ends: Tensor) -> Tensor:
        """The number of each token's document; a separator belongs to the document it ends."""
        numbers = documents_from_ends(ends)
        if self.length:
            last = self._documents.view(self.length) + self._ends.view(self.length)
            numbers = numbers + last[:, -1:]
        self._ends.append(ends)
        return self._documents.append(numbers)

    def _refuse_padding(self, ids: Tensor, padding: Tensor) -> None:
        if padding.shape != ids.shape or padding.dtype != torch.bool:
            raise InputError(
                f"key_padding must be boolean {tuple(ids.shape)}, that of the new tokens, but it "
                f"is {padding.dtype} of {tuple(padding.shape)}"
            )
        before = torch.ones_like(padding[:, :1])
        if self.length:
            held = self._padding
            before = held.view(self.length)[:, -1:] if held.used else torch.zeros_like(before)
        if bool((padding & ~torch.cat((before, padding[:, :-1]), -1)).any()):
            raise InputError(
                "with a cache, padding is allowed only before a row's first token: pad on the left"
            )


def _count_from(numbers: Tensor, positions: Room, first: int) -> Tensor:
    """Positions of the tokens from `first` on, each counted from its document's first token.

    `numbers` (B, S) are those of every token's document.
    """
    at = torch.arange(numbers.shape[1] - first, device=numbers.device).expand(numbers.shape[0], -1)
    begins = torch.ones_like(at, dtype=torch.bool)
    if first:
        begins = numbers[:, first:] != numbers[:, first - 1 : -1]
    else:
        begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    # −1 where the document is that of the last token read before.
    start = torch.where(begins, at, -1).cummax(-1).values
    if not first:
        return at - start
    before = positions.view(first)[:, -1:]
    return torch.where(start < 0, before + 1 + at, at - start)
