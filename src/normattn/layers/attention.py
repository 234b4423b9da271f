"""Multi-head and grouped-query attention whose score is a value."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.layers.attend import attention
from normattn.layers.attend_cached import attention_cached, refuse_beside_cache
from normattn.layers.cache import KeyValueCache
from normattn.layers.gates import forget_projection, gate_projection
from normattn.layers.residual_scores import ResidualLayer
from normattn.score import Score, ScoreSpec
from normattn.score.spec import as_spec

Operands = tuple[
    Float[Tensor, "b h t d"], Float[Tensor, "b g t d"], Float[Tensor, "b g t e"], Tensor | None
]
"""q, k, v, and what else of x a layer's output needs."""


class SelfAttention(nn.Module, ABC):
    """A layer whose tokens attend to each other by a score: all at once, or new ones with a cache.

    `gate` and `forget` are the projections of a score with `Gate` and with `FoX`.
    """

    dim: int
    score: Score
    gate: nn.Linear | None
    forget: nn.Linear | None
    dropout: float

    @abstractmethod
    def operands(self, x: Float[Tensor, "b t dim"]) -> Operands:
        """What attention takes, made of x, and what else of it the output needs."""

    @abstractmethod
    def output(
        self, o: Float[Tensor, "b h t e"], beside: Tensor | None
    ) -> Float[Tensor, "b t dim"]:
        """What the layer makes of o = softmax(s(q, k)) v and of what stood beside q, k and v."""

    def forward(
        self,
        x: Float[Tensor, "b t dim"],
        *,
        causal: bool = True,
        attn_mask: Tensor | None = None,
        key_padding: Bool[Tensor, "b s"] | None = None,
        positions: Int[Tensor, "b s"] | Int[Tensor, " s"] | None = None,
        documents: Int[Tensor, "b s"] | None = None,
        cache: KeyValueCache | None = None,
        residual: ResidualLayer | None = None,
        query_padding: Bool[Tensor, "b t"] | None = None,
        backend: str = "auto",
    ) -> Float[Tensor, "b t dim"]:
        """Let every position of `x` attend; `key_padding` is True where a position is padding.

        With a `cache`, which this call extends, `x` are new tokens that see those read before as
        well; `key_padding`, `positions` and `documents` are then those of all S tokens, and
        `attn_mask` says what the new ones see of all; with `causal=False` it may let them see each
        other.
        `residual` is what the layers below hand on, where the score asks for it. `query_padding`,
        `key_padding` where it is not given, says which rows no statistics should count; a causal
        layer whose padding stands on the right needs nothing else of it. `backend` names the
        kernel, as in `attention`.
        """
        check_input("x", x, self.dim)
        q, k, v, beside = self.operands(x)
        gate = None if self.gate is None else self.gate(x)
        forget = None if self.forget is None else self.forget(x)
        if cache is not None:
            refuse_beside_cache(causal, attn_mask, self.training and self.dropout > 0)
            told = (key_padding, positions, documents, backend, residual, gate, forget)
            o = attention_cached(q, k, v, self.score, cache, *told, attn_mask, causal)
            return self.output(o, beside)
        o = attention(
            q,
            k,
            v,
            self.score,
            causal=causal,
            attn_mask=attn_mask,
            key_padding=key_padding,
            query_padding=key_padding if query_padding is None else query_padding,
            q_positions=positions,
            k_positions=positions,
            documents=documents,
            dropout_p=self.dropout if self.training else 0.0,
            residual=residual,
            backend=backend,
            gate=gate,
            forget=forget,
        )
        return self.output(o, beside)


class Attention(SelfAttention):
    """Attention with `heads` query heads and `kv_heads` key and value heads (default: as many).

    x W_qkv → q, k, v in one matmul; o = softmax(s(q, k)) v with the score s of `score`; o W_out.
    Shapes: (B, T, dim) → (B, T, dim). `head_dim` defaults to dim / heads. `score` is a
    `ScoreSpec` or its name; what it learns lives in `.score`. The weight of `qkv` holds the rows
    of q, then k, then v, each head by head. `bias`: both projections have one; `qkv_bias`: that of
    q, k and v alone (Qwen2). `dropout` is the probability with which an attention
    weight is dropped in training. `gate` is the projection of a score with `Gate`. Raises
    `InputError` for sizes that do not divide.
    Source: arXiv 1706.03762; grouped queries: arXiv 2305.13245.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int | None = None,
        score: ScoreSpec | str = "Baseline",
        *,
        head_dim: int | None = None,
        bias: bool = False,
        qkv_bias: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.heads = heads
        self.kv_heads = heads if kv_heads is None else kv_heads
        self.head_dim = checked_head_dim(dim, heads, self.kv_heads, head_dim)
        self.dropout = checked_probability(dropout)
        spec = as_spec(score)
        self.score = Score(spec, heads=heads, head_dim=self.head_dim, kv_heads=self.kv_heads)
        width = (heads + 2 * self.kv_heads) * self.head_dim
        self.qkv = nn.Linear(dim, width, bias=bias or qkv_bias)
        self.gate = gate_projection(spec, dim, heads, self.head_dim)
        self.forget = forget_projection(spec, dim, heads)
        self.out = nn.Linear(heads * self.head_dim, dim, bias=bias)

    def operands(self, x: Float[Tensor, "b t dim"]) -> Operands:
        """q, k and v; nothing beside them."""
        heads_BTHD = self.qkv(x).view(*x.shape[:2], -1, self.head_dim)
        heads_BHTD = heads_BTHD.transpose(1, 2)
        keys = self.heads + self.kv_heads
        q, k, v = (
            heads_BHTD[:, : self.heads],
            heads_BHTD[:, self.heads : keys],
            heads_BHTD[:, keys:],
        )
        return q, k, v, None

    def output(
        self, o: Float[Tensor, "b h t d"], beside: Tensor | None
    ) -> Float[Tensor, "b t dim"]:
        """o W_out, heads side by side."""
        y: Tensor = self.out(o.transpose(1, 2).flatten(2))
        return y

    @torch.no_grad()
    def shrink(self, factor: Float[Tensor, " h"]) -> None:
        """Multiply the logits q·k of each query head by its factor, by the weights of q and k."""
        query, key = shared_between(factor, self.kv_heads)
        scale_heads(self.qkv, torch.cat((query, key, torch.ones_like(key))))

    def extra_repr(self) -> str:
        """Name the settings in the printed module."""
        return f"heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}"


def check_input(name: str, x: Tensor, width: int) -> None:
    """Refuse what is no (B, T, width)."""
    if x.dim() != 3 or x.shape[-1] != width:
        raise InputError(
            f"{name} must be (batch, tokens, width) with a width of {width}, but it is "
            f"{tuple(x.shape)}"
        )


def shared_between(
    factor: Float[Tensor, " h"], kv_heads: int
) -> tuple[Float[Tensor, " h"], Float[Tensor, " g"]]:
    """Factors of q and k whose products are `factor`: a key head takes the root of its smallest."""
    key = factor.reshape(kv_heads, -1).amin(1).sqrt()
    return factor / key.repeat_interleave(len(factor) // kv_heads), key


def scale_heads(projection: nn.Linear, factor: Float[Tensor, " n"]) -> None:
    """Multiply the output of each of n heads, one after another, by its factor, in place."""
    rows = factor.repeat_interleave(projection.out_features // len(factor))
    projection.weight.mul_(rows[:, None])
    if projection.bias is not None:
        projection.bias.mul_(rows)


def checked_head_dim(dim: int, heads: int, kv_heads: int, head_dim: int | None) -> int:
    """The width of one head, after checking that all sizes fit."""
    if dim < 1 or heads < 1 or kv_heads < 1:
        raise InputError(
            f"attention of width {dim} with {heads} heads and {kv_heads} key heads was asked for; "
            "each must be at least 1"
        )
    if heads % kv_heads:
        raise InputError(f"{heads} query heads cannot share {kv_heads} key heads evenly")
    if head_dim is None and dim % heads:
        raise InputError(
            f"a width of {dim} does not divide into {heads} heads; "
            "give head_dim, or choose a number of heads that divides the width"
        )
    size = dim // heads if head_dim is None else head_dim
    if size < 1:
        raise InputError(f"head_dim is {size}; it must be at least 1")
    return size


def checked_probability(dropout: float) -> float:
    """The probability itself, after checking that it is one."""
    if not 0 <= dropout < 1:
        raise InputError(f"dropout is {dropout}; it must be at least 0 and below 1")
    return dropout
