"""Norms of keys, cosines, and received attention, from the prepared q and k of a layer.

Legend: B texts, H query heads, G key heads, S keys, r query rows of a block; F = `FIRST`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import normalize

from normattn.errors import InputError
from normattn.kernels import AttentionInputs
from normattn.kernels.cosines import BINS, CosineCounts, cosine_counts
from normattn.lab.diagnostics.attention import attention_of
from normattn.lab.diagnostics.collector import layer_names
from normattn.score import Score

Array = NDArray[np.float64]
FIRST = 4
"""Keys that the correlation with the position leaves out: the first are often attention sinks."""
TAIL = 0.001
"""The share of cosines at L that is cut off at either end of their range."""
REGIONS = ("near inside", "near outside", "far inside", "far outside")
"""Pairs by distance i − j < L (near) or ≥ L (far), inside or outside the trained cosines."""

MIN_SPREAD = 1e-4
"""Norms of a smaller `spread` differ by rounding only, as after a normalisation without gain."""
_BLOCK_ROWS = 64


@dataclass(frozen=True)
class LayerInputs:
    """The keys before a layer's score, and the attention inputs after it."""

    layer: int
    key: Float[Tensor, "b g s d"]
    inputs: AttentionInputs


@contextmanager
def observe_scores(model: nn.Module, record: Callable[[LayerInputs], None]) -> Iterator[None]:
    """Inside, call `record` after each `Score` of `model` has prepared its queries and keys.

    Layers count from 0 in the order of the model's modules. Raises `InputError` for a model without
    a `Score`, and in the forward pass for scores with more than one prepared q and k: remapped
    positions, block-dependent frequencies, packed documents.
    """
    layers = {score: layer for layer, score in enumerate(layer_names(model))}

    def hook(score: Score, args: tuple[Any, ...], inputs: AttentionInputs) -> None:
        spec = score.spec
        if inputs.two_regimes or spec.blockwise or spec.documents is not None:
            raise InputError(
                f"{spec.name} scores a pair by more than one prepared query and key; switch off "
                "the method to inspect the score"
            )
        if spec.forgets:
            raise InputError(f"{spec.name} has a forgetting gate, which is added later")
        record(LayerInputs(layers[score], args[1], inputs))

    with ExitStack() as stack:
        for score in layers:
            stack.callback(score.register_forward_hook(hook).remove)
        yield


def rank_correlation(a: Float[Tensor, "*rows n"], b: Float[Tensor, "*rows n"]) -> Tensor:
    """Return Spearman's correlation along the last axis, in float64; NaN if a side is constant."""
    from scipy.stats import rankdata  # Slow to import.

    x, y = (torch.from_numpy(rankdata(x.double().cpu(), axis=-1)).to(x.device) for x in (a, b))
    x, y = x - x.mean(-1, keepdim=True), y - y.mean(-1, keepdim=True)
    scale = (x.square().sum(-1) * y.square().sum(-1)).sqrt()
    return torch.where(scale > 0, (x * y).sum(-1) / scale, torch.nan)


def mean_direction(k: Float[Tensor, "b g s d"]) -> Float[Tensor, "b g"]:
    """Return ‖mean_j k_j/‖k_j‖‖² in float64: 1 for one direction, 1/S for orthogonal keys."""
    return normalize(k.double(), dim=-1).mean(-2).square().sum(-1)


def spread(norms: Float[Tensor, "*rows n"]) -> Float[Tensor, "*rows"]:
    """Return the standard deviation of the norms over their mean."""
    return norms.std(-1, correction=0) / norms.mean(-1)


def position_correlation(norms: Float[Tensor, "*rows n"]) -> Float[Tensor, "*rows"]:
    """Return Spearman's correlation of ‖k_j‖ with j, for j ≥ F: +1 if norms only grow.

    Norms are rounded to 1e-5 of their mean: equal tokens have equal norms in the lowest layer, and
    rounding errors must not rank them. NaN if all norms are equal or fewer than two remain.
    """
    norms = norms[..., FIRST:]
    norms = (norms / (norms.mean(-1, keepdim=True) * 1e-5)).round()
    order = torch.arange(norms.shape[-1], dtype=torch.float64, device=norms.device)
    return rank_correlation(norms, order.expand(norms.shape))


@torch.no_grad()
def received_attention(captured: LayerInputs, horizon: int) -> Float[Tensor, "b h kept"]:
    """Return r_j = mean over i = j … j + horizon − 1 of α_ij · (i + 1), for keys j ≤ S − horizon.

    The same number of queries at the same distances counts for every key, so that its position and
    the text's length do not matter. Uniform attention gives 1. Computed in blocks of query rows,
    without a (T, S) matrix. Shape: (B, H, S − horizon + 1).
    """
    keys = captured.inputs.k.shape[2]
    count = keys - horizon + 1
    total = captured.inputs.q.new_zeros(*captured.inputs.q.shape[:2], count, dtype=torch.float64)
    key = torch.arange(count, device=total.device)
    for query in torch.split(torch.arange(keys, device=total.device), _BLOCK_ROWS):
        distance = query[:, None] - key
        within = (distance >= 0) & (distance < horizon)
        weights = attention_of(captured.inputs, query)[..., :count].double()
        total += (weights * (query[:, None] + 1) * within).sum(-2)
    return total / horizon


@torch.no_grad()
def count_cosines(captured: LayerInputs) -> CosineCounts:
    """Count cos(P_i N(q_i), P_j N(k_j)) over all visible pairs, in float64."""
    p = captured.inputs
    counted = cosine_counts(replace(p, q=p.q.double(), k=p.k.double()))
    return CosineCounts(counted.counts[:, :, 0], counted.least[:, :, 0], counted.most[:, :, 0])


def trained_range(counts: Array) -> NDArray[np.bool_]:
    """Return the bins of the histogram at L, (…, bins), without `TAIL` of it at either end."""
    shares = counts.cumsum(-1) / counts.sum(-1, keepdims=True)
    before = np.concatenate((np.zeros_like(shares[..., :1]), shares[..., :-1]), axis=-1)
    return np.asarray((shares > TAIL) & (before < 1 - TAIL))


@torch.no_grad()
def pairs_by_region(
    captured: LayerInputs, inside: Bool[Tensor, "h bins"], length: int
) -> tuple[Float[Tensor, "b h 4"], Float[Tensor, "b h 4"]]:
    """Return the visible pairs and the attention in each of the `REGIONS`.

    Attention is Σ_i Σ_j α_ij over the queries at i ≥ L = `length`, which can see untrained
    distances. `inside` is each head's `trained_range`.
    """
    q, k = (normalize(x.double(), dim=-1) for x in (captured.inputs.q, captured.inputs.k))
    pairs = q.new_zeros(*q.shape[:2], len(REGIONS))
    attention = torch.zeros_like(pairs)
    head = torch.arange(q.shape[1], device=q.device)[:, None, None]
    for rows, cosines, distance, visible in _pairs(captured, q, k):
        bin_of = cosines.clamp(-1, 1).add_(1).mul_(BINS / 2).long()
        outside = (~inside).double()[head, bin_of.clamp_(max=BINS - 1)]
        far = _as_mask(distance >= length)
        pairs += _by_region(visible, outside, far)
        late = _as_mask((captured.inputs.mask.query[..., rows] >= length)[..., None])
        queries = torch.arange(rows.start, rows.stop, device=q.device)
        weights = attention_of(captured.inputs, queries).double()
        attention += _by_region(weights * late, outside, far)
    return pairs, attention


@torch.no_grad()
def products_by_distance(
    captured: LayerInputs, edges: Int[Tensor, " edges"]
) -> tuple[Float[Tensor, "b h bins"], Float[Tensor, "b h bins"]]:
    """Return Σ q_i · k_j over the visible pairs by distance i − j, and the number of pairs.

    Bin n has the distances edges[n] … edges[n + 1] − 1. Products have no biases or caps.
    """
    q, k = captured.inputs.q.double(), captured.inputs.k.double()
    total = q.new_zeros(*q.shape[:2], len(edges) - 1)
    count = torch.zeros_like(total)
    for _, products, distance, visible in _pairs(captured, q, k):
        for n in range(len(edges) - 1):
            in_bin = _as_mask((distance >= edges[n]) & (distance < edges[n + 1])) * visible
            total[..., n] += (products * in_bin).sum((-1, -2))
            count[..., n] += in_bin.sum((-1, -2))
    return total, count


def _pairs(
    captured: LayerInputs, q: Float[Tensor, "b h t d"], k: Float[Tensor, "b g s d"]
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Yield blocks of query rows: the rows, q kᵀ, distances i − j, and 1 for visible keys."""
    mask, all_keys = captured.inputs.mask, slice(None)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2)
    for first in range(0, q.shape[2], _BLOCK_ROWS):
        rows = slice(first, min(first + _BLOCK_ROWS, q.shape[2]))
        products, hidden = q[:, :, rows] @ k, mask.hidden(rows, all_keys)
        visible = torch.ones_like(products) if hidden is None else _as_mask(~hidden)
        yield rows, products, mask.distance(rows, all_keys), visible.expand(products.shape)


def _as_mask(flags: Tensor) -> Float[Tensor, "b h r s"]:
    """Return flags (r, s), (b, r, s) or (b, h, r, s) as 1 or 0 with four dimensions."""
    flags = flags[:, None] if flags.dim() == 3 else flags
    return flags.double().expand(*[1] * (4 - flags.dim()), *flags.shape)


def _by_region(values: Tensor, outside: Tensor, far: Tensor) -> Float[Tensor, "b h 4"]:
    """Sum values (b, h, r, s) in each of the `REGIONS`; `outside` and `far` are 1 or 0."""
    regions = [
        (values * distance * cosine).sum((-1, -2))
        for distance in (1 - far, far)
        for cosine in (1 - outside, outside)
    ]
    return torch.stack(regions, -1)
