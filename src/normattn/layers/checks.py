"""Checks of what attention is given beside q, k and v.

Legend: B batch, H query heads, T queries, S keys, E value size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from normattn.errors import InputError
from normattn.kernels.inputs import DTYPES, check_dense
from normattn.score import Positions, Score, ScoreSpec

BOOLEAN = (torch.bool,)
# Differences are taken: an unsigned type would wrap around and show the future.
INTEGER = (torch.int64, torch.int32)
_NAMES = {BOOLEAN: "boolean", INTEGER: "int64 or int32", DTYPES: "floating"}


def check_tensor(
    name: str,
    x: Tensor | None,
    shapes: tuple[tuple[int, ...], ...],
    types: tuple[torch.dtype, ...],
    where: str = "",
) -> None:
    """Refuse a tensor of a shape or type that is not among these; None passes."""
    if x is None:
        return
    check_dense(name, x)
    if tuple(x.shape) not in shapes or x.dtype not in types:
        raise InputError(
            f"{name} must be {_NAMES[types]} of shape {' or '.join(map(str, shapes))}{where}, but "
            f"it is {x.dtype} of {tuple(x.shape)}"
        )


def check_input(name: str, x: Tensor, width: int) -> None:
    """Refuse what is no (B, T, width), and types that no kernel computes with."""
    if x.dim() != 3 or x.shape[-1] != width:
        raise InputError(
            f"{name} must be (batch, tokens, width) with a width of {width}, but it is "
            f"{tuple(x.shape)}"
        )
    if x.dtype not in DTYPES:
        raise InputError(
            f"{name} must be float32, float64, bfloat16 or float16, but it is {x.dtype}"
        )


def check_positions(
    name: str, positions: Tensor | None, batch: int, tokens: int, where: str = ""
) -> None:
    """Refuse positions that are not integers of shape (T,), (1, T) or (B, T)."""
    shapes: tuple[tuple[int, ...], ...] = ((tokens,), (batch, tokens))
    if batch != 1 and positions is not None and tuple(positions.shape) == (1, tokens):
        shapes = (*shapes, (1, tokens))
    check_tensor(name, positions, shapes, INTEGER, where)


def check_score(score: Score, q: Tensor, k: Tensor) -> None:
    """Refuse tensors of other heads than those that the score was built for."""
    expected = (score.heads, score.kv_heads, score.head_dim)
    if (q.shape[1], k.shape[1], q.shape[-1]) != expected:
        raise InputError(
            f"the score was built for {expected[0]} query heads, {expected[1]} key heads and "
            f"dimension {expected[2]}, but q is {tuple(q.shape)} and k is {tuple(k.shape)}"
        )


def check_dropout(dropout: float) -> None:
    """Refuse what is no probability below 1."""
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise InputError(f"dropout_p must be at least 0 and below 1, but it is {dropout}")


def check_mask(mask: Tensor | None, full: tuple[int, ...]) -> None:
    """Refuse an `attn_mask` of another type, or one that does not broadcast to (B, H, T, S)."""
    if mask is None:
        return
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


def check_documents(
    spec: ScoreSpec, documents: Tensor | None, batch: int, queries: int, keys: int
) -> None:
    """Refuse documents that the score does not keep apart, missing ones, and other shapes."""
    if spec.documents is None and documents is not None:
        raise InputError(
            f"documents are given, but {spec.name} attends across them: name {spec.name}-Packed"
        )
    if documents is None:
        if spec.documents is None:
            return
        raise InputError(
            f"{spec.name} keeps documents apart and needs documents=…, integers {(batch, keys)}"
        )
    if queries > keys:
        raise InputError(
            f"with documents the queries are the last of the keys, but there are {queries} "
            f"queries and {keys} keys"
        )
    check_tensor("documents", documents, ((batch, keys),), INTEGER)


def check_gate(spec: ScoreSpec, gate: Tensor | None, q: Tensor, v: Tensor) -> None:
    """Refuse a gate that the score does not have, one that is missing, and other shapes."""
    if spec.gate is None:
        if gate is not None:
            raise InputError(f"a gate is given, but {spec.name} has none: name {spec.name}-Gate")
        return
    wide = q.shape[1] * (v.shape[-1] if spec.gate.per == "feature" else 1)
    expected = (q.shape[0], q.shape[2], wide)
    if gate is None:
        raise InputError(
            f"{spec.name} gates its output and needs gate=…, W_g x of shape {expected}"
        )
    check_tensor("gate", gate, (expected,), DTYPES, f" for {spec.name}")


def check_forget(spec: ScoreSpec, forget: Tensor | None, q: Tensor, k: Tensor) -> None:
    """Refuse gates that the score does not have, gates that are missing, and other shapes."""
    if not spec.forgets:
        if forget is not None:
            raise InputError(f"forget is given, but {spec.name} forgets nothing: name FoX in it")
        return
    if q.shape[2] > k.shape[2]:
        raise InputError(
            f"with {spec.name} the queries are the last of the keys, but there are {q.shape[2]} "
            f"queries and {k.shape[2]} keys"
        )
    expected = (k.shape[0], k.shape[2], q.shape[1])
    if forget is None:
        raise InputError(f"{spec.name} needs forget=…, a gate's logit for each key, {expected}")
    check_tensor("forget", forget, (expected,), DTYPES)


def check_order(spec: ScoreSpec, at: Positions, documents: Tensor | None) -> None:
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
