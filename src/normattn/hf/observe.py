"""Observe the attention layers of a transformers model while it reads or trains.

Each layer's own attention computes as ever. Beside it the same queries and keys go through our
kernel, without gradients and tile by tile, for an observer (`kernels.stats`). The model's outputs
stay what they are unobserved, and no N × N matrix is made. An extended model attends by our kernel
anyway and is observed there.

Legend: B batch, H query heads, G key heads, T queries, S keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.hf.attention_fn import ATTRIBUTE, one_type
from normattn.hf.probe import EXACT, AttentionFunction, hidden, recording
from normattn.kernels import AttentionInputs, AttentionMask, attend
from normattn.kernels.stats import AttentionStatistics, announce_layer, observers, observing
from normattn.score import Positions

_TOLERANCE, _HALF_TOLERANCE = 1e-3, 5e-2
_CONFIRMED: WeakSet[nn.Module] = WeakSet()


@contextmanager
def observable(model: nn.Module) -> Iterator[None]:
    """Let the layers of a model show their queries and keys while inside, if someone observes.

    Norms are those of queries and keys as attention is given them: normalised and rotated, before
    the scale. A layer whose output differs from what was observed raises `InputError`.
    Configurations are put back afterwards, whatever happened; a compiled model runs uncompiled.
    """
    with recording(model, _attend, own=True):
        yield


@contextmanager
def collect_statistics(model: nn.Module) -> Iterator[AttentionStatistics]:
    """Collect statistics of every attention layer while inside, named by its path."""
    statistics = AttentionStatistics(paths(model))
    with observable(model), observing(statistics):
        yield statistics


def paths(model: nn.Module) -> Mapping[nn.Module, tuple[str, ...]]:
    """Every module of a model, and the path by which it is called."""
    return {module: (path,) for path, module in model.named_modules()}


def _attend(
    own: AttentionFunction,
    module: nn.Module,
    query: Float[Tensor, "b h t d"],
    key: Float[Tensor, "b g s d"],
    value: Float[Tensor, "b g s e"],
    attention_mask: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, Any]:
    """The layer's own attention, and the same with normattn's kernel for the active observer."""
    ours: Tensor | None = None
    if ATTRIBUTE in module.__dict__:  # an extended layer attends by our kernel anyway
        at = Positions.of(query.shape[2], key.shape[2], True, query.device)
        announce_layer(module, query, key, None, None, at.query, at.key)
    elif observers():
        with torch.no_grad():
            ours = _observed(module, query, key, value, attention_mask, more)
    out = own(module, query, key, value, attention_mask, **more)
    if ours is not None and module not in _CONFIRMED and not more.get("dropout"):
        _confirm(module, ours.transpose(1, 2), out[0].detach())
    return out


def _observed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    given: Mapping[str, Any],
) -> Float[Tensor, "b h t e"]:
    """The same attention, computed where it is observed."""
    q, k, v = (tensor.detach() for tensor in (query, key, value))
    scale = given.get("scaling")
    seen, padding = _visibility(module, q, k.shape[2], mask, given)
    own = padding if padding is not None and q.shape[2] == k.shape[2] else None
    announce_layer(module, q, k, own, padding, seen.query, seen.key)
    cap, sink = given.get("softcap"), given.get("s_aux")
    sink = None if sink is None else sink.detach()
    scaled = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    output: Tensor = attend(one_type(AttentionInputs(scaled, k, v, seen, cap=cap, sink=sink)))
    return output


def _confirm(
    module: nn.Module, ours: Float[Tensor, "b t h e"], own: Float[Tensor, "b t h e"]
) -> None:
    """Raise `InputError` unless what was observed is what the layer computed; once a layer.

    Rows that see no key are left out.
    """
    rows = (ours != 0).any(-1, keepdim=True)
    off = ((own - ours) * rows).abs().nan_to_num(posinf=torch.inf).amax()
    share = float(off / ours.abs().amax().clamp(min=1e-30)) if rows.any() else 0.0
    if share > (_TOLERANCE if ours.dtype in EXACT else _HALF_TOLERANCE):
        raise InputError(
            f"{type(module).__name__} does not compute the attention that can be observed: its "
            f"output differs by {share:.1e} of the largest"
        )
    _CONFIRMED.add(module)


def _visibility(
    module: nn.Module, q: Tensor, keys: int, mask: Tensor | None, given: Mapping[str, Any]
) -> tuple[AttentionMask, Bool[Tensor, "b s"] | None]:
    """Who sees whom by a mask of transformers (None, of tokens, of pairs), and which keys pad."""
    queries = q.shape[2]
    where = torch.arange(keys, device=q.device)
    if mask is not None and mask.dim() == 4:
        mask = mask[..., :keys]
        if mask.dtype != torch.bool:
            hides = hidden(mask)
            adds = bool((mask != 0)[~hides].any())
            mask = torch.where(hides, -torch.inf, mask) if adds else ~hides
        seen = mask if mask.dtype == torch.bool else mask > -torch.inf
        unseen = ~seen.any(1).any(1)  # these keys are padding
        known = bool(unseen.any()) and queries == keys
        every_pair = AttentionMask(False, where[keys - queries :], where, False, attn_mask=mask)
        return every_pair, unseen if known else None
    causal = given.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    padding = None if mask is None else ~mask[:, -keys:].bool()
    if not causal or queries < 2:
        return AttentionMask(False, where[keys - queries :], where, False, padding), padding
    at = Positions.of(queries, keys, True, q.device)
    regular, window = at.regular and padding is None, given.get("sliding_window")
    return AttentionMask(True, at.query, at.key, regular, padding, window=window), padding
