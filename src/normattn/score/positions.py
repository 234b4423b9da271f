"""Positions of queries and keys, and the number of keys that each query sees.

Legend: B batch, T queries, S keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.functional import pad

from normattn.errors import InputError
from normattn.kernels import AttentionMask
from normattn.plain import cacheable


@dataclass(frozen=True)
class Positions:
    """Positions of queries (T,) or (B, T) and keys (S,) or (B, S), and n visible keys per query.

    `n` has the shape of the queries; (1,) or (B, 1) if all queries of a row see the same keys;
    (B, H, T) if it was counted from a mask of each head. `regular`: positions follow from T, S and
    causal alone, so tables can be cached. `ordered`: the queries are the last T keys, and the keys'
    positions grow. `masked`: n was counted from a mask (`exclude_masked`).
    """

    query: Int[Tensor, "*bq t"]
    key: Int[Tensor, "*bk s"]
    n: Int[Tensor, "*bn u"]
    causal: bool
    regular: bool
    ordered: bool = True
    masked: bool = False

    def select(self, rows: slice, keys: int) -> Positions:
        """Select query rows and the first `keys` keys; the rows are the last of these keys."""
        if rows == slice(0, self.query.shape[-1]) and keys == self.key.shape[-1]:
            return self
        n = self.n[..., rows] if self.n.shape[-1] == self.query.shape[-1] else self.n
        return replace(self, query=self.query[..., rows], key=self.key[..., :keys], n=n)

    def exclude_masked(self, mask: AttentionMask) -> Positions:
        """Subtract from n the keys that `attn_mask` hides.

        A boolean mask hides where it is False, a floating one where it is −∞ or the lowest number
        of its dtype. Keys that padding, documents or causality hide are not subtracted again.
        Windows and chunks do not change n, so `mask` must not have them yet.
        """
        attn_mask, everything = mask.attn_mask, slice(None)
        if attn_mask is None:
            return self
        lowest = None if attn_mask.dtype == torch.bool else torch.finfo(attn_mask.dtype).min
        hidden = ~attn_mask if lowest is None else attn_mask <= lowest
        # A mask of three axes is (H, T, S).
        hidden = hidden[None] if hidden.dim() == 3 else hidden
        hidden_otherwise = replace(mask, attn_mask=None, window=None).hidden(everything, everything)
        if hidden_otherwise is not None:
            hidden = hidden & ~hidden_otherwise
        shape = (*hidden.shape[:-2], self.query.shape[-1], self.key.shape[-1])
        count = hidden.expand(shape).sum(-1)
        if count.dim() == 3 and count.shape[1] == 1:
            count = count[:, 0]
        n = self.n[:, None] if count.dim() == 3 and self.n.dim() == 2 else self.n
        return replace(self, n=(n - count).clamp(min=1), masked=True)

    @staticmethod
    def of(
        queries: int,
        keys: int,
        causal: bool,
        device: torch.device,
        key_padding: Bool[Tensor, "b s"] | None = None,
        q_positions: Int[Tensor, "*bq t"] | None = None,
        k_positions: Int[Tensor, "*bk s"] | None = None,
        documents: Int[Tensor, "b s"] | None = None,
    ) -> Positions:
        """Positions of `queries` and `keys` tokens, by default consecutive.

        Key positions count from 0 at the first unpadded token (`key_padding`, True = padding) and
        restart with each document, a run of equal `documents`. Queries are the last T keys. n is
        position + 1 if causal, else the number of unpadded keys of the row or document.
        """
        arguments = (key_padding, q_positions, k_positions, documents)
        if causal and queries <= keys and cacheable() and all(x is None for x in arguments):
            # A slice of a longer cached sequence.
            sequence = _consecutive(max(64, 1 << (keys - 1).bit_length()), device)
            return sequence.select(slice(keys - queries, keys), keys)
        if causal and q_positions is None and queries > keys:
            raise InputError(
                f"causal attention of {queries} queries over {keys} keys needs q_positions: "
                "the queries cannot all be the last ones of the keys"
            )
        shift = keys - queries
        if documents is not None:
            number = number_documents(documents, key_padding)
            real = torch.ones_like(number) if key_padding is None else (~key_padding).long()
            lengths = torch.zeros_like(number).scatter_add_(1, number, real)
            before = (lengths.cumsum(-1) - lengths).gather(1, number)
            key = (real.cumsum(-1) - 1 - before).clamp(min=0)
            visible = lengths.gather(1, number)[:, shift:]
        elif key_padding is not None:
            key = ((~key_padding).cumsum(-1) - 1).clamp(min=0)
            visible = (~key_padding).sum(-1, keepdim=True)
        else:
            key = torch.arange(keys, device=device)
            visible = torch.full((1,), keys, device=device)
        key = key if k_positions is None else k_positions
        query = q_positions
        if query is None:
            query = key[..., shift:] if shift >= 0 else torch.arange(queries, device=device)
        n = (query + 1 if causal else visible).clamp(min=1)
        ordered = q_positions is None and k_positions is None
        regular = ordered and key_padding is None and documents is None
        return Positions(query, key, n, causal, regular, ordered)


@lru_cache(maxsize=64)
def _consecutive(tokens: int, device: torch.device) -> Positions:
    """Causal positions 0 … `tokens` − 1."""
    with torch.inference_mode(False):
        positions = torch.arange(tokens, device=device)
        return Positions(positions, positions, positions + 1, causal=True, regular=True)


def number_documents(
    documents: Int[Tensor, "b s"], key_padding: Bool[Tensor, "b s"] | None = None
) -> Int[Tensor, "b s"]:
    """Number the documents of each row, runs of equal ids, from 0.

    An id that recurs later in a row starts a new document. Padding does not end a run and belongs
    to the document before it. Numbering twice changes nothing.
    """
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    real = index if key_padding is None else torch.where(key_padding, -1, index)
    # The last unpadded token before each token, −1 if there is none.
    previous = pad(real.cummax(-1).values[:, :-1], (1, 0), value=-1)
    differs = documents != documents.gather(1, previous.clamp(min=0))
    return ((real >= 0) & (previous >= 0) & differs).cumsum(-1)
