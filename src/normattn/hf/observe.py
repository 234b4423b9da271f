"""Collect attention statistics of a transformers model while it runs or trains.

Each layer computes its output as before. In addition, its queries and keys go through normattn's
kernel, without gradients and tile by tile, which reports to an observer (`kernels.stats`). An
extended model uses that kernel itself.

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
            q, k, v = (tensor.detach() for tensor in (query, key, value))
            mask, padding = _convert_mask(module, q, k.shape[2], attention_mask, kwargs)
            query_padding = padding if padding is not None and q.shape[2] == k.shape[2] else None
            announce_layer(module, q, k, (query_padding, padding), (mask.query, mask.key))
            scale, sink = kwargs.get("scaling"), kwargs.get("s_aux")
            scaled = q * (q.shape[-1] ** -0.5 if scale is None else scale)
            sink = None if sink is None else sink.detach()
            inputs = AttentionInputs(scaled, k, v, mask, cap=kwargs.get("softcap"), sink=sink)
            observed = attend(match_autocast(inputs))
    out = attention(module, query, key, value, attention_mask, **kwargs)
    if observed is not None and module not in _CHECKED and not kwargs.get("dropout"):
        observed = observed.transpose(1, 2)
        rows = (observed != 0).any(-1, keepdim=True)  # that see a key
        error = ((out[0].detach() - observed) * rows).abs().nan_to_num(posinf=torch.inf).amax()
        share = float(error / observed.abs().amax().clamp(min=1e-30)) if rows.any() else 0.0
        if share > (_TOLERANCE if observed.dtype in FULL_PRECISION else _HALF_TOLERANCE):
            raise InputError(
                f"{type(module).__name__} does not compute the attention that can be observed: its "
                f"output differs by {share:.1e} of the largest"
            )
        _CHECKED.add(module)
    return out


def _convert_mask(
    module: nn.Module, q: Tensor, num_keys: int, mask: Tensor | None, kwargs: Mapping[str, Any]
) -> tuple[AttentionMask, Bool[Tensor, "b s"] | None]:
    """transformers' mask (None, a token mask or a pair mask) as normattn's, and padding keys."""
    num_queries, padding = q.shape[2], None
    pairs = mask is not None and mask.dim() == 4
    if mask is not None and pairs:
        mask = mask[..., :num_keys]
        visible = ~hidden_keys(mask)
        adds = mask.dtype != torch.bool and bool((mask != 0)[visible].any())
        mask = torch.where(visible, mask, -torch.inf) if adds else visible
        unseen = ~visible.any(1).any(1)
        padding = unseen if bool(unseen.any()) and num_queries == num_keys else None
    elif mask is not None:
        padding = ~mask[:, -num_keys:].bool()
    positions = Positions.of(num_queries, num_keys, True, q.device, padding)
    queries, keys = positions.query, positions.key
    if pairs:
        return AttentionMask(False, queries, keys, False, attn_mask=mask), padding
    causal, window = kwargs.get("is_causal"), kwargs.get("sliding_window")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if not causal or num_queries < 2:
        return AttentionMask(False, queries, keys, False, padding), padding
    return AttentionMask(True, queries, keys, positions.regular, padding, window=window), padding
