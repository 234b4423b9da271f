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
    """Positions of queries (T,) or (B, T) and keys (S,) or (B, S), and n for each query.

    `n` has the shape of the queries, or (B, 1) where all queries of a row see the same keys, or,
    counted from a mask of each head, (B, H, T). `regular` says that nothing but T, S and causal
    decided the positions, so that tables can be kept; `ordered` that the queries are the last T of
    keys whose positions grow; `masked` that a mask took part in n (`exclude_masked`).
    """

    query: Int[Tensor, "*bq t"]
    key: Int[Tensor, "*bk s"]
    n: Int[Tensor, "*bn u"]
    causal: bool
    regular: bool
    ordered: bool = True
    masked: bool = False

    def select(self, rows: slice, keys: int) -> Positions:
        """Select query rows and the first `keys` keys, of which the rows are the last."""
        if rows == slice(0, self.query.shape[-1]) and keys == self.key.shape[-1]:
            return self
        n = self.n[..., rows] if self.n.shape[-1] == self.query.shape[-1] else self.n
        return replace(self, query=self.query[..., rows], key=self.key[..., :keys], n=n)

    def exclude_masked(self, mask: AttentionMask) -> Positions:
        """Subtract from n the keys that `attn_mask` hides.

        A boolean mask hides where it is False; a floating one where it adds −∞ or the lowest number
        of its type. Only keys are taken off that are visible without it: of the query's document,
        no padding, and, if causal, not after the query. Windows do not change n, nor do chunks, so
        `mask` must not hold those yet.
        """
        x = mask.attn_mask
        if x is None:
            return self
        hidden = ~x if x.dtype == torch.bool else x <= torch.finfo(x.dtype).min
        # A mask of three axes is (H, T, S).
        hidden = hidden[None] if hidden.dim() == 3 else hidden
        every = slice(None)
        others = replace(mask, attn_mask=None, window=None).hidden(every, every)
        if others is not None:
            hidden = hidden & ~others
        shape = (*hidden.shape[:-2], self.query.shape[-1], self.key.shape[-1])
        lost = hidden.expand(shape).sum(-1)
        if lost.dim() == 3 and lost.shape[1] == 1:
            lost = lost[:, 0]
        n = self.n[:, None] if lost.dim() == 3 and self.n.dim() == 2 else self.n
        return replace(self, n=(n - lost).clamp(min=1), masked=True)

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
        """Fill in what is not given.

        Keys count from 0, from the first real token where `key_padding` (True = padding) is
        given, and from the first token of each document, a run of `documents`; queries
        are the last T of the keys. n is position + 1 when causal, else the number of unpadded keys,
        those of the document where there are documents.
        """
        given = (key_padding, q_positions, k_positions, documents)
        if causal and queries <= keys and cacheable() and all(x is None for x in given):
            # Rows of a longer sequence, which is made once.
            whole = _counted(max(64, 1 << (keys - 1).bit_length()), device)
            return whole.select(slice(keys - queries, keys), keys)
        if causal and q_positions is None and queries > keys:
            raise InputError(
                f"causal attention of {queries} queries over {keys} keys needs q_positions: "
                "the queries cannot all be the last ones of the keys"
            )
        shift = keys - queries
        if documents is not None:
            key, visible = _count_in_documents(
                number_documents(documents, key_padding), key_padding
            )
            visible = visible[:, shift:]
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
def _counted(tokens: int, device: torch.device) -> Positions:
    """Positions of so many tokens that see those before them."""
    with torch.inference_mode(False):
        at = torch.arange(tokens, device=device)
        return Positions(at, at, at + 1, causal=True, regular=True)


def number_documents(
    documents: Int[Tensor, "b s"], key_padding: Bool[Tensor, "b s"] | None = None
) -> Int[Tensor, "b s"]:
    """Number the documents of each row from 0 on: runs of equal numbers.

    A number that comes back later in a row is another document. Padding is no token: it ends no
    run, and counts to the one before it. Counting twice changes nothing.
    """
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    real = index if key_padding is None else torch.where(key_padding, -1, index)
    # The last real token before each one, −1 where there is none.
    before = pad(real.cummax(-1).values[:, :-1], (1, 0), value=-1)
    other = documents != documents.gather(1, before.clamp(min=0))
    return ((real >= 0) & (before >= 0) & other).cumsum(-1)


def _count_in_documents(
    number: Int[Tensor, "b s"], key_padding: Bool[Tensor, "b s"] | None
) -> tuple[Int[Tensor, "b s"], Int[Tensor, "b s"]]:
    """Each token's position in its document, and the tokens of that document, without padding."""
    real = torch.ones_like(number) if key_padding is None else (~key_padding).long()
    tokens = torch.zeros_like(number).scatter_add_(1, number, real)
    before = (tokens.cumsum(-1) - tokens).gather(1, number)
    return (real.cumsum(-1) - 1 - before).clamp(min=0), tokens.gather(1, number)
