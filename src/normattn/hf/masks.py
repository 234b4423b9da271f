"""Compact masks that hold positions instead of T × S pairs.

transformers makes one mask for each forward and passes any tensor of four dimensions to every layer
unchanged. A compact mask is such a tensor of 32-bit integers:

- (1, 1, 0, S): no padding; keys have positions 0 … S − 1, and queries are the last of them;
- (B, 1, 1, S + T): positions of the S keys, −1 where one is hidden, then those of the T queries.

Positions count the real tokens of a row from 0, so left padding changes nothing. Other masks
(packed sequences, a custom mask function) stay boolean pair masks (B, 1, T, S).

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

_COMPACT_DTYPE = torch.int32
"""The dtype that marks a compact mask.

A caller's int32 mask with one query row would be taken for a compact one."""


@dataclass(frozen=True)
class MaskedPositions:
    """Positions of the queries and the first `keys` keys, and the attention mask."""

    keys: int
    positions: Positions
    mask: AttentionMask
    groups: tuple[RowGroup, ...] | None = None  # equal batches without padding, which are faster


@dataclass(frozen=True)
class RowGroup:
    """Rows of a batch whose real tokens are contiguous and in the same columns."""

    rows: slice
    queries: slice
    keys: slice
    masked: MaskedPositions


def compact_mask(
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Bool[Tensor, "b s"] | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Int[Tensor, "b 1 x y"]:
    """The compact mask of causal attention of T queries, the first in column `q_offset`.

    With a static cache all decoding steps have one shape: they compile once, without a device sync.
    """
    if kv_offset:
        raise InputError(
            f"the cache begins at token {kv_offset}: an extended layer needs all keys, so it "
            "cannot use a cache that drops some"
        )
    fixed = isinstance(q_offset, Tensor) and q_length == 1
    used = kv_length if fixed else int(q_offset) + q_length
    real = None
    if attention_mask is not None:  # keys beyond its end are hidden
        missing = max(0, used - attention_mask.shape[-1])
        real = torch.nn.functional.pad(attention_mask.bool(), (0, missing))[:, :used]
    # A graph cannot depend on whether there is padding.
    padded = real is not None and (torch.compiler.is_compiling() or not bool(real.all()))
    if not fixed and not padded:
        return torch.empty((1, 1, 0, used), dtype=_COMPACT_DTYPE, device=device)
    if real is None:
        positions = torch.arange(used, device=device)[None]
    else:
        positions = (real.cumsum(-1) - 1).masked_fill(~real, -1)
    columns = torch.arange(q_length, device=device) + q_offset
    return torch.cat((positions, positions[:, columns]), -1)[:, None, None].to(_COMPACT_DTYPE)


def mask_function(stock_mask: Callable[..., Any], pairs: bool = False) -> Callable[..., Any]:
    """The masks of normattn's attention: compact, or of `pairs`; stock ones for windowed layers."""
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    def make(**kwargs: Any) -> Any:
        causal = kwargs.get("mask_function", causal_mask_function) is causal_mask_function
        if kwargs.get("local_size") is not None:
            return stock_mask(**kwargs)
        if causal and not pairs:
            return compact_mask(**kwargs)
        return sdpa_mask(**{**kwargs, "allow_is_causal_skip": False})

    return make


def masked_positions(
    mask: Tensor | None,
    queries: int,
    keys: int,
    batch: int,
    position_ids: Int[Tensor, "_ t"] | None,
    unselected_mask: Tensor | None = None,
) -> MaskedPositions:
    """The positions and the attention mask that transformers' `mask` encodes.

    `unselected_mask` is the mask before the layer selected keys; positions are counted in it.
    """
    if mask is None or mask.dim() != 4:
        raise InputError("an extended layer got no mask: it cannot be called outside its model")
    if mask.dtype != _COMPACT_DTYPE or mask.shape[2] > 1:
        return _from_pair_mask(mask, queries, keys, position_ids, unselected_mask)
    if mask.shape[2] == 0:
        masked = _without_padding(queries, mask.shape[3], mask.device)
        _check_position_ids(position_ids, masked.positions.query.expand(batch, -1))
        return masked
    positions = mask[:, 0, 0].long().expand(batch, -1)
    num_keys = positions.shape[-1] - queries
    query, key = positions[:, num_keys:], positions[:, :num_keys]
    _check_position_ids(position_ids, query)
    masked = _with_padding(query, key)
    if torch.compiler.is_compiling():
        return masked
    return replace(masked, groups=_group_rows(query, key))


def _without_padding(queries: int, keys: int, device: torch.device) -> MaskedPositions:
    """Causal attention without padding; the queries are the last of the keys."""
    positions = Positions.of(queries, keys, True, device)
    return MaskedPositions(
        keys, positions, AttentionMask(True, positions.query, positions.key, positions.regular)
    )


def _with_padding(
    query: Int[Tensor, "b t"], key: Int[Tensor, "b s"], mask: Tensor | None = None
) -> MaskedPositions:
    """Causal attention over keys at these positions, −1 where one is hidden."""
    # The output of a padded query is not used, so it may have any valid position.
    query = query.clamp(min=0)
    positions = Positions(query, key, query + 1, True, False, ordered=False)
    attention_mask = AttentionMask(True, query, key, False, padding=key < 0, attn_mask=mask)
    return MaskedPositions(key.shape[-1], positions, attention_mask)


def _group_rows(query: Int[Tensor, "b t"], key: Int[Tensor, "b s"]) -> tuple[RowGroup, ...] | None:
    """Adjacent rows with equal padding as batches without padding; None where there are none."""
    # A row's real tokens must be contiguous and end with its real queries: padding on the left or
    # on the right, or a cache that is not yet full.
    real = query >= 0
    num_queries, num_keys = real.sum(-1), query.amax(-1) + 1
    first_query, first_key = real.int().argmax(-1), (key >= 0).int().argmax(-1)
    rows = torch.arange(query.shape[1], device=query.device) - first_query[:, None]
    columns = torch.arange(key.shape[1], device=key.device) - first_key[:, None]
    in_row = (rows >= 0) & (rows < num_queries[:, None])
    in_keys = (columns >= 0) & (columns < num_keys[:, None])
    contiguous = in_row == real
    last = ~in_row | (query == rows + (num_keys - num_queries)[:, None])
    if not bool((contiguous & last).all()) or not bool((~in_keys | (key == columns)).all()):
        return None
    groups: list[RowGroup] = []
    layouts = torch.stack((first_query, num_queries, first_key, num_keys), 1).tolist()
    for row, layout in enumerate(layouts):
        if row and layouts[row - 1] == layout:
            groups[-1] = replace(groups[-1], rows=slice(groups[-1].rows.start, row + 1))
            continue
        query_start, queries, key_start, keys = layout
        slices = slice(query_start, query_start + queries), slice(key_start, key_start + keys)
        masked = _without_padding(queries, keys, query.device)
        groups.append(RowGroup(slice(row, row + 1), *slices, masked))
    return tuple(groups)


def _from_pair_mask(
    mask: Tensor,
    queries: int,
    keys: int,
    position_ids: Tensor | None,
    unselected_mask: Tensor | None,
) -> MaskedPositions:
    """The caller's `position_ids`; with cached keys, positions counted in a causal mask."""
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise InputError(
            "a mask of query-key pairs must be boolean (True = seen) or floating (added), but "
            f"it is {mask.dtype} of {tuple(mask.shape)}"
        )
    selected = unselected_mask is not None and unselected_mask is not mask
    if selected or queries != keys:
        causal = mask if unselected_mask is None else unselected_mask[..., :keys]
        counted = _count_positions(causal, queries)
        if counted is not None:
            return _with_padding(*counted, mask[..., :keys] if selected else None)
    if position_ids is None or queries != keys:
        raise InputError(
            "a mask of query-key pairs does not give positions of cached keys: pass a padding "
            "mask (batch, tokens), or use no cache"
        )
    positions = Positions(position_ids, position_ids, position_ids + 1, True, False, ordered=False)
    return MaskedPositions(
        keys, positions, AttentionMask(False, positions.query, positions.key, False, attn_mask=mask)
    )


def _count_positions(mask: Tensor, queries: int) -> tuple[Tensor, Tensor] | None:
    """Positions of queries and keys from a pair mask (B, 1, T, S); None if it is no causal mask."""
    if mask.dtype != torch.bool or mask.shape[1] != 1 or torch.compiler.is_compiling():
        return None
    # In a causal mask each query sees the last query's keys up to its own; left padding sees none.
    rows = mask[:, 0]
    real = rows[:, -1]
    key = (real.cumsum(-1) - 1).masked_fill(~real, -1)
    query = rows.sum(-1) - 1
    expected = (key[:, None] >= 0) & (key[:, None] <= query[..., None])
    offsets = torch.arange(1 - queries, 1, device=mask.device)
    consecutive = query == (query[:, -1:] + offsets).clamp(min=-1)
    causal = (rows == expected).all() & consecutive.all() & (query[:, -1] >= 0).all()
    return (query, key) if bool(causal) else None


def _check_position_ids(position_ids: Tensor | None, positions: Tensor) -> None:
    """Position ids may start anywhere, but must number the real tokens one by one."""
    if position_ids is None or positions.shape[-1] == 1 or torch.compiler.is_compiling():
        return
    shift, real = position_ids - positions, positions >= 0
    low = torch.where(real, shift, shift.max()).amin(-1)
    high = torch.where(real, shift, shift.min()).amax(-1)
    if bool((low != high)[real.any(-1)].any()):
        raise InputError(
            "position_ids do not number the tokens of the attention mask one by one: an "
            "extended model numbers them itself, because a cache keeps no positions; leave "
            "position_ids out"
        )
