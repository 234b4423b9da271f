"""Positions of keys: transformers' mask function passes them to attention, without N × N.

transformers builds one mask per forward and hands it to every layer, unread if it is a tensor of
four dimensions. Ours is such a tensor, of 32-bit integers and small:

- (1, 1, 0, S): the first S keys are real and simply counted, the queries are the last of them;
- (B, 1, 1, S + T): the places of S keys, −1 where one is hidden, then those of the T queries.

Places count the real tokens of a row from 0, so left padding changes nothing. A mask of another
kind (packed sequences, a mask function of the caller's own) stays a boolean (B, 1, T, S).

Legend: B batch, T queries, S keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from normattn.errors import InputError
from normattn.kernels import AttentionMask
from normattn.score import Positions

_OURS = torch.int32
"""The dtype of normattn's masks; a caller's masks of 0 and 1 have another one.

A caller's int32 mask with one query row would be taken for normattn's."""


@dataclass(frozen=True)
class Placing:
    """Positions of the queries and the first `keys` keys, and the attention mask.

    `runs`, where there are any, are batches without padding that say the same, and are quicker.
    """

    keys: int
    positions: Positions
    seen: AttentionMask
    runs: tuple[Run, ...] | None = None


@dataclass(frozen=True)
class Run:
    """Rows of a batch whose real tokens lie side by side in the same columns."""

    batch: slice
    queries: slice
    keys: slice
    inner: Placing


def compact_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Bool[Tensor, "b s"] | None = None,
    device: torch.device | str = "cpu",
) -> Int[Tensor, "b 1 x y"]:
    """The mask of causal attention of T queries from column `q_offset` on over `kv_length` keys.

    A static cache's keys end with the last query's column; its single steps keep one shape, so that
    a compiled step is compiled once, and read nothing from the device.
    """
    if kv_offset:
        raise InputError(
            f"the cache begins at token {kv_offset}: an extended layer needs all keys, so it "
            "cannot use a cache that drops some"
        )
    fixed = isinstance(q_offset, Tensor) and q_length == 1
    used = kv_length if fixed else int(q_offset) + q_length
    real = None
    if attention_mask is not None:  # what it does not name is hidden
        missing = max(0, used - attention_mask.shape[-1])
        real = torch.nn.functional.pad(attention_mask.bool(), (0, missing))[:, :used]
    if not fixed and (real is None or bool(real.all())):
        return torch.empty((1, 1, 0, used), dtype=_OURS, device=device)
    if real is None:
        places = torch.arange(used, device=device)[None]
    else:
        places = (real.cumsum(-1) - 1).masked_fill(~real, -1)
    columns = torch.arange(q_length, device=device) + q_offset
    return torch.cat((places, places[:, columns]), -1)[:, None, None].to(_OURS)


def mask_function(over: Callable[..., Any], pairs: bool = False) -> Callable[..., Tensor | None]:
    """What is registered with normattn's attention; `over` makes the masks of unchanged layers.

    `pairs`: masks of every pair, for layers that select among the keys themselves.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    def make(
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int | Tensor = 0,
        kv_offset: int = 0,
        mask_function: Callable[..., Any] = causal_mask_function,
        attention_mask: Tensor | None = None,
        local_size: int | None = None,
        **more: Any,
    ) -> Tensor | None:
        sizes = (batch_size, q_length, kv_length, q_offset, kv_offset)
        whole = (mask_function, attention_mask)
        mask: Tensor | None
        if local_size is not None:
            mask = over(*sizes, *whole, local_size=local_size, **more)
        elif mask_function is causal_mask_function and not pairs:
            mask = compact_mask(*sizes, attention_mask, more["device"])
        else:
            every_pair: Callable[..., Tensor | None] = sdpa_mask
            mask = every_pair(*sizes, *whole, **{**more, "allow_is_causal_skip": False})
        return mask

    return make


def placing(
    mask: Tensor | None,
    queries: int,
    keys: int,
    batch: int,
    position_ids: Int[Tensor, "_ t"] | None,
    counted: bool,
    before: Tensor | None = None,
) -> Placing:
    """What a mask says. `counted`: whether the score depends on each key's position.

    `before` is the mask before the layer selected keys, from which positions are counted.
    """
    if mask is None or mask.dim() != 4:
        raise InputError("an extended layer got no mask: it cannot be called outside its model")
    if mask.dtype != _OURS or mask.shape[2] > 1:
        return _of_pairs(mask, queries, keys, position_ids, counted, before)
    if mask.shape[2] == 0:
        placed = _regular(queries, mask.shape[3], mask.device)
        _check_ids(position_ids, placed.positions.query.expand(batch, -1))
        return placed
    places = mask[:, 0, 0].long().expand(batch, -1)
    used = places.shape[-1] - queries
    query, key = places[:, used:], places[:, :used]
    _check_ids(position_ids, query)
    placed = _padded(query, key)
    return placed if torch.compiler.is_compiling() else replace(placed, runs=_runs(query, key))


def _regular(queries: int, keys: int, device: torch.device) -> Placing:
    """The queries are the last of keys that are simply counted."""
    at = Positions.of(queries, keys, True, device)
    return Placing(keys, at, AttentionMask(True, at.query, at.key, at.regular))


def _padded(
    query: Int[Tensor, "b t"], key: Int[Tensor, "b s"], mask: Tensor | None = None
) -> Placing:
    """Causal attention over keys at these places, −1 where one is hidden."""
    # What a padded query reads is not used; its position is one that a real query could have.
    query = query.clamp(min=0)
    at = Positions(query, key, query + 1, True, False, ordered=False)
    seen = AttentionMask(True, query, key, False, padding=key < 0, attn_mask=mask)
    return Placing(key.shape[-1], at, seen)


def _runs(query: Int[Tensor, "b t"], key: Int[Tensor, "b s"]) -> tuple[Run, ...] | None:
    """Neighbouring rows that are alike, as batches without padding; None where that cannot be.

    It can where the real tokens of each row lie side by side, and its real queries are the last of
    them up to their own column: padding on the left or on the right, a cache that is not yet full.
    """
    real = query >= 0
    count, last = real.sum(-1), query.amax(-1) + 1
    first, start = real.int().argmax(-1), (key >= 0).int().argmax(-1)
    rows = torch.arange(query.shape[1], device=query.device) - first[:, None]
    columns = torch.arange(key.shape[1], device=key.device) - start[:, None]
    in_row = (rows >= 0) & (rows < count[:, None])
    held = (columns >= 0) & (columns < last[:, None])
    good = (in_row == real) & (~in_row | (query == rows + (last - count)[:, None]))
    if not bool(good.all()) or not bool((~held | (key == columns)).all()):
        return None
    runs: list[Run] = []
    kinds = torch.stack((first, count, start, last), 1).tolist()
    for row, kind in enumerate(kinds):
        begin, many, left, keys = kind
        if row and kinds[row - 1] == kind:
            runs[-1] = replace(runs[-1], batch=slice(runs[-1].batch.start, row + 1))
            continue
        places = slice(begin, begin + many), slice(left, left + keys)
        runs.append(Run(slice(row, row + 1), *places, _regular(many, keys, query.device)))
    return tuple(runs)


def _of_pairs(
    mask: Tensor,
    queries: int,
    keys: int,
    position_ids: Tensor | None,
    counted: bool,
    before: Tensor | None,
) -> Placing:
    """A mask of every pair: positions are those that the caller gave the tokens.

    Those of cached keys are counted, where the mask is one of keys that are real or not.
    """
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise InputError(
            "a mask of query-key pairs must be boolean (True = seen) or floating (added), but "
            f"it is {mask.dtype} of {tuple(mask.shape)}"
        )
    selected = before is not None and before is not mask
    places = None
    if selected or (counted and queries != keys):
        places = _places(mask if before is None else before[..., :keys], queries)
    if places is not None:
        return _padded(*places, mask[..., :keys] if selected else None)
    if position_ids is None or (counted and queries != keys):
        raise InputError(
            "a mask of query-key pairs does not give positions of cached keys: pass a padding "
            "mask (batch, tokens), or use no cache"
        )
    at_keys = position_ids
    if queries != keys:
        at_keys = torch.zeros(1, keys, dtype=torch.int64, device=mask.device)
    at = Positions(position_ids, at_keys, position_ids + 1, True, False, ordered=False)
    return Placing(keys, at, AttentionMask(False, at.query, at.key, False, attn_mask=mask))


def _places(mask: Tensor, queries: int) -> tuple[Tensor, Tensor] | None:
    """Positions of queries and keys from a mask of every pair (B, 1, T, S); None if unknown.

    It says where each query sees the first of those keys that the last one sees, itself included;
    queries of padding on the left see none.
    """
    if mask.dtype != torch.bool or mask.shape[1] != 1 or torch.compiler.is_compiling():
        return None
    rows = mask[:, 0]
    real = rows[:, -1]
    key = (real.cumsum(-1) - 1).masked_fill(~real, -1)
    query = rows.sum(-1) - 1
    expected = (key[:, None] >= 0) & (key[:, None] <= query[..., None])
    last = torch.arange(1 - queries, 1, device=mask.device)
    counted = (query[:, -1:] + last).clamp(min=-1)
    good = (rows == expected).all() & (query == counted).all() & (query[:, -1] >= 0).all()
    return (query, key) if bool(good) else None


def _check_ids(position_ids: Tensor | None, places: Tensor) -> None:
    """Position ids may start anywhere, but must count the real tokens one by one."""
    if position_ids is None or places.shape[-1] == 1 or torch.compiler.is_compiling():
        return
    shift, real = position_ids - places, places >= 0
    low = torch.where(real, shift, shift.max()).amin(-1)
    high = torch.where(real, shift, shift.min()).amax(-1)
    if bool((low != high)[real.any(-1)].any()):
        raise InputError(
            "position_ids do not number the tokens of the attention mask one by one: an "
            "extended model numbers them itself, because a cache keeps no positions; leave "
            "position_ids out"
        )
