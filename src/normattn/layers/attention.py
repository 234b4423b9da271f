"""Multi-head and grouped-query attention with any score: `attention` and the layers that call it.

`layers.plan` decides how a call runs.

Legend: B batch, H query heads, G key heads, T queries, S keys, D head dimension, E value size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.kernels.inputs import check_shapes
from normattn.layers.cache import KeyValueCache
from normattn.layers.checks import (
    AttentionArguments,
    check_input,
    checked_head_dim,
    checked_probability,
)
from normattn.layers.gates import gate_projections, shrink_heads
from normattn.layers.plan import prepare
from normattn.layers.residual_scores import ResidualLayer
from normattn.score import Score, ScoreSpec
from normattn.score.spec import as_spec


@overload
def attention(
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b g s d"],
    v: Float[Tensor, "b g s e"],
    score: Score | ScoreSpec | str,
    causal: bool = True,
    attn_mask: Tensor | None = None,
    key_padding: Bool[Tensor, "b keys"] | None = None,
    query_padding: Bool[Tensor, "b t"] | None = None,
    q_positions: Int[Tensor, "*bq t"] | None = None,
    k_positions: Int[Tensor, "*bk keys"] | None = None,
    documents: Int[Tensor, "b keys"] | None = None,
    dropout_p: float = 0.0,
    backend: str = "auto",
    residual: ResidualLayer | None = None,
    gate: Float[Tensor, "b t gates"] | None = None,
    forget: Float[Tensor, "b s logits"] | None = None,
    return_lse: Literal[False] = False,
    cache: KeyValueCache | None = None,
) -> Float[Tensor, "b outputs t e"]: ...


@overload
def attention(
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b g s d"],
    v: Float[Tensor, "b g s e"],
    score: Score | ScoreSpec | str,
    causal: bool = True,
    *,
    return_lse: Literal[True],
    **options: Any,
) -> tuple[Float[Tensor, "b outputs t e"], Float[Tensor, "b h t"]]: ...


def attention(  # type: ignore[misc]  # the second overload leaves the other arguments open
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b g s d"],
    v: Float[Tensor, "b g s e"],
    score: Score | ScoreSpec | str,
    causal: bool = True,
    attn_mask: Tensor | None = None,
    key_padding: Bool[Tensor, "b keys"] | None = None,
    query_padding: Bool[Tensor, "b t"] | None = None,
    q_positions: Int[Tensor, "*bq t"] | None = None,
    k_positions: Int[Tensor, "*bk keys"] | None = None,
    documents: Int[Tensor, "b keys"] | None = None,
    dropout_p: float = 0.0,
    backend: str = "auto",
    residual: ResidualLayer | None = None,
    gate: Float[Tensor, "b t gates"] | None = None,
    forget: Float[Tensor, "b s logits"] | None = None,
    return_lse: bool = False,
    cache: KeyValueCache | None = None,
) -> Float[Tensor, "b outputs t e"] | tuple[Float[Tensor, "b outputs t e"], Float[Tensor, "b h t"]]:
    """o_i = Σ_j softmax_j(s(i, j)) v_j with the score that `score` specifies.

    Args:
        q: queries (B, H, T, D), not yet normalised, scaled or rotated.
        k: keys (B, G, S, D); G divides H.
        v: values (B, G, S, E).
        score: a `Score` (which holds learned parameters), or a specification without any;
            a graph compiled with fullgraph=True takes only a `Score`.
        causal: a query sees keys at its own position or before; the queries are the last T of
            the keys unless positions say otherwise.
        attn_mask: broadcastable to (B, H, T, S); boolean (True = seen) or floating (added, −∞ or
            the lowest number of its type hides). Keys that it hides do not count in n.
        key_padding: True where a key is padding; positions then count from the first real token.
        query_padding: True where a query is padding. Only statistics over the queries (BatchNorm,
            InstanceNorm) leave it out; without it all queries are real, whatever the keys are.
        q_positions: 0-based positions (T,) or (B, T).
        k_positions: 0-based positions (S,) or (B, S), in any order. Causal positions that restart,
            as for texts packed into one row, raise an error without `documents`, because a query
            would see keys of later texts. Compiled code does not check this.
        documents: the number of each key's document, for a score with `Packed`, which hides keys
            of other documents and counts positions within each. A document is a run of one number;
            the same number later in the row is another document. Padding does not end a document.
        dropout_p: probability of dropping an attention weight.
        backend: auto, or the name of a kernel. `reference` is the definition in plain operations,
            for any derivative and torch.func.
        residual: the state that layer n shares with those below, for a score with `RealFormer`,
            `ResidualQK`, `ResidualQKV` or `ValueResidual`: `residual_layers(spec, layers)[n]`.
        gate: for a score with `Gate`, the logits whose `act` multiplies o, (B, T, H·E), or
            (B, T, H) per head; with `DifferentialV2` those of λ of each output, (B, T, H/2).
        forget: for a score with `FoX`, the logits of the forget gate of each key in k (B, S, H).
            `FoX`, `Selective` and `XSA` need positions that do not decrease; this is not checked in
            compiled code or with a cache.
        return_lse: return o and ℓ (B, H, T), where ℓ_i = ln Σ_j exp s(i, j) over the keys that
            query i sees and a learned sink. ℓ is in float32 or wider, differentiable, and −∞
            where nothing is seen. `normattn.kernels.merge_by_lse` merges two shards of keys.
        cache: keys and values of earlier tokens, to which k and v are added; the result is the last
            rows of attention over all of them. `key_padding` (left only), `k_positions` and
            `documents` are then those of all S tokens, `attn_mask` what the new ones see of all;
            with `causal=False` the mask may let new tokens see each other both ways, as in a prefix
            or an image.

    A query that sees no key gets 0. Raises `InputError` for shapes that do not fit, scores and
    backends that do not support the call, a full cache, and a cache that another score filled.
    """
    if isinstance(score, Score):
        module = score
    else:
        make: Callable[..., Score] = _cached_score
        if torch.compiler.is_compiling():
            # A graph cannot make modules. With fullgraph=True torch's error shows the next line.
            make = torch.compiler.disable(make)  # type: ignore[no-untyped-call] # pass a Score
        module = make(score, q, k, v)
    args = AttentionArguments(
        *(causal, backend, attn_mask, key_padding, query_padding, q_positions, k_positions),
        *(documents, dropout_p, residual, gate, forget, return_lse),
    )
    return prepare(module, q, k, v, args, cache).run(module, q, k, v, args, cache)


_SCORES: dict[tuple[object, ...], tuple[object, Score]] = {}


def _cached_score(score: ScoreSpec | str, q: Tensor, k: Tensor, v: Tensor) -> Score:
    """The `Score` of a specification that learns nothing, from the cache."""
    try:
        # The identity of a specification: hashing it would take as long as everything else.
        name = score if isinstance(score, str) else id(score)
        key = name, q.shape[1], q.shape[-1], k.shape[1]
        if (entry := _SCORES.get(key)) is not None:
            return entry[1]
    except (AttributeError, IndexError):
        pass  # not tensors with heads: the next line raises the error
    check_shapes(q, k, v)
    module = Score(as_spec(score), q.shape[1], q.shape[-1], k.shape[1])
    learned = [name for name, _ in module.named_parameters()]
    if learned or any(True for _ in module.buffers()):
        raise InputError(
            f"{module.spec.name} learns {', '.join(learned) or 'running statistics'}: make a "
            "Score(spec, heads=…, head_dim=…) and pass that"
        )
    if len(_SCORES) >= 64:
        _SCORES.clear()
    # The entry keeps the specification alive, so that no other one gets its id.
    _SCORES[key] = score, module
    return module


Operands = tuple[
    Float[Tensor, "b h t d"], Float[Tensor, "b g t d"], Float[Tensor, "b g t e"], Tensor | None
]
"""q, k, v, and u of a gated attention unit."""


class SelfAttention(nn.Module, ABC):
    """A self-attention layer: projections to q, k and v, `attention`, and an output projection.

    `gate` and `forget` are the projections for a score with a gate and with `FoX`.
    """

    dim: int
    score: Score
    gate: nn.Linear | None
    forget: nn.Linear | None
    dropout: float

    @abstractmethod
    def operands(self, x: Float[Tensor, "b t dim"]) -> Operands:
        """Project x to q, k, v, and u of a gated attention unit."""

    @abstractmethod
    def output(self, o: Float[Tensor, "b h t e"], u: Tensor | None) -> Float[Tensor, "b t dim"]:
        """The layer's output from o = softmax(s(q, k)) v and u."""

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
        """Return the layer's output; masks, positions and documents are as in `attention`.

        With a `cache`, which this call extends, `x` are new tokens that also see the cached ones.
        `query_padding`, by default `key_padding`, leaves rows out of statistics (BatchNorm). A
        causal layer whose padding is on the right needs no `key_padding`.
        """
        check_input("x", x, self.dim)
        q, k, v, u = self.operands(x)
        if cache is None:
            query_padding = key_padding if query_padding is None else query_padding
        elif self.training and self.dropout > 0:
            raise InputError("a cache is for inference: call .eval() first, dropout is on")
        o = attention(
            *(q, k, v, self.score, causal, attn_mask, key_padding, query_padding),
            q_positions=positions if cache is None else None,
            k_positions=positions,
            documents=documents,
            dropout_p=self.dropout if self.training else 0.0,
            backend=backend,
            residual=residual,
            gate=None if self.gate is None else self.gate(x),
            forget=None if self.forget is None else self.forget(x),
            cache=cache,
        )
        return self.output(o, u)


class Attention(SelfAttention):
    """Attention with `heads` query heads and `kv_heads` key and value heads (default: as many).

    x W_qkv → q, k, v in one matmul; o = softmax(s(q, k)) v with the score s of `score`; o W_out.
    Shapes: (B, T, dim) → (B, T, dim). `head_dim` defaults to dim / heads. `score` is a `ScoreSpec`
    or its name; `.score` holds its parameters. The weight of `qkv` holds the rows of q, then k,
    then v, head by head. `bias` is for both projections, `qkv_bias` for q, k and v only (Qwen2).
    `dropout` is the probability of dropping an attention weight in training. Raises `InputError`
    for sizes that do not divide. Source: arXiv 1706.03762; grouped queries: arXiv 2305.13245.
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
        self.dim, self.heads = dim, heads
        self.kv_heads = heads if kv_heads is None else kv_heads
        self.head_dim = checked_head_dim(dim, heads, head_dim)
        self.dropout = checked_probability(dropout)
        spec = as_spec(score)
        self.score = Score(spec, heads=heads, head_dim=self.head_dim, kv_heads=self.kv_heads)
        width = (heads + 2 * self.kv_heads) * self.head_dim
        self.qkv = nn.Linear(dim, width, bias=bias or qkv_bias)
        self.gate, self.forget = gate_projections(spec, dim, heads, self.head_dim)
        outputs = heads if spec.gate is None else spec.gate.outputs(heads)
        self.out = nn.Linear(outputs * self.head_dim, dim, bias=bias)

    def operands(self, x: Float[Tensor, "b t dim"]) -> Operands:
        """Split x W_qkv into heads."""
        keys = self.heads + self.kv_heads
        heads = torch.unflatten(self.qkv(x), -1, (-1, self.head_dim)).transpose(1, 2)
        return heads[:, : self.heads], heads[:, self.heads : keys], heads[:, keys:], None

    def output(self, o: Float[Tensor, "b out t d"], u: Tensor | None) -> Float[Tensor, "b t dim"]:
        """Concatenate the heads of o and multiply by W_out."""
        y: Tensor = self.out(o.transpose(1, 2).flatten(2))
        return y

    def shrink(self, factor: Float[Tensor, " h"]) -> None:
        """Multiply the logits of each query head by its factor, through the weights of q and k."""
        shrink_heads(factor, self.kv_heads, self.qkv)

    def extra_repr(self) -> str:
        """Name the settings in the printed module."""
        return f"heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}"
