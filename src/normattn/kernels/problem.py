"""What a kernel is asked: tensors and who may see whom, never the name of a method.

Legend: B batch, H query heads, G key heads, T queries, S keys, D score and E value size, n layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.errors import InputError
from normattn.kernels.selection import Selection
from normattn.kernels.visibility import Visibility


@dataclass(frozen=True)
class Stack:
    """What all layers that share one carry have in common."""

    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return (
            f"batch {self.batch}, {self.heads} query heads, {self.key_heads} key heads, "
            f"{self.queries} queries, {self.keys} keys, {self.dtype}"
        )


@runtime_checkable
class CarriedSum(Protocol):
    """Scores that the layers of one forward pass sum up: `kernels.carry.CarriedScores`.

    `layers` is how many there will be, if that is known; `way` the kernel that sums them.
    """

    mean: bool
    layers: int | None
    way: str | None

    def elsewhere(self, way: str) -> str | None:
        """Why a kernel cannot go on from the layers below; None where it can."""
        ...

    def enter(self, way: str, stack: Stack) -> None:
        """One more layer, from now on counted."""
        ...

    def stored(self, score: Float[Tensor, "b h t s"]) -> Float[Tensor, "b h t s"]:
        """The sum with this layer's scores, known to autograd."""
        ...

    def features(
        self, q: Float[Tensor, "b h t d"], k: Float[Tensor, "b g s d"]
    ) -> tuple[Float[Tensor, "b h t nd"], Float[Tensor, "b g s nd"]]:
        """[q_1 … q_n] and [k_1 … k_n], whose product is the sum."""
        ...


@runtime_checkable
class PairBias(Protocol):
    """A bias of each pair that is no function of its distance alone."""

    @property
    def width(self) -> int:
        """How many numbers a pair takes on the way, beside its score of each head."""
        ...

    def part(self, rows: slice) -> PairBias:
        """The bias of some of the rows."""
        ...

    def values(
        self, score: Float[Tensor, "b h t s"], seen: Visibility
    ) -> Float[Tensor, "*b h t s"]:
        """b(h, i, j) beside these scores, −∞ where a key is hidden; finite there, too."""
        ...


@runtime_checkable
class Normaliser(Protocol):
    """What makes weights of whole rows of scores in place of softmax."""

    def weights(
        self, score: Float[Tensor, "b h t s"], seen: Visibility
    ) -> Float[Tensor, "b h t s"]:
        """The weights of rows; a score is −∞, and its weight 0, where a key is hidden."""
        ...


@dataclass(frozen=True)
class Problem:
    """o_i = Σ_j softmax_j(s(i, j)) v_j over the keys that query i sees; or another `normaliser`.

    s(i, j) = cap·tanh(⟨q_i, k_j⟩/cap) + bias(h, |i − j|), with far_q and far_k in the product where
    i − j ≥ window; without a cap the product itself. A `sink` (H,) is one more logit in the
    denominator of head h, with value 0. q (B, H, T, D), k (B, G, S, D), v (B, G, S, E); G divides
    H. With two regimes k may hold the keys from column `near_start` on only: those before are far
    for every row. bias (H, R) has a value for every distance 0 … R − 1 that occurs; `pairs` add one
    that depends on both positions; a `selection` is subtracted. A query that sees no key gets 0.
    With a `carry` the product is the sum of ⟨q_i, k_j⟩ over this layer and those below, or its
    mean, and this layer joins it.
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
    carry: CarriedSum | None = None
    pairs: PairBias | None = None
    normaliser: Normaliser | None = None
    selection: Selection | None = None

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
        """All the rest by name, but for the carry."""
        return {name: getattr(self, name) for name in _SETTINGS}

    @staticmethod
    def of(settings: Mapping[str, Any], tensors: Sequence[Tensor | None]) -> Problem:
        """The problem of `settings` and `tensors`."""
        learned: dict[str, Any] = dict(zip(LEARNED, tensors, strict=True))
        return Problem(**settings, **learned)

    @property
    def stack(self) -> Stack:
        """What the layers of a stack must share."""
        q, k = self.q, self.k
        return Stack(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.dtype)

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


LEARNED = ("q", "k", "v", "far_q", "far_k", "bias", "sink")
"""The tensors of a problem that a gradient may reach."""
_SETTINGS = tuple(x.name for x in fields(Problem) if x.name not in (*LEARNED, "carry"))


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
    if q.dtype not in DTYPES:
        raise InputError(
            f"q, k and v must be float32, float64, bfloat16 or float16, but they are {q.dtype}"
        )
