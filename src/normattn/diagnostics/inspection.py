"""`inspect_model`: what every layer's attention does with given texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from normattn.diagnostics.collecting import collecting
from normattn.diagnostics.records import InspectionRecord
from normattn.errors import InputError
from normattn.models.dropout import without_dropout

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
    **facts: Any,
) -> InspectionRecord:
    """Entropy, log-sum-exp, largest logit, sinks and norms of every layer, head and position bin.

    Streamed from the kernels: memory does not follow T². Dropout is off while it reads, nothing
    stays behind.

    Args:
        model: any model that holds scores; a post-hoc method that is on stays on.
        rows: token ids (B, T), or any rows that `read` reads; `tokens_per_batch` at a time.
        bins: equal bins of the query's position, at most as many as there are positions.
        reach: also attention beyond the training length, and at angles never trained.
        cosines: also the range of cos(q, k), which costs one more product.
        read: how the model reads some rows; by default `model.hidden`, or the model itself.
        length: how many positions a row has, by default T.
        progress: told rows done, of how many.
        facts: what else the record should say.

    Raises `InputError` for a model without any score and for texts without a token.
    """
    if not rows.numel() or (rows.dim() != 2 and length is None):
        shape = tuple(rows.shape)
        raise InputError(f"texts must be token ids (batch, tokens), but they are {shape}")
    reader: Callable[[Tensor], Any] = getattr(model, "hidden", model) if read is None else read
    count, length = rows.shape[0], length or rows.shape[1]
    bins = max(1, min(bins, length))
    edges = [round(length * place / bins) for place in range(bins + 1)]
    step = max(1, tokens_per_batch // length)
    with without_dropout(model), torch.no_grad():
        with collecting(model, edges, reach=reach, cosines=cosines) as collector:
            for first in range(0, count, step):
                reader(rows[first : first + step])
                progress(min(first + step, count), count)
        return collector.record(**facts)
