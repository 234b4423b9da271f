"""What a kernel is asked: tensors and who may see whom, never the name of a method.

Legend: B batch, H query heads, G key heads, T queries, S keys, D score size, E value size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from normattn.errors import InputError
from normattn.kernels.carry import CarriedScores, Stack


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


@dataclass(frozen=True)
class Problem:
    """o_i = Σ_j softmax_j(s(i, j)) v_j over the keys that query i sees.

    s(i, j) = cap·tanh(⟨q_i, k_j⟩/cap) + bias(h, |i − j|), with far_q and far_k in the product where
    i − j ≥ window; without a cap the product itself. A `sink` (H,) is one more logit in the
    denominator of head h, with value 0. q (B, H, T, D), k (B, G, S, D), v (B, G, S, E); G divides
    H. With two regimes k may hold the keys from column `near_start` on only: those before are far
    for every row. bias (H, R) has a value for every distance 0 … R − 1 that occurs. A query that
    sees no key gets 0. With a `carry` the product is the sum of ⟨q_i, k_j⟩ over this layer and
    those below, or its mean, and this layer joins the carry.
    """

    q: Float[Tensor, "b h t d"]
    k: Float[Tensor, "b g near d"]
    v: Float[Tensor, "b g s e"]
    visibility: Visibility
    far_q: Float[Tensor, "b h t d"] | None = None
    far_k: Float[Tensor, "b g s d"] | None = None
    window: int | None = None
    dropout: float = 0.0
    bias: Float[Tensor, "h r"] | None = None
    sink: Float[Tensor, " h"] | None = None
    cap: float | None = None
    near_start: int = 0
    carry: CarriedScores | None = None

    @property
    def two_regimes(self) -> bool:
        """Whether distant pairs are scored by the far queries and keys."""
        return self.window is not None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What a gradient may reach: q, k, v, far_q, far_k, bias and sink."""
        return self.q, self.k, self.v, self.far_q, self.far_k, self.bias, self.sink

    @property
    def settings(self) -> Settings:
        """All the rest, but for the carry."""
        return Settings(self.visibility, self.window, self.dropout, self.cap, self.near_start)

    def expanded(self) -> Problem:
        """The same problem with one key head per query head."""
        groups = self.q.shape[1] // self.k.shape[1]
        if groups == 1:
            return self
        far_k = self.far_k
        return replace(
            self,
            k=self.k.repeat_interleave(groups, 1),
            v=self.v.repeat_interleave(groups, 1),
            far_k=None if far_k is None else far_k.repeat_interleave(groups, 1),
        )


class Settings(NamedTuple):
    """A problem without the tensors that a gradient may reach."""

    visibility: Visibility
    window: int | None
    dropout: float
    cap: float | None
    near_start: int

    def problem(self, tensors: Sequence[Tensor | None]) -> Problem:
        """The problem with `Problem.tensors`."""
        q, k, v, far_q, far_k, bias, sink = tensors
        assert q is not None
        assert k is not None
        assert v is not None
        return Problem(
            *(q, k, v, self.visibility, far_q, far_k, self.window, self.dropout, bias, sink),
            *(self.cap, self.near_start),
        )


def stack_of(problem: Problem) -> Stack:
    """What the layers of a stack must share."""
    q, k = problem.q, problem.k
    return Stack(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.dtype)


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
    if k.shape[1] != v.shape[1] or k.shape[2] != v.shape[2]:
        raise InputError(f"k and v must have the same heads and tokens, but they are {shapes}")
    if q.shape[-1] != k.shape[-1]:
        raise InputError(f"q and k must have the same size, but they are {shapes}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise InputError(f"the query heads must be a multiple of the key heads: {shapes}")
    if len({q.dtype, k.dtype, v.dtype}) != 1:
        raise InputError(
            f"q, k and v must share a dtype, but they are {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if not q.is_floating_point():
        raise InputError(f"q, k and v must be of a floating dtype, but they are {q.dtype}")
