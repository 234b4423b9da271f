"""Norms of keys, cosines, and the attention that keys receive, of one layer's prepared q and k.

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
"""Keys at the start of a text that are measured apart: models like to park attention there."""
TAIL = 0.001
"""The share of the cosines at L left out at either end of their range."""
REGIONS = ("near inside", "near outside", "far inside", "far outside")
"""Pairs by i − j < L (trained) or ≥ L (never trained), and by their cosine's trained range."""

# Norms that differ by less than this share of their mean differ by rounding only.
_SAME = 1e-4
# Of a mean: finer differences between two keys are what turning them leaves of one norm.
_GRAIN = 1e-5
# Query rows whose pairs are held at once.
_ROWS = 64


@dataclass(frozen=True)
class Seen:
    """One layer's score at work: the keys as they came in, and what a kernel was given."""

    layer: int
    key: Float[Tensor, "b g s d"]
    inputs: AttentionInputs


@contextmanager
def watching(model: nn.Module, see: Callable[[Seen], None]) -> Iterator[None]:
    """Call `see` after each `Score` of `model` has prepared its queries and keys, while inside.

    Layers count from 0 in the order of the model's modules. The hooks are gone afterwards, whatever
    happened. Raises `InputError` for a model without any `Score`, and, while it reads, for scores
    whose pairs are not all of one prepared q and k: remapped positions, moving frequencies, packed
    documents.
    """
    number = {score: layer for layer, score in enumerate(layer_names(model))}

    def hook(score: Score, given: tuple[Any, ...], inputs: AttentionInputs) -> None:
        spec = score.spec
        if inputs.two_regimes or spec.blockwise or spec.documents is not None:
            raise InputError(
                f"{spec.name} scores a pair by more than one prepared query and key; switch off "
                "the method to inspect the score"
            )
        if spec.forgets:
            raise InputError(
                f"{spec.name} has a forgetting gate, which is added to the score later"
            )
        see(Seen(number[score], given[1], inputs))

    with ExitStack() as stack:
        for score in number:
            stack.callback(score.register_forward_hook(hook).remove)
        yield


def rank_correlation(a: Float[Tensor, "*rows n"], b: Float[Tensor, "*rows n"]) -> Tensor:
    """Spearman's correlation along the last axis, in float64: Pearson's of the ranks.

    Equal values share the mean of their ranks; where one side is all equal, the result is NaN.
    """
    x, y = _ranks(a), _ranks(b)
    x, y = x - x.mean(-1, keepdim=True), y - y.mean(-1, keepdim=True)
    scale = (x.square().sum(-1) * y.square().sum(-1)).sqrt()
    return torch.where(scale > 0, (x * y).sum(-1) / scale, torch.nan)


def _ranks(values: Tensor) -> Tensor:
    """Ranks in float64, ties at their mean."""
    from scipy.stats import rankdata  # Slow to import.

    return torch.from_numpy(rankdata(values.double().cpu(), axis=-1)).to(values.device)


def mean_direction(k: Float[Tensor, "b g s d"]) -> Float[Tensor, "b g"]:
    """‖mean_j k_j/‖k_j‖‖² in float64: the share of the energy of unit keys in their mean.

    1 where all keys point the same way, 1/S of S keys that have nothing in common.
    """
    return normalize(k.double(), dim=-1).mean(-2).square().sum(-1)


def spread(norms: Float[Tensor, "*rows n"]) -> Float[Tensor, "*rows"]:
    """Standard deviation of the norms over their mean."""
    return norms.std(-1, correction=0) / norms.mean(-1)


def varied(norms: Float[Tensor, "*rows n"]) -> Tensor:
    """Whether norms differ by more than rounding: after a norm without gain they do not."""
    return spread(norms) > _SAME


def position_correlation(norms: Float[Tensor, "*rows n"]) -> Float[Tensor, "*rows"]:
    """Spearman's correlation of ‖k_j‖ with j, for j ≥ F: +1 where norms only grow.

    Norms are compared to 1e-5 of their mean: a token that comes twice has one norm in the lowest
    layer, and rounding must not rank it. NaN where norms are all equal or fewer than two are left.
    """
    rest = norms[..., FIRST:]
    rest = (rest / (rest.mean(-1, keepdim=True) * _GRAIN)).round()
    order = torch.arange(rest.shape[-1], dtype=torch.float64, device=norms.device)
    return rank_correlation(rest, order.expand(rest.shape))


@torch.no_grad()
def received_attention(seen: Seen, horizon: int) -> Float[Tensor, "b h kept"]:
    """r_j = mean over i = j … j + horizon − 1 of α_ij · (i + 1), for the keys j ≤ S − horizon.

    Every key is looked at by the same number of queries at the same distances, so that neither its
    place nor the length of the text decides; 1 is what uniform attention gives. Computed in blocks
    of query rows: no (T, S) matrix is kept. Shapes: (B, H, S − horizon + 1). Raises `InputError`
    for a horizon that is not in 1 … S.
    """
    keys = seen.inputs.k.shape[2]
    if not 1 <= horizon <= keys:
        raise InputError(f"a horizon must lie in 1 … {keys}, the number of keys, got {horizon}")
    kept = keys - horizon + 1
    total = seen.inputs.q.new_zeros(*seen.inputs.q.shape[:2], kept, dtype=torch.float64)
    key = torch.arange(kept, device=total.device)
    for query in torch.split(torch.arange(keys, device=total.device), _ROWS):
        behind = query[:, None] - key
        counted = (behind >= 0) & (behind < horizon)
        share = attention_of(seen.inputs, query)[..., :kept].double() * (query[:, None] + 1)
        total += (share * counted).sum(-2)
    return total / horizon


@torch.no_grad()
def count_cosines(seen: Seen) -> CosineCounts:
    """Count cos(P_i N(q_i), P_j N(k_j)) of every query with every key that it sees, in float64.

    Rotated and normalised as the score has them, so that the length of the text matters.
    """
    p = seen.inputs
    counted = cosine_counts(replace(p, q=p.q.double(), k=p.k.double()))
    return CosineCounts(counted.counts[:, :, 0], counted.least[:, :, 0], counted.most[:, :, 0])


def trained_range(counts: Array) -> NDArray[np.bool_]:
    """The bins of a head's range, (…, bins), from its cosines' histogram at L.

    Those that hold any of the cosines but for `TAIL` of them at either end.
    """
    shares = counts.cumsum(-1) / counts.sum(-1, keepdims=True)
    before = np.concatenate((np.zeros_like(shares[..., :1]), shares[..., :-1]), axis=-1)
    return np.asarray((shares > TAIL) & (before < 1 - TAIL))


@torch.no_grad()
def pairs_by_region(
    seen: Seen, inside: Bool[Tensor, "h bins"], length: int
) -> tuple[Float[Tensor, "b h 4"], Float[Tensor, "b h 4"]]:
    """Visible pairs and attention in each of the `REGIONS`.

    Of pairs their count; of attention Σ_i Σ_j α_ij over the queries at i ≥ L = `length` alone,
    which are those that can see a distance never trained. `inside` is each head's `trained_range`.
    """
    q, k = (normalize(x.double(), dim=-1) for x in (seen.inputs.q, seen.inputs.k))
    pairs = q.new_zeros(*q.shape[:2], len(REGIONS))
    attention = torch.zeros_like(pairs)
    head = torch.arange(q.shape[1], device=q.device)[:, None, None]
    for rows, cosines, distance, visible in _pairs(seen, q, k):
        bin_of = cosines.clamp(-1, 1).add_(1).mul_(BINS / 2).long()
        outside = (~inside).double()[head, bin_of.clamp_(max=BINS - 1)]
        far = _aligned(distance >= length)
        pairs += _by_region(visible, outside, far)
        late = _aligned((seen.inputs.mask.query[..., rows] >= length)[..., None])
        weights = attention_of(seen.inputs, torch.arange(rows.start, rows.stop, device=q.device))
        attention += _by_region(weights.double() * late, outside, far)
    return pairs, attention


@torch.no_grad()
def products_by_distance(
    seen: Seen, edges: Int[Tensor, " edges"]
) -> tuple[Float[Tensor, "b h bins"], Float[Tensor, "b h bins"]]:
    """Σ q_i · k_j over the visible pairs by their distance i − j, and how many pairs those are.

    Bin n holds the distances from edges[n] to edges[n + 1] − 1. The products are logits before
    biases and caps.
    """
    q, k = seen.inputs.q.double(), seen.inputs.k.double()
    total = q.new_zeros(*q.shape[:2], len(edges) - 1)
    count = torch.zeros_like(total)
    for _, products, distance, visible in _pairs(seen, q, k):
        for n in range(len(edges) - 1):
            held = _aligned((distance >= edges[n]) & (distance < edges[n + 1])) * visible
            total[..., n] += (products * held).sum((-1, -2))
            count[..., n] += held.sum((-1, -2))
    return total, count


def _pairs(
    seen: Seen, q: Float[Tensor, "b h t d"], k: Float[Tensor, "b g s d"]
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Blocks of query rows: which, their products q kᵀ, distances i − j, 1 where a key is seen.

    No (T, S) matrix is kept.
    """
    mask, every = seen.inputs.mask, slice(None)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2)
    for first in range(0, q.shape[2], _ROWS):
        rows = slice(first, min(first + _ROWS, q.shape[2]))
        products, hidden = q[:, :, rows] @ k, mask.hidden(rows, every)
        visible = torch.ones_like(products) if hidden is None else _aligned(~hidden)
        yield rows, products, mask.distance(rows, every), visible.expand(products.shape)


def _aligned(flags: Tensor) -> Float[Tensor, "b h r s"]:
    """1 or 0 for flags (r, s), (b, r, s) or (b, h, r, s), to be broadcast over texts and heads."""
    flags = flags[:, None] if flags.dim() == 3 else flags
    return flags.double().expand(*[1] * (4 - flags.dim()), *flags.shape)


def _by_region(values: Tensor, outside: Tensor, far: Tensor) -> Float[Tensor, "b h 4"]:
    """Sums of values (b, h, r, s) in each of the `REGIONS`; `outside` and `far` are 1 or 0."""
    parts = [
        (values * distance * cosine).sum((-1, -2))
        for distance in (1 - far, far)
        for cosine in (1 - outside, outside)
    ]
    return torch.stack(parts, -1)
