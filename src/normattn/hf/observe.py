"""Collect attention statistics of a transformers model while it runs or trains.

Each layer computes its output as before. In addition, its queries and keys go through normattn's
kernel, without gradients and tile by tile, and the kernel reports to an observer (`kernels.stats`).
So outputs do not change, and no N × N matrix is stored. An extended model uses normattn's kernel
itself and is observed there.

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
from normattn.hf.attention_fn import LAYER_ATTRIBUTE, match_autocast
from normattn.hf.probe import AttentionFunction, hidden_keys, recording
from normattn.hf.rotations import FULL_PRECISION
from normattn.kernels import AttentionInputs, AttentionMask, attend
from normattn.kernels.stats import AttentionStatistics, announce_layer, observers, observing
from normattn.score import Positions

_TOLERANCE, _HALF_TOLERANCE = 1e-3, 5e-2
_CHECKED: WeakSet[nn.Module] = WeakSet()


@contextmanager
def observable(model: nn.Module) -> Iterator[None]:
    """Let the layers of a model report to the active observers while inside.

    Queries and keys are those that attention gets: normalised and rotated, before the scale. Raises
    `InputError` for a layer whose output differs from the observed attention. Configurations are
    restored afterwards. A compiled model runs uncompiled.
    """
    with recording(model, _attend, keep_implementation=True):
        yield


@contextmanager
def collect_statistics(model: nn.Module) -> Iterator[AttentionStatistics]:
    """Collect statistics of every attention layer while inside, named by its path."""
    statistics = AttentionStatistics(paths(model))
    with observable(model), observing(statistics):
        yield statistics


def paths(model: nn.Module) -> Mapping[nn.Module, tuple[str, ...]]:
    """The path of every module of a model, for an extended layer by its score."""
    names = ((x.__dict__.get(LAYER_ATTRIBUTE), x, path) for path, x in model.named_modules())
    return {x if layer is None else layer.score: (path,) for layer, x, path in names}


def _attend(
    attention: AttentionFunction,
    module: nn.Module,
    query: Float[Tensor, "b h t d"],
    key: Float[Tensor, "b g s d"],
    value: Float[Tensor, "b g s e"],
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """The layer's own attention, and the same with normattn's kernel for the observers."""
    observed: Tensor | None = None
    if observers() and LAYER_ATTRIBUTE not in module.__dict__:  # an extended layer reports itself
        with torch.no_grad():
            observed = _attend_observed(module, query, key, value, attention_mask, kwargs)
    out = attention(module, query, key, value, attention_mask, **kwargs)
    if observed is not None and module not in _CHECKED and not kwargs.get("dropout"):
        _check_output(module, observed.transpose(1, 2), out[0].detach())
    return out


def _attend_observed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    kwargs: Mapping[str, Any],
) -> Float[Tensor, "b h t e"]:
    q, k, v = (tensor.detach() for tensor in (query, key, value))
    scale = kwargs.get("scaling")
    attention_mask, padding = _convert_mask(module, q, k.shape[2], mask, kwargs)
    query_padding = padding if padding is not None and q.shape[2] == k.shape[2] else None
    positions = attention_mask.query, attention_mask.key
    announce_layer(module, q, k, (query_padding, padding), positions)
    cap, sink = kwargs.get("softcap"), kwargs.get("s_aux")
    sink = None if sink is None else sink.detach()
    scaled = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    inputs = AttentionInputs(scaled, k, v, attention_mask, cap=cap, sink=sink)
    output: Tensor = attend(match_autocast(inputs))
    return output


def _check_output(
    module: nn.Module, observed: Float[Tensor, "b t h e"], output: Float[Tensor, "b t h e"]
) -> None:
    """Raise `InputError` unless a layer gives the observed output in rows that see a key."""
    rows = (observed != 0).any(-1, keepdim=True)
    error = ((output - observed) * rows).abs().nan_to_num(posinf=torch.inf).amax()
    share = float(error / observed.abs().amax().clamp(min=1e-30)) if rows.any() else 0.0
    if share > (_TOLERANCE if observed.dtype in FULL_PRECISION else _HALF_TOLERANCE):
        raise InputError(
            f"{type(module).__name__} does not compute the attention that can be observed: its "
            f"output differs by {share:.1e} of the largest"
        )
    _CHECKED.add(module)


def _convert_mask(
    module: nn.Module, q: Tensor, num_keys: int, mask: Tensor | None, kwargs: Mapping[str, Any]
) -> tuple[AttentionMask, Bool[Tensor, "b s"] | None]:
    """transformers' mask (None, a token mask or a pair mask) as normattn's, and padding keys."""
    num_queries, padding = q.shape[2], None
    pairs = mask is not None and mask.dim() == 4
    if mask is not None and pairs:
        mask = mask[..., :num_keys]
        if mask.dtype != torch.bool:
            hidden = hidden_keys(mask)
            adds = bool((mask != 0)[~hidden].any())
            mask = torch.where(hidden, -torch.inf, mask) if adds else ~hidden
        visible = mask if mask.dtype == torch.bool else mask > -torch.inf
        unseen = ~visible.any(1).any(1)
        padding = unseen if bool(unseen.any()) and num_queries == num_keys else None
    elif mask is not None:
        padding = ~mask[:, -num_keys:].bool()
    positions = Positions.of(num_queries, num_keys, True, q.device, padding)
    queries, keys = positions.query, positions.key
    if pairs:
        return AttentionMask(False, queries, keys, False, attn_mask=mask), padding
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if not causal or num_queries < 2:
        return AttentionMask(False, queries, keys, False, padding), padding
    window = kwargs.get("sliding_window")
    return AttentionMask(True, queries, keys, positions.regular, padding, window=window), padding
