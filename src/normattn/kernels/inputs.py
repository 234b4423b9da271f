"""The inputs of attention kernels: tensors and a mask, never the name of a method.

Legend: B batch, H query heads, G key heads, T queries, S keys, D score and E value size, n layers,
R distances.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from normattn.errors import InputError
from normattn.kernels.residual_scores import ResidualScores

_ALL = slice(None)


@dataclass(frozen=True)
class AttentionMask:
    """Which keys each query sees, and a floating mask that is added to scores.

    Query i sees key j if all of these hold: j is not padding; a boolean `attn_mask` is True; both
    are in the same document; j ≤ i if `causal`; |i − j| < `window` or j < `sink_tokens`. A floating
    `attn_mask` is added to the score. `query` and `key` are positions. `aligned`: the keys are at 0
    … S − 1 and the queries are the last T of them.
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
        """Select query rows and the first `keys` keys; aligned rows are the last of these."""
        if rows == slice(0, self.query.shape[-1]) and keys == self.key.shape[-1]:
            return self
        return self.block(rows=rows, columns=slice(0, keys))

    def drop_first(self, keys: int) -> AttentionMask:
        """Drop the first keys; positions stay as they are."""
        return self.block(columns=slice(keys, None))

    def block(
        self, batch: slice = _ALL, heads: slice = _ALL, rows: slice = _ALL, columns: slice = _ALL
    ) -> AttentionMask:
        """Select batch rows, query heads, query rows and keys."""

        def take(x: Tensor | None, index: slice) -> Any:
            """Slice (n,) or (B, n); a batch axis of size 1 broadcasts and stays."""
            if x is None:
                return None
            x = x if index == _ALL else x[..., index]
            return x[batch] if x.dim() == 2 and x.shape[0] > 1 else x

        attn_mask = self.attn_mask
        if attn_mask is not None:
            attn_mask = _block(attn_mask, rows, columns)
            if attn_mask.dim() >= 3 and attn_mask.shape[-3] > 1:
                attn_mask = attn_mask[..., heads, :, :]
            if attn_mask.dim() == 4 and attn_mask.shape[0] > 1:
                attn_mask = attn_mask[batch]
        return replace(
            self,
            query=take(self.query, rows),
            key=take(self.key, columns),
            padding=take(self.padding, columns),
            attn_mask=attn_mask,
            query_documents=take(self.query_documents, rows),
            key_documents=take(self.key_documents, columns),
        )

    def distance(self, rows: slice, columns: slice) -> Int[Tensor, "*b t s"]:
        """i − j for a block, (t, s) or (B, 1, t, s)."""
        query, key = self.query[..., rows], self.key[..., columns]
        block = query[..., :, None] - key[..., None, :]
        return block[:, None] if block.dim() == 3 else block

    def position_order(self, score: Float[Tensor, "b h t s"]) -> Int[Tensor, "b h t s"] | None:
        """Indices that sort the columns of `score` by position; None if they are sorted."""
        if self.aligned:
            return None
        order = self.key.argsort(dim=-1, stable=True)
        return (order if order.dim() == 1 else order[:, None, None]).expand(score.shape)

    def hidden(self, rows: slice, columns: slice) -> Bool[Tensor, "..."] | None:
        """True where a key is hidden, broadcastable to (B, H, t, s); None where all are visible."""
        reasons = []
        if self.causal:
            reasons.append(self.distance(rows, columns) < 0)
        if self.padding is not None:
            reasons.append(self.padding[:, None, None, columns])
        if self.window is not None:
            outside = self.distance(rows, columns).abs() >= self.window
            if self.sink_tokens:
                no_sink = self.key[..., columns] >= self.sink_tokens
                outside = outside & (no_sink[:, None, None] if no_sink.dim() == 2 else no_sink)
            reasons.append(outside)
        if self.query_documents is not None and self.key_documents is not None:
            query, key = self.query_documents[:, rows], self.key_documents[:, columns]
            reasons.append((query[:, :, None] != key[:, None, :])[:, None])
        if self.attn_mask is not None and self.attn_mask.dtype == torch.bool:
            reasons.append(~_block(self.attn_mask, rows, columns))
        return reduce(torch.logical_or, reasons) if reasons else None

    def additive(self, rows: slice, columns: slice) -> Float[Tensor, "..."] | None:
        """The block of a floating mask, to be added to scores; None without one."""
        if self.attn_mask is None or self.attn_mask.dtype == torch.bool:
            return None
        return _block(self.attn_mask, rows, columns)


def _block(mask: Tensor, rows: slice, columns: slice) -> Tensor:
    """A block of a mask (…, T, S), whose last two axes may be 1 to broadcast."""
    if mask.shape[-2] != 1:
        mask = mask[..., rows, :]
    return mask if mask.shape[-1] == 1 else mask[..., columns]


@dataclass
class Selection:
    """How much earlier queries selected each key, which is subtracted from its scores.

    F(i, j) = Σ_{l<i} max(0, s_0(l, j)) of head 0's scores, used for every head. No query selects
    its own key or the key at position 0, and a padded query (`padding`) selects nothing. `before`
    (B, S) is F of the first query. A kernel writes F of the query after the last one to `after`.
    Queries must be in the order of their positions.
    """

    before: Float[Tensor, "b s"]
    padding: Bool[Tensor, "b t"] | None = None
    after: Float[Tensor, "b s"] | None = None

    def penalties(
        self, score: Float[Tensor, "b t s"], mask: AttentionMask
    ) -> Float[Tensor, "b t s"]:
        """F of every query, from head 0's scores, which are −∞ where a key is hidden."""
        exempt = (mask.distance(_ALL, _ALL) == 0) | (mask.key == 0)[..., None, None, :]
        exempt = exempt.squeeze(-3)
        if self.padding is not None:
            exempt = exempt | self.padding[..., None]
        selected = score.to(self.before.dtype).relu().masked_fill(exempt, 0.0)
        sums = torch.cat((self.before[:, None], selected), 1).cumsum(1)
        self.after = sums[:, -1]
        return sums[:, :-1]

    def select(self, rows: slice, keys: int) -> Selection:
        """Select the next query rows, and the first `keys` keys."""
        padding = None if self.padding is None else self.padding[:, rows]
        return Selection(self.before[:, :keys], padding)

    def advance(self, rows: Selection) -> Selection:
        """The selection for the queries after `rows`, which a kernel has computed."""
        assert rows.after is not None
        later_keys = self.before[:, rows.after.shape[1] :]
        return Selection(torch.cat((rows.after, later_keys), 1), self.padding)


@dataclass(frozen=True)
class PairBias:
    """A bias of query-key pairs that depends on more than their distance.

    `compute(score, mask, table)` returns b(h, i, j), (..., H, T, S). Where a key is hidden, the
    score is −∞, and b must be finite. `table` holds numbers computed from each query.
    `numbers` counts the temporary numbers per pair, beyond the scores.
    """

    compute: Callable[[Tensor, AttentionMask, Any], Tensor]
    numbers: int
    table: Float[Tensor, "b h t n"] | None = None

    def select(self, rows: slice) -> PairBias:
        """Select query rows."""
        table = self.table
        return self if table is None else replace(self, table=table[:, :, rows])


PairValues = Callable[[Tensor, int, AttentionMask], Tensor]
"""(weights a, size E, mask) → Σ_j a(i, j)·R(i, j), with a vector R of E features for each pair."""
Normaliser = Callable[[Tensor, AttentionMask], Tensor]
"""Whole rows of scores → weights; a score is −∞, and its weight 0, where a key is hidden."""


@dataclass(frozen=True)
class AttentionInputs:
    """The inputs of o_i = Σ_j softmax_j(s(i, j)) v_j over the keys that query i sees.

        s(i, j) = cap·tanh(⟨q_i, k_j⟩/cap) + bias(h, |i − j|)

    Shapes: q (B, H, T, D), k (B, G, S, D), v (B, G, S, E), where G divides H. The output is 0 for a
    query that sees no key.

    Attributes:
        far_q, far_k: replace q and k in the product where i − j ≥ `far_from`.
        near_start: k may hold only the keys from this column on; the others are far for all rows.
        bias: (H, R), a value for each distance 0 … R − 1 that occurs.
        sink: (H,), one more logit in each head's denominator, with value 0.
        residual_scores: sum, or average, ⟨q_i, k_j⟩ over this layer and those below.
        pairs: a bias that depends on both positions.
        pair_values: for R; the output is Σ_j softmax_j(s(i, j)) (v_j + R(i, j)).
        normaliser: replaces softmax. selection: is subtracted from the scores.
    """

    q: Float[Tensor, "b h t d"]
    k: Float[Tensor, "b g near d"]
    v: Float[Tensor, "b g s e"]
    mask: AttentionMask
    far_q: Float[Tensor, "b h t d"] | None = None
    far_k: Float[Tensor, "b g s d"] | None = None
    far_from: int | None = None
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

    @property
    def two_regimes(self) -> bool:
        """Whether distant pairs are scored by far_q and far_k."""
        return self.far_from is not None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors that a gradient may reach, in the order of `TENSOR_FIELDS`."""
        return self.q, self.k, self.v, self.far_q, self.far_k, self.bias, self.sink

    @property
    def settings(self) -> Mapping[str, Any]:
        """All other fields by name, except the residual scores."""
        return {name: getattr(self, name) for name in _SETTING_FIELDS}

    @staticmethod
    def of(settings: Mapping[str, Any], tensors: Sequence[Tensor | None]) -> AttentionInputs:
        """Rebuild the inputs from `settings` and `tensors`."""
        by_name: dict[str, Any] = dict(zip(TENSOR_FIELDS, tensors, strict=True))
        return AttentionInputs(**settings, **by_name)

    def upcast(self) -> AttentionInputs:
        """Convert half-precision tensors to float32, which no score overflows."""
        if self.q.element_size() != 2:
            return self
        tensors = [None if x is None else x.float() for x in self.tensors]
        return AttentionInputs.of(self.settings, tensors)

    def repeat_kv(self) -> AttentionInputs:
        """Repeat keys and values, so that each query head has its own."""
        repeats = self.q.shape[1] // self.k.shape[1]
        if repeats == 1:
            return self
        far_k = None if self.far_k is None else self.far_k.repeat_interleave(repeats, 1)
        k, v = (x.repeat_interleave(repeats, 1) for x in (self.k, self.v))
        return replace(self, k=k, v=v, far_k=far_k)


TENSOR_FIELDS = ("q", "k", "v", "far_q", "far_k", "bias", "sink")
"""The fields that a gradient may reach."""
_SETTING_FIELDS = tuple(
    x.name for x in fields(AttentionInputs) if x.name not in (*TENSOR_FIELDS, "residual_scores")
)

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""The supported dtypes of q, k and v; half precision is accumulated in float32."""


def check_dense(name: str, operand: Any) -> None:
    """Raise `InputError` unless `operand` is a dense tensor that is not on the meta device."""
    if not isinstance(operand, Tensor):
        raise InputError(f"{name} must be a tensor, but it is a {type(operand).__name__}")
    if operand.layout is not torch.strided:
        raise InputError(f"{name} must be a dense tensor, but its layout is {operand.layout}")
    if operand.is_meta:
        raise InputError(f"{name} is on the meta device, where a tensor holds no numbers")


def check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise `InputError` for tensors whose shapes or dtypes do not fit together."""
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
