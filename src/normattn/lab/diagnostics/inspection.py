"""`inspect_model`: attention statistics of every layer on given texts.

Legend: H heads, P bins of the position.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import polars as pl
import torch
from jaxtyping import Shaped
from numpy.typing import NDArray
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.kernels.cosines import BINS
from normattn.kernels.stats import EXTREMES
from normattn.lab.diagnostics.collector import Collector, collecting
from normattn.models.utils import without_dropout

Array = NDArray[np.float64]
Collecting = Callable[..., AbstractContextManager[Collector]]


def inspect_model(
    model: nn.Module,
    rows: Shaped[Tensor, "b *t"],
    *,
    bins: int = 16,
    reach: bool = True,
    cosines: bool = False,
    tokens_per_batch: int = 8192,
    read: Callable[[Tensor], Any] | None = None,
    length: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    collect: Collecting = collecting,
) -> pl.DataFrame:
    """Measure entropy, log-sum-exp, largest logit, sinks and norms by layer, head and position.

    Returns rows of the measurements table without an identity, which `with_identity` adds. `layer`
    counts from the bottom; the factor `layer` is its name. Read them with `by_head` and
    `by_position`. Memory is not quadratic in the length. Dropout is off.

    Args:
        model: any model with scores. An active inference-time method stays active.
        rows: token ids (B, T), or any rows that `read` accepts.
        bins: number of equal position bins, at most the number of positions.
        reach: also attention beyond the training length and at unseen angles.
        cosines: also a histogram of cos(q, k), which costs another product.
        tokens_per_batch: bounds memory.
        read: runs the model on some rows; by default `model.hidden`, or the model itself.
        length: number of positions in a row, by default T.
        progress: called with the number of rows done and the total.
        collect: makes the collector; `cli.inspect.observing` for models of transformers.

    Raises `InputError` for a model without a score or texts without a token.
    """
    if not rows.numel() or (rows.dim() != 2 and length is None):
        shape = tuple(rows.shape)
        raise InputError(f"texts must be token ids (batch, tokens), but they are {shape}")
    reader: Callable[[Tensor], Any] = getattr(model, "hidden", model) if read is None else read
    count, length = rows.shape[0], length or rows.shape[1]
    bins = max(1, min(bins, length))
    edges = [round(length * edge / bins) for edge in range(bins + 1)]
    step = max(1, tokens_per_batch // length)
    with without_dropout(model), torch.no_grad():
        with collect(model, edges, reach=reach, cosines=cosines) as collector:
            for first in range(0, count, step):
                reader(rows[first : first + step])
                progress(min(first + step, count), count)
        return collector.measured()


def totals(measured: pl.DataFrame, statistic: str, layer: int) -> tuple[Array, Array]:
    """Return the sums and counts of a statistic, (H, P); (0, 0) if the layer does not have it."""
    rows = measured.filter(statistic=statistic, layer=layer).sort("head", "bin")
    shape = (rows["head"].n_unique(), -1) if rows.height else (0, 0)
    total, count = (rows[name].to_numpy().reshape(shape) for name in ("sum", "of"))
    return total, count


def by_position(measured: pl.DataFrame, statistic: str, layer: int) -> Array:
    """Return a statistic by head and position bin, (H, P); NaN if the count is 0."""
    return _divide(*totals(measured, statistic, layer))


def by_head(measured: pl.DataFrame, statistic: str, layer: int) -> Array:
    """Return a statistic over all positions, (H,): the mean, or the extreme for extremes."""
    if (sign := EXTREMES.get(statistic)) is not None:
        grid = by_position(measured, statistic, layer)
        return sign * np.asarray(np.fmax.reduce(sign * grid, axis=-1, initial=np.nan))
    return _divide(*(array.sum(-1) for array in totals(measured, statistic, layer)))


def _divide(total: Array, count: Array) -> Array:
    return np.where(count > 0, total / np.where(count > 0, count, 1.0), np.nan)


def cosine_counts(measured: pl.DataFrame, layer: int) -> Array:
    """Return the histograms of cos(q, k) over −1 … 1, (H, P, bins); empty if not measured."""
    rows = measured.filter(statistic="cosine", layer=layer)
    if not rows.height:
        return np.zeros((0, 0, BINS))
    ordered = rows.sort("head", "factor.position", "bin")["sum"].to_numpy()
    return ordered.reshape(rows["head"].n_unique(), -1, BINS)
