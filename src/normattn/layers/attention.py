"""Multi-head and grouped-query attention whose score is a value: a function and a layer.

Legend: B batch, H query heads, G key heads, T queries, S keys, D head dimension, E value size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.kernels.inputs import check_shapes
from normattn.kernels.stats import announce
from normattn.layers.cache import KeyValueCache
from normattn.layers.checks import (
    BOOLEAN,
    check_documents,
    check_dropout,
    check_forget,
    check_gate,
    check_input,
    check_mask,
    check_order,
    check_positions,
    check_restarts,
    check_score,
    check_tensor,
)
from normattn.layers.decode import attention_cached
from normattn.layers.gates import (
    forget_projection,
    gate_projection,
    log_gates,
    pair_values,
    sum_gates,
)
from normattn.layers.prepare import find_plan, prepare, without_parameters
from normattn.layers.residual_scores import ResidualLayer, check_residual
from normattn.score import Score, ScoreSpec
from normattn.score.positions import numbered
from normattn.score.spec import as_spec


def attention(
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b g s d"],
    v: Float[Tensor, "b g s e"],
    score: Score | ScoreSpec | str,
    causal: bool = True,
    attn_mask: Tensor | None = None,
    key_padding: Bool[Tensor, "b s"] | None = None,
    query_padding: Bool[Tensor, "b t"] | None = None,
    q_positions: Int[Tensor, "*bq t"] | None = None,
    k_positions: Int[Tensor, "*bk s"] | None = None,
    documents: Int[Tensor, "b s"] | None = None,
    dropout_p: float = 0.0,
    backend: str = "auto",
    residual: ResidualLayer | None = None,
    gate: Float[Tensor, "b t gates"] | None = None,
    forget: Float[Tensor, "b s logits"] | None = None,
) -> Float[Tensor, "b h t e"]:
    """o_i = Σ_j softmax_j(s(i, j)) v_j with the score that `score` specifies.

    Args:
        q: queries (B, H, T, D), not yet normalised, scaled or rotated.
        k: keys (B, G, S, D); G divides H.
        v: values (B, G, S, E).
        score: a `Score` (which holds what is learned), or a specification that learns nothing;
            of these, a graph compiled with fullgraph=True takes a `Score` alone.
        causal: a query sees keys at its own position or before; the queries are the last T of
            the keys unless positions say otherwise.
        attn_mask: broadcastable to (B, H, T, S); boolean (True = seen) or floating (added, −∞ or
            the lowest number of its type hides). Keys that it hides do not count in n.
        key_padding: True where a key is padding; positions then count from the first real token.
        query_padding: True where a query is padding. Only statistics over the queries (BatchNorm,
            InstanceNorm) leave it out; without it all queries are real, whatever the keys are.
        q_positions: 0-based positions (T,) or (B, T).
        k_positions: 0-based positions (S,) or (B, S), in any order. Causal positions that begin
            anew, as of texts packed into one row, are refused without `documents`: a query would
            see keys of the texts after its own. A compiler cannot look, and does not ask.
        documents: the number of each key's document, for a score with `Packed`, which hides keys
            of other documents and counts positions within each. A document is a run of one number:
            where the number comes back later it is another one. Padding ends none.
        dropout_p: probability of dropping an attention weight.
        backend: auto, or one kernel's name; `reference` is float64-capable, the definition, and of
            plain operations: any derivative, torch.func too.
        residual: what the layers below hand on, for a score with `RealFormer`, `ResidualQK` or
            `ResidualQKV`: `residual_layers(spec, layers)[n]` for layer n of a stack.
        gate: for a score with `Gate`, by whose `act` o is multiplied: (B, T, H·E), or
            (B, T, H) per head.
        forget: for a score with `FoX`, the logits of the forgetting gate of each key (B, S, H).
            A compiler cannot look whether given positions go forward, as `FoX` and `Selective`
            need; uncompiled, this is checked.

    A query that sees no key gets 0. Raises `InputError` for shapes that do not fit, scores that
    cannot be used so, and backends that cannot serve the request.
    """
    # Written out: a generator would cost as many calls as all the rest.
    whole = attn_mask is None and key_padding is None and query_padding is None
    whole = whole and q_positions is None and k_positions is None and documents is None
    if whole and residual is None and gate is None and forget is None and dropout_p == 0:
        plan = find_plan(score, q, k, v, causal, backend)
        if plan is not None and plan.tables is not None:
            module = score if isinstance(score, Score) else plan.tables.score
            assert module is not None
            return plan.run_folded(plan.tables, module, q, k, v)
    check_shapes(q, k, v)
    module = score if isinstance(score, Score) else without_parameters(score, q, k)
    spec, (batch, heads, queries, _), keys = module.spec, q.shape, k.shape[2]
    check_score(module, q, k)
    check_mask(attn_mask, (batch, heads, queries, keys))
    check_dropout(dropout_p)
    padding_is = ", True where one is padding"
    check_tensor("key_padding", key_padding, ((batch, keys),), BOOLEAN, padding_is)
    check_tensor("query_padding", query_padding, ((batch, queries),), BOOLEAN, padding_is)
    check_positions("q_positions", q_positions, batch, queries)
    check_positions("k_positions", k_positions, batch, keys)
    check_documents(spec, documents, batch, queries, keys)
    check_residual(spec, residual)
    check_gate(spec, gate, q, v)
    check_forget(spec, forget, q, k)
    if causal and k_positions is not None and documents is None:
        check_restarts("k_positions", k_positions, key_padding)
    if documents is not None:
        documents = numbered(documents, key_padding)
    plan = prepare(
        *(spec, queries, keys, batch, q.device, causal, backend),
        attn_mask=attn_mask,
        key_padding=key_padding,
        q_positions=q_positions,
        k_positions=k_positions,
        documents=documents,
    )
    at = plan.positions
    if q_positions is not None or k_positions is not None:
        check_order(spec, at, documents)
    sums = None
    if forget is not None:
        sums = sum_gates(log_gates(forget, k.shape[1], k.dtype, key_padding), heads)
    announce(module, q, k, query_padding, key_padding, at.query, at.key)
    return plan.run(
        *(module, q, k, pair_values(spec, v, k.shape[-1])),
        residual=residual,
        gate=gate,
        forget_sums=sums,
        query_padding=query_padding,
        dropout=dropout_p,
    )


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
            if self.training and self.dropout > 0:
                raise InputError("a cache is for inference: call .eval() first, dropout is on")
            o = attention_cached(
                *(q, k, v, self.score, cache, key_padding, positions, documents, backend),
                *(residual, gate, forget, attn_mask, causal),
            )
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
        query, key = share_factor(factor, self.kv_heads)
        scale_heads(self.qkv, torch.cat((query, key, torch.ones_like(key))))

    def extra_repr(self) -> str:
        """Name the settings in the printed module."""
        return f"heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}"


def share_factor(
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
