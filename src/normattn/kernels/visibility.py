"""Who may see whom, and what is added to a score: causality, windows, documents, padding, masks.

Legend: B batch, H query heads, T queries, S keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Visibility:
    """Which keys a query sees, and what is added to a score.

    A key is seen when it is not padding, when `mask` (boolean, True = seen) allows it, when it is
    of the query's document, if `causal`, when its position is not after the query's, and, with a
    `window`, when |i − j| < window or its position is below `kept`. A floating `mask` is added to
    the score. `aligned` says that positions are 0 … S − 1 for keys and the last T of them for
    queries.
    """

    causal: bool
    query: Int[Tensor, "*bq t"]
    key: Int[Tensor, "*bk s"]
    aligned: bool
    padding: Bool[Tensor, "b s"] | None = None
    mask: Tensor | None = None
    window: int | None = None
    kept: int = 0
    query_documents: Int[Tensor, "b t"] | None = None
    key_documents: Int[Tensor, "b s"] | None = None

    @property
    def plain(self) -> bool:
        """Whether nothing but aligned causality (or nothing at all) hides a key."""
        return self.window is None and self.regular

    @property
    def regular(self) -> bool:
        """Whether a key is hidden by aligned causality and the window only, alike in every row."""
        bare = self.padding is None and self.mask is None and self.query_documents is None
        return bare and (self.aligned or not (self.causal or self.window is not None))

    def part(self, rows: slice, keys: int) -> Visibility:
        """What `rows` see of the first `keys` keys; rows are then the last of them if aligned."""
        if rows == slice(0, self.query.shape[-1]) and keys == self.key.shape[-1]:
            return self
        columns = slice(0, keys)
        own, theirs = self.query_documents, self.key_documents
        return replace(
            self,
            query=self.query[..., rows],
            key=self.key[..., columns],
            padding=None if self.padding is None else self.padding[:, columns],
            mask=None if self.mask is None else _block(self.mask, rows, columns),
            query_documents=None if own is None else own[:, rows],
            key_documents=None if theirs is None else theirs[:, columns],
        )

    def distance(self, rows: slice, columns: slice) -> Int[Tensor, "*b t s"]:
        """i − j for a block, (t, s) or (B, 1, t, s)."""
        query, key = self.query[..., rows], self.key[..., columns]
        block = query[..., :, None] - key[..., None, :]
        return block[:, None] if block.dim() == 3 else block

    def by_position(self, score: Float[Tensor, "b h t s"]) -> Int[Tensor, "b h t s"] | None:
        """The columns of `score` in the order of positions; None where they stand in it."""
        if self.aligned:
            return None
        order = self.key.argsort(dim=-1, stable=True)
        return (order if order.dim() == 1 else order[:, None, None]).expand(score.shape)

    def hidden(self, rows: slice, columns: slice) -> Bool[Tensor, "..."] | None:
        """True where a key is not seen, broadcastable to (B, H, t, s); None where all are."""
        hidden: Tensor | None = None
        if self.causal:
            hidden = self.distance(rows, columns) < 0
        if self.padding is not None:
            padded = self.padding[:, None, None, columns]
            hidden = padded if hidden is None else hidden | padded
        if self.window is not None:
            beyond = self.distance(rows, columns).abs() >= self.window
            if self.kept:
                key = self.key[..., columns] >= self.kept
                beyond = beyond & (key[:, None, None] if key.dim() == 2 else key)
            hidden = beyond if hidden is None else hidden | beyond
        if self.query_documents is not None and self.key_documents is not None:
            query, key = self.query_documents[:, rows], self.key_documents[:, columns]
            other = (query[:, :, None] != key[:, None, :])[:, None]
            hidden = other if hidden is None else hidden | other
        if self.mask is not None and self.mask.dtype == torch.bool:
            unseen = ~_block(self.mask, rows, columns)
            hidden = unseen if hidden is None else hidden | unseen
        return hidden

    def added(self, rows: slice, columns: slice) -> Float[Tensor, "..."] | None:
        """What the floating mask adds to a block of scores."""
        if self.mask is None or self.mask.dtype == torch.bool:
            return None
        return _block(self.mask, rows, columns)


def _block(mask: Tensor, rows: slice, columns: slice) -> Tensor:
    """The block of a mask whose last two axes may be 1 to be broadcast."""
    if mask.shape[-2] != 1:
        mask = mask[..., rows, :]
    return mask if mask.shape[-1] == 1 else mask[..., columns]
