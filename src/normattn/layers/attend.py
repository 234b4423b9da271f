"""`attention`: queries, keys, values and a score specification to outputs.

Legend: B batch, H query heads, G key heads, T queries, S keys, D head dimension, E value size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from normattn.errors import InputError
from normattn.kernels import AttentionInputs, AttentionMask, attend
from normattn.kernels.inputs import DTYPES, check_dense, check_shapes
from normattn.kernels.stats import announce, confine
from normattn.layers.gates import (
    check_forget,
    check_gate,
    forgetting,
    gated,
    joined_pairs,
    log_gates,
    paired_values,
    summed,
)
from normattn.layers.prepare import (
    check_score,
    planned,
    positions_of,
    without_parameters,
)
from normattn.layers.prepare import forget_positions as forget_positions
from normattn.layers.prepare import regular_positions as regular_positions
from normattn.layers.residual_scores import ResidualLayer, check_residual
from normattn.plain import plain_operations
from normattn.score import Positions, Score, ScoreSpec
from normattn.score.positions import numbered


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
    counted = q_positions is None and k_positions is None and documents is None
    whole = attn_mask is None and key_padding is None and query_padding is None and counted
    if whole and residual is None and gate is None and forget is None and dropout_p == 0:
        out = planned(score, q, k, v, causal, backend)
        if out is not None:
            return out
    check_shapes(q, k, v)
    module = score if isinstance(score, Score) else without_parameters(score, q, k)
    _check(module, q, k, attn_mask, dropout_p)
    _check_padding("key_padding", "keys", key_padding, k)
    _check_padding("query_padding", "queries", query_padding, q)
    _check_positions("q_positions", q_positions, q)
    _check_positions("k_positions", k_positions, k)
    _check_documents(module.spec, documents, q, k)
    if documents is not None:
        documents = numbered(documents, key_padding)
    check_residual(module.spec, residual)
    check_gate(module.spec, gate, q, v)
    check_forget(module.spec, forget, q, k)
    given = (key_padding, q_positions, k_positions, documents)
    if causal and k_positions is not None and documents is None:
        check_restarts("k_positions", k_positions, key_padding)
    given = (key_padding, q_positions, k_positions, documents)
    positions, seen = standing(module.spec, q, k, causal, attn_mask, *given)
    if q_positions is not None or k_positions is not None:
        _check_order(module.spec, positions, documents)
    sums = None
    if forget is not None:
        sums = summed(log_gates(forget, k.shape[1], k.dtype, key_padding), q.shape[1])
    announce(module, q, k, query_padding, key_padding, positions.query, positions.key)
    v = paired_values(module.spec, v, k.shape[-1])

    def compute(problem: AttentionInputs) -> Tensor:
        return joined(residual, problem, backend)

    # The definition is made of operations that every derivative goes through.
    with plain_operations(backend == "reference"):
        out = by_problems(
            *(module, q, k, v, positions, seen, compute, query_padding, dropout_p, sums)
        )
        return gated(module.spec, joined_pairs(module, out), gate)


def standing(
    spec: ScoreSpec,
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b g s d"],
    causal: bool,
    mask: Tensor | None = None,
    key_padding: Bool[Tensor, "b s"] | None = None,
    q_positions: Int[Tensor, "*bq t"] | None = None,
    k_positions: Int[Tensor, "*bk s"] | None = None,
    documents: Int[Tensor, "b s"] | None = None,
) -> tuple[Positions, AttentionMask]:
    """Where queries and keys stand, and who sees whom; the arguments are those of `attention`."""
    given = (key_padding, q_positions, k_positions, documents)
    if causal and all(argument is None for argument in given):
        positions = positions_of(q, k, causal)
    else:
        positions = Positions.of(q.shape[2], k.shape[2], causal, q.device, *given)
    seen = AttentionMask(
        causal, positions.query, positions.key, positions.regular, key_padding, mask
    )
    if documents is not None:
        own = documents[:, documents.shape[1] - q.shape[2] :]
        seen = replace(seen, query_documents=own, key_documents=documents)
    if mask is not None and spec.logn is not None:
        positions = positions.without_masked(seen)
    if spec.chunk is not None:
        seen = in_chunks(seen, spec.chunk, q.shape[0])
    return positions, seen


def by_problems(
    score: Score,
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b g s d"],
    v: Float[Tensor, "b g s e"],
    positions: Positions,
    seen: AttentionMask,
    compute: Callable[[AttentionInputs], Tensor],
    query_padding: Bool[Tensor, "b t"] | None = None,
    dropout: float = 0.0,
    forgotten: Float[Tensor, "b h s"] | None = None,
) -> Float[Tensor, "b h t e"]:
    """What `compute` makes of the problem that the score poses, or of those of its blocks.

    `forgotten` are the summed gates of a score with `FoX`.
    """

    def part(rows: slice, keys: int, block: int) -> Tensor:
        own = None if query_padding is None else query_padding[:, rows]
        here = positions.part(rows, keys), seen.part(rows, keys)
        tensors = q[:, :, rows], k[:, :, :keys], v[:, :, :keys]
        problem = score(*tensors, *here, own, block, dropout)
        return compute(forgetting(problem, forgotten, rows, q.shape[2]))

    return in_blocks(score.spec, positions, part)


def joined(
    residual: ResidualLayer | None, problem: AttentionInputs, backend: str
) -> Float[Tensor, "b h t e"]:
    """softmax(score) · v, with what the layers below hand on."""
    return attend(problem, backend) if residual is None else residual.attend(problem, backend)


def in_chunks(seen: AttentionMask, size: int, batch: int) -> AttentionMask:
    """The same without the keys of other chunks of `size` positions."""
    query, key = (
        positions.div(size, rounding_mode="floor")
        .reshape(-1, positions.shape[-1])
        .expand(batch, -1)
        for positions in (seen.query, seen.key)
    )
    return replace(seen, query_documents=query, key_documents=key)


def in_blocks(
    spec: ScoreSpec, positions: Positions, part: Callable[[slice, int, int], Tensor]
) -> Float[Tensor, "b h t e"]:
    """All query rows at once, or, where the score moves, those of each block of positions.

    `part(rows, keys, block)` attends from some rows to the first `keys` keys as `block` reads
    them. Rows of a batch may reach a block at different times: a row keeps what is its own.
    """
    queries, keys = positions.query.shape[-1], positions.key.shape[-1]
    if not spec.blockwise or queries == 0:
        return part(slice(0, queries), keys, 0)
    if torch.compiler.is_compiling():
        raise InputError(
            f"{spec.block[0]} reads rows in blocks that depend on their positions, which a "
            "compiler does not know: run it uncompiled, or take a spectrum that does not move"
        )
    pieces: list[Tensor] = []
    out: Tensor | None = None
    for number, span, own in _blocks(positions, spec.block[1]):
        confine(span, own)
        piece = part(span, keys - queries + span.stop if positions.ordered else keys, number)
        if own is None:
            pieces.append(piece)
            continue
        whole = piece.new_zeros(*piece.shape[:2], queries, piece.shape[3])
        mine = own.reshape(-1, 1, piece.shape[2], 1)
        whole[:, :, span] = torch.where(mine, piece, 0.0)
        out = whole if out is None else out + whole
    if out is not None:
        return out
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2)


def _blocks(positions: Positions, length: int) -> Iterator[tuple[int, slice, Tensor | None]]:
    """Each block, the rows among which its own are, and which these are; None for all of them."""
    queries, keys = positions.query.shape[-1], positions.key.shape[-1]
    if positions.regular and queries <= keys:
        # Known without a look at the numbers.
        first = queries - keys
        for number in range(-first // length, (keys - 1) // length + 1):
            start = first + number * length
            yield number, slice(max(0, start), min(queries, start + length)), None
        return
    block = positions.query // length
    lowest, highest = int(block.min()), int(block.max())
    if lowest == highest:
        yield lowest, slice(0, queries), None
        return
    for number in range(lowest, highest + 1):
        mine = block == number
        rows = mine.reshape(-1, queries).any(0).nonzero()[:, 0]
        if rows.numel():
            span = slice(int(rows[0]), int(rows[-1]) + 1)
            alone = mine.dim() == 1 and positions.ordered
            yield number, span, None if alone else mine[..., span]


def _check(
    score: Score,
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    dropout: float,
) -> None:
    check_score(score, q, k)
    if mask is not None:
        check_mask(mask, (q.shape[0], q.shape[1], q.shape[2], k.shape[2]))
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise InputError(f"dropout_p must be at least 0 and below 1, but it is {dropout}")


def check_mask(mask: Tensor, full: tuple[int, ...]) -> None:
    """Refuse an `attn_mask` of another type, or one that does not broadcast to (B, H, T, S)."""
    check_dense("attn_mask", mask)
    try:
        fits = mask.dim() >= 2 and mask.expand(full).shape == full
    except RuntimeError:
        fits = False
    if not fits or mask.dtype not in (torch.bool, *DTYPES):
        raise InputError(
            "attn_mask must be boolean, float32, float64, bfloat16 or float16 and broadcast to "
            f"{full}, but it is {mask.dtype} of {tuple(mask.shape)}"
        )


def _check_padding(name: str, axis: str, padding: Tensor | None, x: Tensor) -> None:
    expected = (x.shape[0], x.shape[2])
    if padding is not None:
        check_dense(name, padding)
    if padding is not None and (padding.shape != expected or padding.dtype != torch.bool):
        raise InputError(
            f"{name} must be boolean (batch, {axis}) = {expected}, True where one is padding, but "
            f"it is {padding.dtype} of {tuple(padding.shape)}"
        )


def check_packed(spec: ScoreSpec, documents: Tensor | None, wanted: str) -> None:
    """Refuse documents that the score does not keep apart, and a score that lacks its own.

    `wanted` says in that message what they must be.
    """
    if spec.documents is None and documents is not None:
        raise InputError(
            f"documents are given, but {spec.name} attends across them: name {spec.name}-Packed"
        )
    if spec.documents is not None and documents is None:
        raise InputError(f"{spec.name} keeps documents apart and needs documents=…, {wanted}")


def _check_documents(spec: ScoreSpec, documents: Tensor | None, q: Tensor, k: Tensor) -> None:
    expected = (k.shape[0], k.shape[2])
    check_packed(spec, documents, f"integers {expected}")
    if documents is None:
        return
    check_dense("documents", documents)
    if q.shape[2] > k.shape[2]:
        raise InputError(
            f"with documents the queries are the last of the keys, but there are {q.shape[2]} "
            f"queries and {k.shape[2]} keys"
        )
    if tuple(documents.shape) != expected or documents.is_floating_point():
        raise InputError(
            f"documents must be integers of shape {expected}, but they are {documents.dtype} of "
            f"{tuple(documents.shape)}"
        )


def _check_order(spec: ScoreSpec, at: Positions, documents: Tensor | None) -> None:
    """Refuse tokens out of order for a score that hands on from each to the next."""
    if (spec.selection is None and not spec.forgets) or torch.compiler.is_compiling():
        return
    rows = at.query.shape[-1]
    if _goes_back(at.query, None if documents is None else documents[:, -rows:]):
        raise InputError(
            f"{spec.name} hands on from each row to the next: q_positions must not go back"
        )
    if spec.forgets and (
        _goes_back(at.key, documents) or bool((at.query != at.key[..., -rows:]).any())
    ):
        raise InputError(
            f"{spec.name} forgets from each key to the next: k_positions must not go back, and the "
            "queries must stand where the last keys do"
        )


def check_restarts(name: str, positions: Tensor, padding: Tensor | None) -> None:
    """Refuse positions that go back to one that was there before: of several texts in one row.

    Padded tokens do not count. Where no number can be read, nothing is refused.
    """
    compiling = torch.compiler.is_compiling() or positions.is_meta
    if compiling or torch._C._functorch.is_functorch_wrapped_tensor(positions):
        return
    if not bool((positions.diff(dim=-1) < 0).any()):
        return
    # Each padded token at a place of its own.
    own = torch.arange(-positions.shape[-1], 0, device=positions.device)
    places = positions if padding is None else torch.where(padding, own, positions)
    back = (places.diff(dim=-1) < 0).any(-1)
    twice = (places.sort(dim=-1).values.diff(dim=-1) == 0).any(-1)
    if bool((back & twice).any()):
        raise InputError(
            f"{name} begin anew within a row, so that causal queries would see keys of the texts "
            "after their own: name the score with Packed and give documents=…, the number of each "
            "token's text"
        )


def _goes_back(positions: Tensor, documents: Tensor | None) -> bool:
    """Whether a token stands before the one to its left, of the same document."""
    back = positions.diff(dim=-1) < 0
    if documents is not None:
        back = back & (documents.diff(dim=-1) == 0)
    return bool(back.any())


def _check_positions(name: str, positions: Tensor | None, x: Tensor) -> None:
    if positions is None:
        return
    check_dense(name, positions)
    batch, tokens = x.shape[0], x.shape[2]
    shapes = ((tokens,), (1, tokens), (batch, tokens))
    # Differences are taken: an unsigned type would wrap around and show the future.
    if tuple(positions.shape) not in shapes or positions.dtype not in (torch.int32, torch.int64):
        raise InputError(
            f"{name} must be int64 or int32 of shape {(tokens,)} or {(batch, tokens)}, but it is "
            f"{positions.dtype} of {tuple(positions.shape)}"
        )
