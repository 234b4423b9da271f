"""What attention kernels compute with: tensors and a mask, never the name of a method.

Legend: B batch, H query heads, G key heads, T queries, S keys, D score and E value size, n layers,
R distances.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from normattn.errors import InputError
from normattn.kernels.residual_scores import ResidualScores, Stack

_EVERY = slice(None)


@dataclass(frozen=True)
class AttentionMask:
    """Which keys each query sees, and what is added to a score.

    Query i sees key j if all of these hold: j is no padding; a boolean `attn_mask` is True; both
    are in the same document; j ≤ i if `causal`; |i − j| < `window` or j < `sink_tokens`. A floating
    `attn_mask` is added to the score. `query` and `key` are positions. `aligned`: the keys are at
    0 … S − 1 and the queries are the last T of them.
    """

    causal: bool
    query: Int[Tensor, "*bq t"]
    key: Int[Tensor, "*bk s"]
    aligned: bool
    padding: Bool[Tensor, "b s"] | None = None
    attn_mask: Tensor | None = None
    window: int | None = None
    sink_tokens: int = 0
    query_documents: Int[Tensor, "b t"] | None = None
    key_documents: Int[Tensor, "b s"] | None = None

    @property
    def only_causal(self) -> bool:
        """Whether aligned causality alone hides keys, or nothing does."""
        return self.window is None and self.only_causal_or_window

    @property
    def only_causal_or_window(self) -> bool:
        """Whether aligned causality and the window alone hide keys: the same in every batch row."""
        unmasked = self.padding is None and self.attn_mask is None and self.query_documents is None
        return unmasked and (self.aligned or not (self.causal or self.window is not None))

    def select(self, rows: slice, keys: int) -> AttentionMask:
        """Select query rows and the first `keys` keys: if aligned, the rows are the last."""
        if rows == slice(0, self.query.shape[-1]) and keys == self.key.shape[-1]:
            return self
        return self._cut(rows=rows, columns=slice(0, keys))

    def drop_first(self, keys: int) -> AttentionMask:
        """Drop the first keys; positions stay as they are."""
        return self._cut(columns=slice(keys, None))

    def select_heads(self, batch: slice, heads: slice) -> AttentionMask:
        """Select batch rows and query heads."""
        return self._cut(batch, heads)

    def _cut(
        self,
        batch: slice = _EVERY,
        heads: slice = _EVERY,
        rows: slice = _EVERY,
        columns: slice = _EVERY,
    ) -> AttentionMask:
        def cut(x: Tensor | None, along: slice) -> Any:
            """Of (n,) or (B, n); an axis of size 1 is broadcast."""
            if x is None:
                return None
            x = x if along == _EVERY else x[..., along]
            return x[batch] if x.dim() == 2 and x.shape[0] > 1 else x

        mask = self.attn_mask
        if mask is not None:
            mask = _block(mask, rows, columns)
            if mask.dim() >= 3 and mask.shape[-3] > 1:
                mask = mask[..., heads, :, :]
            if mask.dim() == 4 and mask.shape[0] > 1:
                mask = mask[batch]
        return replace(
            self,
            query=cut(self.query, rows),
            key=cut(self.key, columns),
            padding=cut(self.padding, columns),
            attn_mask=mask,
            query_documents=cut(self.query_documents, rows),
            key_documents=cut(self.key_documents, columns),
        )

    def distance(self, rows: slice, columns: slice) -> Int[Tensor, "*b t s"]:
        """i − j for a block, (t, s) or (B, 1, t, s)."""
        query, key = self.query[..., rows], self.key[..., columns]
        block = query[..., :, None] - key[..., None, :]
        return block[:, None] if block.dim() == 3 else block

    def position_order(self, score: Float[Tensor, "b h t s"]) -> Int[Tensor, "b h t s"] | None:
        """The columns of `score` in the order of positions; None where they are in it already."""
        if self.aligned:
            return None
        order = self.key.argsort(dim=-1, stable=True)
        return (order if order.dim() == 1 else order[:, None, None]).expand(score.shape)

    def hidden(self, rows: slice, columns: slice) -> Bool[Tensor, "..."] | None:
        """True where a key is hidden, broadcastable to (B, H, t, s); None where all are."""
        parts = []
        if self.causal:
            parts.append(self.distance(rows, columns) < 0)
        if self.padding is not None:
            parts.append(self.padding[:, None, None, columns])
        if self.window is not None:
            beyond = self.distance(rows, columns).abs() >= self.window
            if self.sink_tokens:
                key = self.key[..., columns] >= self.sink_tokens
                beyond = beyond & (key[:, None, None] if key.dim() == 2 else key)
            parts.append(beyond)
        if self.query_documents is not None and self.key_documents is not None:
            query, key = self.query_documents[:, rows], self.key_documents[:, columns]
            parts.append((query[:, :, None] != key[:, None, :])[:, None])
        if self.attn_mask is not None and self.attn_mask.dtype == torch.bool:
            parts.append(~_block(self.attn_mask, rows, columns))
        return reduce(torch.logical_or, parts) if parts else None

    def additive(self, rows: slice, columns: slice) -> Float[Tensor, "..."] | None:
        """What the floating mask adds to a block of scores."""
        if self.attn_mask is None or self.attn_mask.dtype == torch.bool:
            return None
        return _block(self.attn_mask, rows, columns)


def _block(mask: Tensor, rows: slice, columns: slice) -> Tensor:
    """The block of a mask whose last two axes may be 1 to be broadcast."""
    if mask.shape[-2] != 1:
        mask = mask[..., rows, :]
    return mask if mask.shape[-1] == 1 else mask[..., columns]


@dataclass
class Selection:
    """What earlier queries took from a key, to be subtracted from its scores.

    F(i, j) = Σ_{l<i} max(0, s_0(l, j)) of head 0's scores, for the scores of every head. No query
    selects its own key or one at position 0, and a padded query, one of `padding`, none. `before`
    (B, S) is F of the first query; a kernel writes that of the query after the last one to `after`.
    Queries must be in the order of their positions.
    """

    before: Float[Tensor, "b s"]
    padding: Bool[Tensor, "b t"] | None = None
    after: Float[Tensor, "b s"] | None = None

    def taken(self, score: Float[Tensor, "b t s"], mask: AttentionMask) -> Float[Tensor, "b t s"]:
        """F of every query, of head 0's scores, which are −∞ where a key is hidden."""
        spared = (mask.distance(_EVERY, _EVERY) == 0) | (mask.key == 0)[..., None, None, :]
        spared = spared.squeeze(-3)
        if self.padding is not None:
            spared = spared | self.padding[..., None]
        chosen = score.to(self.before.dtype).relu().masked_fill(spared, 0.0)
        sums = torch.cat((self.before[:, None], chosen), 1).cumsum(1)
        self.after = sums[:, -1]
        return sums[:, :-1]

    def part(self, rows: slice, keys: int) -> Selection:
        """The same for some of the queries, the next ones, and the first `keys` keys."""
        padding = None if self.padding is None else self.padding[:, rows]
        return Selection(self.before[:, :keys], padding)

    def behind(self, part: Selection) -> Selection:
        """The same for the queries after those of `part`."""
        assert part.after is not None
        rest = self.before[:, part.after.shape[1] :]
        return Selection(torch.cat((part.after, rest), 1), self.padding)


@dataclass(frozen=True)
class PairBias:
    """A bias of each pair that is no function of its distance alone.

    `compute(score, mask, table)` gives b(h, i, j), (..., H, T, S), beside scores that are −∞ where
    a key is hidden; it must be finite there, too. `table` holds what the bias reads of each query.
    A pair takes `width` numbers on the way, beside its score of each head.
    """

    compute: Callable[[Tensor, AttentionMask, Any], Tensor]
    width: int
    table: Float[Tensor, "b h t n"] | None = None

    def part(self, rows: slice) -> PairBias:
        """The bias of some of the queries."""
        table = self.table
        return self if table is None else replace(self, table=table[:, :, rows])

    def values(
        self, score: Float[Tensor, "b h t s"], mask: AttentionMask
    ) -> Float[Tensor, "*b h t s"]:
        """b(h, i, j) of every pair."""
        return self.compute(score, mask, self.table)


@runtime_checkable
class PairValues(Protocol):
    """What is read beside the value of each pair, by the positions of both."""

    def read(
        self, weight: Float[Tensor, "b h t s"], size: int, mask: AttentionMask
    ) -> Float[Tensor, "b h t e"]:
        """Σ_j a(i, j)·R(i, j) for weights a and R of `size` features."""
        ...


@runtime_checkable
class Normaliser(Protocol):
    """What makes weights of whole rows of scores in place of softmax."""

    def weights(
        self, score: Float[Tensor, "b h t s"], mask: AttentionMask
    ) -> Float[Tensor, "b h t s"]:
        """The weights of rows; a score is −∞, and its weight 0, where a key is hidden."""
        ...


@dataclass(frozen=True)
class AttentionInputs:
    """o_i = Σ_j softmax_j(s(i, j)) v_j over the keys that query i sees; or another `normaliser`.

    s(i, j) = cap·tanh(⟨q_i, k_j⟩/cap) + bias(h, |i − j|), with far_q and far_k in the product where
    i − j ≥ window; without a cap the product itself. A `sink` (H,) is one more logit in the
    denominator of head h, with value 0. q (B, H, T, D), k (B, G, S, D), v (B, G, S, E); G divides
    H. With two regimes k may hold the keys from column `near_start` on only: those before are far
    for every row. bias (H, R) has a value for every distance 0 … R − 1 that occurs; `pairs` add one
    that depends on both positions; a `selection` is subtracted. With `pair_values` R the output is
    Σ_j softmax_j(s(i, j)) (v_j + R(i, j)). A query that sees no key gets 0.
    With `residual_scores` the product is the sum, or the mean, of ⟨q_i, k_j⟩ over this layer and
    those below. `finite`: all queries and keys are known to be.
    """

    q: Float[Tensor, "b h t d"]
    k: Float[Tensor, "b g near d"]
    v: Float[Tensor, "b g s e"]
    mask: AttentionMask
    far_q: Float[Tensor, "b h t d"] | None = None
    far_k: Float[Tensor, "b g s d"] | None = None
    window: int | None = None
    dropout: float = 0.0
    bias: Float[Tensor, "h r"] | None = None
    sink: Float[Tensor, " h"] | None = None
    cap: float | None = None
    near_start: int = 0
    residual_scores: ResidualScores | None = None
    pairs: PairBias | None = None
    pair_values: PairValues | None = None
    normaliser: Normaliser | None = None
    selection: Selection | None = None
    finite: bool = False

    @property
    def two_regimes(self) -> bool:
        """Whether distant pairs are scored by the far queries and keys."""
        return self.window is not None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What a gradient may reach, in the order of `LEARNED`."""
        return self.q, self.k, self.v, self.far_q, self.far_k, self.bias, self.sink

    @property
    def settings(self) -> Mapping[str, Any]:
        """All the rest by name, but for residual scores."""
        return {name: getattr(self, name) for name in _SETTINGS}

    @staticmethod
    def of(settings: Mapping[str, Any], tensors: Sequence[Tensor | None]) -> AttentionInputs:
        """The inputs of `settings` and `tensors`."""
        learned: dict[str, Any] = dict(zip(LEARNED, tensors, strict=True))
        return AttentionInputs(**settings, **learned)

    @property
    def stack(self) -> Stack:
        """What the layers of a stack must share."""
        q, k = self.q, self.k
        return Stack(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.dtype)

    def widened(self) -> AttentionInputs:
        """The same inputs with half-precision tensors in float32, which no score overflows."""
        if self.q.element_size() != 2:
            return self
        wide = [None if x is None else x.float() for x in self.tensors]
        return replace(
            AttentionInputs.of(self.settings, wide), residual_scores=self.residual_scores
        )

    def expanded(self) -> AttentionInputs:
        """The same inputs with one key head per query head."""
        groups = self.q.shape[1] // self.k.shape[1]
        if groups == 1:
            return self
        sides = {name: getattr(self, name) for name in ("k", "v", "far_k")}
        repeated = {
            name: x.repeat_interleave(groups, 1) for name, x in sides.items() if x is not None
        }
        return replace(self, **repeated)


LEARNED = ("q", "k", "v", "far_q", "far_k", "bias", "sink")
"""The tensors that a gradient may reach."""
_SETTINGS = tuple(
    x.name for x in fields(AttentionInputs) if x.name not in (*LEARNED, "residual_scores")
)


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""What scores are computed of; half precision is accumulated in float32."""


def check_dense(name: str, operand: Any) -> None:
    """Refuse what is no tensor, and a tensor without numbers of its own: sparse, or on `meta`."""
    if not isinstance(operand, Tensor):
        raise InputError(f"{name} must be a tensor, but it is a {type(operand).__name__}")
    if operand.layout is not torch.strided:
        raise InputError(f"{name} must be a dense tensor, but its layout is {operand.layout}")
    if operand.is_meta:
        raise InputError(f"{name} is on the meta device, where a tensor holds no numbers")


def check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse tensors that do not belong together, with their shapes."""
    for name, operand in (("q", q), ("k", k), ("v", v)):
        check_dense(name, operand)
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise InputError(f"q, k and v must be (batch, heads, tokens, size), but they are {shapes}")
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise InputError(f"q, k and v must have the same batch size, but they are {shapes}")
    if k.shape[1:3] != v.shape[1:3]:
        raise InputError(f"k and v must have the same heads and tokens, but they are {shapes}")
    if q.shape[-1] != k.shape[-1]:
        raise InputError(f"q and k must have the same size, but they are {shapes}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise InputError(f"the query heads must be a multiple of the key heads: {shapes}")
    dtypes = f"{q.dtype}, {k.dtype}, {v.dtype}"
    if len({q.dtype, k.dtype, v.dtype}) != 1:
        raise InputError(f"q, k and v must share a dtype, but they are {dtypes}")
    if q.dtype not in DTYPES:
        raise InputError(
            f"q, k and v must be float32, float64, bfloat16 or float16, but they are {q.dtype}"
        )
