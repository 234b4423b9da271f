"""`inspect_model`: what every layer's attention does with given texts.

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
POSITION_BINS = 16


def inspect_model(
    model: nn.Module,
    rows: Shaped[Tensor, "b *t"],
    *,
    bins: int = POSITION_BINS,
    reach: bool = True,
    cosines: bool = False,
    tokens_per_batch: int = 8192,
    read: Callable[[Tensor], Any] | None = None,
    length: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    collect: Collecting = collecting,
) -> pl.DataFrame:
    """Entropy, log-sum-exp, largest logit, sinks and norms of every layer, head and position bin.

    As rows of the frame without an identity (`normattn.lab.stats.identified` adds one): `layer`
    counts from the bottom, and the factor `layer` is its name. `by_head` and `by_position` read
    them.

    Streamed from the kernels: memory does not follow T². Dropout is off while it reads, nothing
    stays behind.

    Args:
        model: any model that holds scores; an inference-time method that is on stays on.
        rows: token ids (B, T), or any rows that `read` reads; `tokens_per_batch` at a time.
        bins: equal bins of the query's position, at most as many as there are positions.
        reach: also attention beyond the training length, and at angles never trained.
        cosines: also a histogram of cos(q, k), which costs one more product.
        read: how the model reads some rows; by default `model.hidden`, or the model itself.
        length: how many positions a row has, by default T.
        progress: called with the rows done, and of how many.
        collect: who collects; `cli.inspect.observing` does for models of transformers.

    Raises `InputError` for a model without any score and for texts without a token.
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
    """Σ sum and Σ of, both (H, P); (0, 0) where the layer has no such statistic."""
    rows = measured.filter(statistic=statistic, layer=layer).sort("head", "bin")
    shape = (rows["head"].n_unique(), -1) if rows.height else (0, 0)
    above, below = (rows[name].to_numpy().reshape(shape) for name in ("sum", "of"))
    return above, below


def by_position(measured: pl.DataFrame, statistic: str, layer: int) -> Array:
    """The statistic by head and bin of the position, (H, P); NaN where nothing was counted."""
    return _divided(*totals(measured, statistic, layer))


def by_head(measured: pl.DataFrame, statistic: str, layer: int) -> Array:
    """The statistic over all positions, (H,): the mean, or of extremes the extreme."""
    if statistic in EXTREMES:
        grid = by_position(measured, statistic, layer)
        sign = EXTREMES[statistic]
        return sign * np.asarray(np.fmax.reduce(sign * grid, axis=-1, initial=np.nan))
    return _divided(*(part.sum(-1) for part in totals(measured, statistic, layer)))


def _divided(above: Array, below: Array) -> Array:
    return np.where(below > 0, above / np.where(below > 0, below, 1.0), np.nan)


def cosine_counts(measured: pl.DataFrame, layer: int) -> Array:
    """The histograms of cos(q, k) over −1 … 1, (H, P, bins); none where not asked."""
    rows = measured.filter(statistic="cosine", layer=layer)
    if not rows.height:
        return np.zeros((0, 0, BINS))
    ordered = rows.sort("head", "factor.position", "bin")["sum"].to_numpy()
    return ordered.reshape(rows["head"].n_unique(), -1, BINS)
