"""`attention_cached`: new tokens attend to themselves and to all that a cache holds.

Legend: B batch, H query heads, G key heads, T new tokens, S tokens in all, D head dimension,
E value size.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from normattn.errors import InputError
from normattn.kernels import AttentionMask
from normattn.kernels.inputs import Selection, check_shapes
from normattn.kernels.numerics import without_infinities
from normattn.kernels.stats import announce, observer
from normattn.layers.attend import (
    check_mask,
    check_packed,
    check_restarts,
    in_blocks,
    in_chunks,
    joined,
    regular_positions,
)
from normattn.layers.cache import KeyValueCache, Room
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
from normattn.layers.one_token import OneToken, foldable, made, serves
from normattn.layers.one_token_far import OneTokenFar, made_far
from normattn.layers.residual_scores import ResidualLayer, check_residual
from normattn.score import Positions, Score, ScoreSpec
from normattn.score.positions import numbered


def attention_cached(
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b g t d"],
    v: Float[Tensor, "b g t e"],
    score: Score,
    cache: KeyValueCache,
    key_padding: Bool[Tensor, "b s"] | None = None,
    positions: Int[Tensor, "b s"] | None = None,
    documents: Int[Tensor, "b s"] | None = None,
    backend: str = "auto",
    residual: ResidualLayer | None = None,
    gate: Float[Tensor, "b t gates"] | None = None,
    forget: Float[Tensor, "b t logits"] | None = None,
    attn_mask: Tensor | None = None,
    causal: bool = True,
) -> Float[Tensor, "b h t e"]:
    """Attention of T new tokens, whose keys and values join the cache.

    Args:
        q: queries (B, H, T, D) of the new tokens, not yet normalised, scaled or rotated.
        k: their keys (B, G, T, D), likewise.
        v: their values (B, G, T, E).
        score: the score that filled the cache.
        cache: what the layer has read before; changed by this call.
        key_padding: True where one of all S tokens is padding, which may stand on the left only.
        positions: those of all S tokens where they are not simply 0 … S − 1; found from
            `key_padding` and `documents` where they are not given.
        documents: the number of each of all S tokens' document, for a score with `Packed`, as in
            `attention`.
        backend: auto, or one kernel's name.
        residual: as for `attention`.
        gate: that of the new tokens, as for `attention`.
        forget: likewise.
        attn_mask: what the new tokens see of all S tokens, broadcastable to (B, H, T, S), boolean
            (True = seen) or floating (added), as for `attention`.
        causal: False for new tokens that `attn_mask` lets see each other both ways, as those of a
            prefix or an image; tokens read before never see later ones.

    Equal to the last T rows of `attention` over all tokens. Raises `InputError` for shapes that do
    not fit, a full cache, and a cache that another score filled.
    """
    quick = key_padding is None and positions is None and documents is None
    quick = quick and attn_mask is None and causal
    quick = (
        quick and residual is None and forget is None and backend == "auto" and observer() is None
    )
    # Tables laid out for tokens to come would tie a compiled graph to their number.
    quick = quick and (score.spec.remapping is not None or not torch.compiler.is_compiling())
    ready = _kept(score, cache, q, k, v) if quick and gate is None else None
    if ready is not None and ready.step.bare:
        cache.claim(score.spec)
        return ready(q, k, v, score, cache)
    check_shapes(q, k, v)
    check_packed(score.spec, documents, "of all tokens")
    check_residual(score.spec, residual)
    check_gate(score.spec, gate, q, v)
    check_forget(score.spec, forget, q, k)
    cache.claim(score.spec)
    v = paired_values(score.spec, v, k.shape[-1])
    first, count = cache.length, k.shape[2]
    if quick and count == 1:
        ready = _kept(score, cache, q, k, v) or _made(score, cache, q, k, v)
        if ready is not None:
            return gated(score.spec, joined_pairs(score, ready(q, k, v, score, cache)), gate)
    _check_given((key_padding, positions, documents), q.shape[0], first + count)
    if attn_mask is not None:
        check_mask(attn_mask, (*q.shape[:3], first + count))
    _check_both_ways(score.spec, causal, attn_mask, documents)
    if positions is not None and documents is None:
        check_restarts("positions", positions, key_padding)
    if documents is not None:
        documents = numbered(documents, key_padding)
    if positions is None and (key_padding is not None or documents is not None):
        positions = Positions.of(
            count, first + count, True, q.device, key_padding, documents=documents
        ).key
    own = None if key_padding is None else key_padding[:, first:]
    if positions is None:
        new, start = regular_positions(count, first + count, q.device).query, first
    else:
        new, start = positions[..., first:], None
    announce(score, q, k, own, own, new, new)
    stored = without_infinities(score.store(k, new, start))
    sums, width = None, stored.shape[-1]
    if forget is not None:
        stored = torch.cat((stored, log_gates(forget, k.shape[1], k.dtype)), -1)
    keys, values = cache.append(stored, v)
    if forget is not None:
        # Kept apart from token to token, so that the oldest may be dropped and rows exchanged.
        sums, keys = summed(keys[..., width:], q.shape[1]), keys[..., :width]
    selection = None
    if score.spec.selection is not None:
        selection = Selection(_taken(cache, keys, first), own)
    at, seen = _standing(cache, count, q.device, key_padding, positions, documents)
    if not causal:
        at, seen = _both_ways(at, seen, cache.length, key_padding)
    if attn_mask is not None:
        at, seen = _masked(score.spec, at, seen, attn_mask, cache.dropped)
    if score.spec.chunk is not None:
        seen = in_chunks(seen, score.spec.chunk, q.shape[0])
    live = _live_blocks(score, at)

    def part(rows: slice, upto: int, block: int) -> Tensor:
        block_positions = at.part(rows, upto)
        turned = None
        if score.spec.blockwise:
            turned = _turned(score, cache, keys, at, block, upto, live)
        tensors = q[:, :, rows], keys[:, :, :upto], values[:, :, :upto]
        problem = score.recall(
            *tensors, block_positions, seen.part(rows, upto), block=block, turned=turned
        )
        problem = replace(problem, selection=selection)
        return joined(residual, forgetting(problem, sums, rows, q.shape[2]), backend)

    out = in_blocks(score.spec, at, part)
    for block in set(cache.turned) - live:
        del cache.turned[block]
    if selection is not None and selection.after is not None:
        old = selection.before.shape[1] - count
        cache.selected = {first: selection.before[:, :old], cache.length: selection.after.detach()}
    return gated(score.spec, joined_pairs(score, out), gate)


def _kept(
    score: Score, cache: KeyValueCache, q: Tensor, k: Tensor, v: Tensor
) -> OneToken | OneTokenFar | None:
    """The quick way for one more token that the last one took, where it fits this one too."""
    kept = cache.one_token
    if isinstance(kept, OneToken | OneTokenFar) and kept.step.fits(score, q, k, v, cache):
        return kept
    return None


def _made(
    score: Score, cache: KeyValueCache, q: Tensor, k: Tensor, v: Tensor
) -> OneToken | OneTokenFar | None:
    """The quick way for one more token, kept in the cache; None where it is not enough."""
    spec = score.spec
    if serves(score, q):
        cache.one_token = ready = made(score, cache.length, q, k, v)
        return ready
    if (
        foldable(score, q)
        and spec.remapping is not None
        and spec.window[0] is None
        and spec.bias is None
    ):
        cache.one_token = far = made_far(score, cache.length, q, k, v)
        return far
    return None


def _standing(
    cache: KeyValueCache,
    count: int,
    device: torch.device,
    padding: Tensor | None,
    positions: Tensor | None,
    documents: Tensor | None,
) -> tuple[Positions, AttentionMask]:
    """Where the last `count` tokens and all tokens that are kept stand, and who sees whom."""
    length, gone = cache.length, cache.dropped
    if positions is None and not gone:
        at = regular_positions(count, length, device)
        return at, AttentionMask(True, at.query, at.key, at.regular)
    if positions is None:
        key = regular_positions(length - gone, length, device).query
    else:
        key = positions[..., gone:]
    query = key[..., key.shape[-1] - count :]
    at = Positions(query, key, query + 1, causal=True, regular=False)
    # Distances of tokens that are simply counted are those of their columns.
    seen = AttentionMask(True, query, key, positions is None)
    if padding is not None:
        seen = replace(seen, padding=padding[:, gone:])
    if documents is not None:
        own = documents[:, length - count :]
        seen = replace(seen, query_documents=own, key_documents=documents[:, gone:])
    return at, seen


def _check_both_ways(
    spec: ScoreSpec, causal: bool, mask: Tensor | None, documents: Tensor | None
) -> None:
    """Refuse tokens that see later ones without saying which, or by a score that cannot."""
    if causal:
        return
    if mask is None or documents is not None:
        raise InputError(
            "beside a cache causal=False needs attn_mask=…, what the new tokens see of all tokens, "
            "and takes no documents"
        )
    if spec.needs_causal:
        raise InputError(f"{spec.name} is defined for causal attention only")
    if spec.leaks_future:
        raise InputError(
            f"{spec.name} takes statistics across the sequence, which tokens that come later would "
            "change: it cannot be read with a cache"
        )


def _both_ways(
    at: Positions, seen: AttentionMask, length: int, padding: Tensor | None
) -> tuple[Positions, AttentionMask]:
    """The same without causality: n is the number of all tokens that are not padding."""
    if padding is None:
        n = torch.full((1,), length, device=at.query.device)
    else:
        n = (~padding).sum(-1, keepdim=True).clamp(min=1)
    at = replace(at, n=n, causal=False, regular=False)
    return at, replace(seen, causal=False)


def _masked(
    spec: ScoreSpec, at: Positions, seen: AttentionMask, mask: Tensor, dropped: int
) -> tuple[Positions, AttentionMask]:
    """The same with a mask over all tokens, of which the first `dropped` are forgotten."""
    if mask.shape[-1] != 1:
        if spec.logn is not None and dropped:
            raise InputError(
                f"{spec.name} counts the keys that attn_mask shows, but the cache of its window "
                "has forgotten some: use a GrowingCache"
            )
        mask = mask[..., dropped:]
    seen = replace(seen, mask=mask)
    return (at if spec.logn is None else at.without_masked(seen)), seen


def _taken(cache: KeyValueCache, keys: Tensor, first: int) -> Float[Tensor, "b s"]:
    """What the first tokens took from all of the keys: of those after them, nothing."""
    wide = torch.promote_types(keys.dtype, torch.float32)
    taken = keys.new_zeros(keys.shape[0], keys.shape[2], dtype=wide)
    if first:
        if first not in cache.selected:
            raise InputError(
                f"this cache lacks what its first {first} tokens have selected, for a call before "
                "this one failed: make a new cache"
            )
        before = cache.selected[first]
        taken[:, : before.shape[1]] = before
    return taken


def _live_blocks(score: Score, at: Positions) -> set[int]:
    """The blocks that the last rows are in, whose turned keys the next tokens will want."""
    if not score.spec.blockwise:
        return set()
    last = at.query[..., -1] // score.spec.block[1]
    return set(last.reshape(-1).tolist())


def _turned(
    score: Score,
    cache: KeyValueCache,
    keys: Tensor,
    at: Positions,
    block: int,
    upto: int,
    live: set[int],
) -> Tensor:
    """The first `upto` keys as the rows of a block read them; those of live blocks are kept."""
    room = cache.turned.setdefault(block, Room(2)) if block in live else Room(2)
    if room.used < upto:
        new = slice(room.used, upto)
        first = room.used if at.regular else None
        room.append(score.turn(keys[:, :, new], at.key[..., new], block, first))
    return room.view(upto)


def _check_given(given: tuple[Tensor | None, ...], batch: int, tokens: int) -> None:
    names = ("key_padding", "positions", "documents")
    for name, value in zip(names, given, strict=True):
        if value is not None and tuple(value.shape) != (batch, tokens):
            raise InputError(
                f"with a cache {name} is that of all tokens, {(batch, tokens)} with those read "
                f"before, but it is {tuple(value.shape)}"
            )


def refuse_beside_cache(causal: bool, mask: Tensor | None, dropping: bool) -> None:
    """Refuse what a layer that reads with a cache would otherwise ignore."""
    if not causal and mask is None:
        raise InputError(
            "a cache is for causal attention: leave it out, or causal=False, or give attn_mask=…"
        )
    if dropping:
        raise InputError("a cache is for inference: call .eval() first, dropout is on")
