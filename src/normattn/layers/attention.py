"""Multi-head and grouped-query attention whose score is a value: functions and layers.

`layers.prepare` decides what a call needs; here queries, keys and values run through it.

Legend: B batch, H query heads, G key heads, T queries, S keys, D head dimension, E value size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, overload

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.kernels import AttentionInputs, attend, attend_with_lse
from normattn.kernels.inputs import Selection, check_shapes
from normattn.kernels.numerics import without_infinities
from normattn.kernels.stats import announce, observer
from normattn.layers.cache import KeyValueCache
from normattn.layers.checks import (
    BOOLEAN,
    check_input,
    check_lse,
    check_parts,
    check_tensor,
    checked_head_dim,
    checked_probability,
)
from normattn.layers.decode import BlockKeys, DecodeTables, begin_selection, decodes
from normattn.layers.gates import (
    add_forgetting,
    apply_gate,
    forget_projection,
    gate_projection,
    join_pairs,
    log_gates,
    pair_values,
    scale_heads,
    share_factor,
    sum_gates,
)
from normattn.layers.prepare import (
    AttentionPlan,
    find_tables,
    in_blocks,
    prepare,
    run_folded,
    without_parameters,
)
from normattn.layers.residual_scores import ResidualLayer
from normattn.plain import plain_operations
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
    return_lse: Literal[False] = False,
) -> Float[Tensor, "b h t e"]: ...


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
) -> tuple[Float[Tensor, "b h t e"], Float[Tensor, "b h t"]]: ...


def attention(  # type: ignore[misc]  # the second overload leaves the other arguments open
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
    return_lse: bool = False,
) -> Float[Tensor, "b h t e"] | tuple[Float[Tensor, "b h t e"], Float[Tensor, "b h t"]]:
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
        return_lse: give o and ℓ (B, H, T), where ℓ_i = ln Σ_j exp s(i, j) over the keys that
            query i sees and a learned sink. ℓ is in float32 or wider, known to autograd, and −∞
            where nothing is seen. `normattn.kernels.merge_by_lse` merges two shards of keys.

    A query that sees no key gets 0. Raises `InputError` for shapes that do not fit, scores that
    cannot be used so, and backends that cannot serve the request.
    """
    # Written out: a generator would cost as many calls as all the rest.
    whole = not return_lse and attn_mask is None and key_padding is None
    whole = whole and query_padding is None and documents is None
    whole = whole and q_positions is None and k_positions is None
    if whole and residual is None and gate is None and forget is None and dropout_p == 0:
        tables = find_tables(score, q, k, v, causal, backend)
        if tables is not None:
            return run_folded(tables, score if isinstance(score, Score) else tables.score, q, k, v)
    check_shapes(q, k, v)
    module = score if isinstance(score, Score) else without_parameters(score, q, k)
    spec, (batch, heads, queries, _), keys = module.spec, q.shape, k.shape[2]
    check_parts(module, q, k, v, keys, documents, residual, gate, forget)
    checked_probability(dropout_p, "dropout_p")
    check_tensor("query_padding", query_padding, BOOLEAN, (batch, queries))
    plan = prepare(
        *(spec, q, keys, causal, backend),
        attn_mask=attn_mask,
        key_padding=key_padding,
        q_positions=q_positions,
        k_positions=k_positions,
        documents=documents,
    )
    at, sums = plan.positions, None
    if forget is not None:
        sums = sum_gates(log_gates(forget, k.shape[1], k.dtype, key_padding), heads)
    announce(module, q, k, query_padding, key_padding, at.query, at.key)
    sums_of_rows: list[Tensor] = []

    def kernel(inputs: AttentionInputs) -> Tensor:
        out, lse = attend_with_lse(inputs if residual is None else residual.join(inputs), backend)
        assert lse is not None
        sums_of_rows.append(lse)
        return out

    if return_lse:
        check_lse(spec)
    out = run(
        *(plan, module, q, k, pair_values(spec, v, k.shape[-1])),
        residual=residual,
        gate=gate,
        forget_sums=sums,
        query_padding=query_padding,
        dropout=dropout_p,
        kernel=kernel if return_lse else None,
    )
    return (out, sums_of_rows[0]) if return_lse else out


def run(
    plan: AttentionPlan,
    score: Score,
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b g s cached"],
    v: Float[Tensor, "b g s e"],
    *,
    residual: ResidualLayer | None = None,
    gate: Float[Tensor, "b t gates"] | None = None,
    forget_sums: Float[Tensor, "b h s"] | None = None,
    query_padding: Bool[Tensor, "b t"] | None = None,
    dropout: float = 0.0,
    selection: Selection | None = None,
    rotated: Callable[[int, int], Tensor] | None = None,
    kernel: Callable[[AttentionInputs], Tensor] | None = None,
) -> Float[Tensor, "b h t out"]:
    """softmax(score) · v for any score by a plan, with what a layer adds to it.

    Keys are as they came, or those of a cache; values of pairs of heads stand side by side.
    `forget_sums` are the summed gates of `FoX`, of all keys; `selection` what queries before have
    selected, beside a cache; `rotated` takes (keys, block) to the first keys of a cache as the rows
    of a block read them. `kernel` computes instead of the one that the plan names (`explain`).
    """

    def part(rows: slice, keys: int, block: int) -> Tensor:
        own = None if query_padding is None else query_padding[:, rows]
        tensors = q[:, :, rows], k[:, :, :keys], v[:, :, :keys]
        at, seen = plan.positions.part(rows, keys), plan.mask.part(rows, keys)
        if plan.cached:
            turned = None if rotated is None else rotated(keys, block)
            inputs = score.with_cached_keys(*tensors, at, seen, own, block, dropout, turned)
        else:
            inputs = score(*tensors, at, seen, own, block, dropout)
        if selection is not None:
            inputs = replace(inputs, selection=selection)
        inputs = add_forgetting(inputs, forget_sums, rows, q.shape[2])
        if kernel is not None:
            return kernel(inputs)
        return attend(inputs if residual is None else residual.join(inputs), plan.backend)

    # The definition is made of operations that every derivative goes through.
    with plain_operations(plan.backend == "reference"):
        out = in_blocks(score.spec, plan.positions, part)
        return apply_gate(score.spec, join_pairs(score, out), gate)


def attention_cached(
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b g t d"],
    v: Float[Tensor, "b g t e"],
    score: Score,
    cache: KeyValueCache,
    key_padding: Bool[Tensor, "b s"] | None = None,
    positions: Int[Tensor, "*bs s"] | None = None,
    documents: Int[Tensor, "b s"] | None = None,
    backend: str = "auto",
    residual: ResidualLayer | None = None,
    gate: Float[Tensor, "b t gates"] | None = None,
    forget: Float[Tensor, "b t logits"] | None = None,
    attn_mask: Tensor | None = None,
    causal: bool = True,
) -> Float[Tensor, "b h t e"]:
    """The last T rows of `attention` over all tokens that a cache and this call hold.

    q, k and v are those of the T new tokens, whose keys and values join the cache; `residual`,
    `gate` and `forget` are theirs, too. `key_padding` (left only), `positions` and `documents` are
    those of all S tokens; positions are found from the others where they are not given. `attn_mask`
    (B, H, T, S) says what the new tokens see of all; `causal=False` lets it show them each other
    both ways, as those of a prefix or an image: tokens read before never see later ones.

    Raises `InputError` for shapes that do not fit, a full cache, and a cache that another score
    filled.
    """
    given = (key_padding, positions, documents, attn_mask, residual, forget)
    plain = all(x is None for x in given) and causal and backend == "auto" and observer() is None
    # Tables laid out for tokens to come would tie a compiled graph to their number, and under
    # autocast their products would not keep the tensors' own type.
    plain = plain and not torch.compiler.is_compiling()
    plain = plain and not torch.is_autocast_enabled(q.device.type)
    tables: DecodeTables | None = cache.tables if plain else None
    if tables is not None and tables.bare and gate is None and tables.fits(score, q, k, v, cache):
        cache.claim(score.spec)
        return tables.run(score, q, k, v, cache)
    check_shapes(q, k, v)
    spec, count, first = score.spec, q.shape[2], cache.length
    check_parts(score, q, k, v, first + count, documents, residual, gate, forget)
    if not causal:
        _check_both_ways(spec, attn_mask, documents)
    cache.claim(spec)
    v = pair_values(spec, v, k.shape[-1])
    if plain and count == 1 and decodes(score, q):
        if tables is None or not tables.fits(score, q, k, v, cache):
            cache.tables = tables = DecodeTables.prepare(score, first, q, k, v)
        return apply_gate(spec, join_pairs(score, tables.run(score, q, k, v, cache)), gate)
    plan = prepare(
        *(spec, q, first + count, causal, backend),
        attn_mask=attn_mask,
        key_padding=key_padding,
        k_positions=positions,
        documents=documents,
        cached=True,
    )
    at, own = plan.positions, None if key_padding is None else key_padding[:, first:]
    announce(score, q, k, own, own, at.query, at.query)
    new_keys = score.cache_keys(k, at.query, first if at.regular else None)
    new_keys, width, sums = without_infinities(new_keys), new_keys.shape[-1], None
    if forget is not None:
        new_keys = torch.cat((new_keys, log_gates(forget, k.shape[1], k.dtype)), -1)
    keys, values = cache.append(new_keys, v)
    if forget is not None:
        # Kept apart from token to token, so that the oldest may be dropped and rows exchanged.
        sums, keys = sum_gates(keys[..., width:], q.shape[1]), keys[..., :width]
    selection = None if spec.selection is None else begin_selection(cache, keys, first, own)
    plan = plan.without_first(cache.dropped)
    blocks = BlockKeys(score, cache, keys, plan.positions) if spec.blockwise else None
    out = run(
        *(plan, score, q, keys, values),
        residual=residual,
        gate=gate,
        forget_sums=sums,
        selection=selection,
        rotated=None if blocks is None else blocks.rotated,
    )
    if blocks is not None:
        blocks.forget_others()
    if selection is not None and selection.after is not None:
        before = selection.before[:, : keys.shape[2] - count]
        cache.selected = {first: before, cache.length: selection.after.detach()}
    return out


def _check_both_ways(spec: ScoreSpec, mask: Tensor | None, documents: Tensor | None) -> None:
    """Refuse tokens that see later ones without saying which, or by a score that cannot."""
    if mask is None or documents is not None:
        raise InputError(
            "a cache is for causal attention: beside it causal=False needs attn_mask=…, what the "
            "new tokens see of all tokens, and takes no documents"
        )
    if spec.needs_causal:
        raise InputError(f"{spec.name} is defined for causal attention only")
    if spec.leaks_future:
        raise InputError(
            f"{spec.name} takes statistics across the sequence, which tokens that come later would "
            "change: it cannot be read with a cache"
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
        well; `key_padding`, `positions`, `documents`, `attn_mask` and `causal` are then those of
        `attention_cached`. `query_padding`, `key_padding` where it is not given, says which rows no
        statistics should count; a causal layer whose padding stands on the right needs nothing else
        of it. `residual` and `backend` are as in `attention`.
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
            *(q, k, v, self.score, causal, attn_mask, key_padding),
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
    q, k and v alone (Qwen2). `dropout` is the probability with which an attention weight is dropped
    in training. Raises `InputError` for sizes that do not divide.
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
        self.dim, self.heads = dim, heads
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
        heads = self.qkv(x).view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)
        keys = self.heads + self.kv_heads
        return heads[:, : self.heads], heads[:, self.heads : keys], heads[:, keys:], None

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
