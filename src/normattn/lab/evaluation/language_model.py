"""Evaluate a language model with every inference-time method on sets of windows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray

from normattn.errors import NormattnError
from normattn.lab.data.retrieval import RetrievalSet
from normattn.lab.data.windows import EvaluationSet
from normattn.lab.evaluation.retrieval import evaluate_retrieval
from normattn.lab.evaluation.scorer import (
    AnySet,
    CachedScorer,
    ModelScorer,
    Precision,
    TokenScorer,
    batches,
    rows_per_batch,
    scores_from,
    set_identity,
    weights_digest,
)
from normattn.lab.stats import Identity, MeasurementStore, digest, sums, with_identity
from normattn.lab.stats.measurements import Factor
from normattn.models.causal_lm import CausalLM

Sums = NDArray[np.float64]


def evaluate_cell(
    scorer: TokenScorer,
    evaluation_set: EvaluationSet,
    model: Identity,
    *,
    store: MeasurementStore | None = None,
    tokens_per_batch: int = 16384,
) -> pl.DataFrame:
    """Measure a model on a set by document and position, or return the stored measurements.

    Statistics: `accuracy` and `loss` (nats) of every scored token. For repeated text also
    `accuracy_seen`, of tokens that occur earlier in the context, and the same by the distance to
    that occurrence (`accuracy_by_distance`). Bins come from `bin_edges` (`rising_edges` for the
    protocol `by_position`), by the 0-based position t of the query. `tokens_per_batch` bounds the
    input tokens of a batch, and affects results only by rounding. Raises `NormattnError` if a loss
    is not finite.
    """
    rows = rows_per_batch(tokens_per_batch, evaluation_set.length)
    edges = _edges(evaluation_set)
    identity = set_identity(model, evaluation_set)

    def measure() -> pl.DataFrame:
        counts = _count(scorer, evaluation_set, edges, rows, model.name)
        documents = evaluation_set.documents
        frames = [
            sums(name, documents, total, of, axis="position", edges=edges)
            for name, (total, of) in counts.items()
        ]
        if "accuracy_seen" in counts:
            frames.append(_by_distance(evaluation_set, *counts["accuracy_seen"]))
        return with_identity(identity, frames)

    distances = [] if evaluation_set.segments is None else ["accuracy_by_distance"]
    key = digest(identity.columns(), edges, *distances)
    return measure() if store is None else store.once(key, measure)


def _by_distance(texts: EvaluationSet, right: Sums, of: Sums) -> pl.DataFrame:
    """Return the accuracy of copyable tokens by their distance, which is segment − 1."""
    assert texts.segments is not None
    segments = np.unique(texts.segments)
    member = texts.segments[:, None] == segments
    correct, tokens = (counts.sum(1)[:, None] * member for counts in (right, of))
    bins: dict[str, Any] = {"axis": "distance", "edges": (segments - 1).tolist()}
    return sums("accuracy_by_distance", texts.documents, correct, tokens, **bins)


def _count(
    scorer: TokenScorer, texts: EvaluationSet, edges: tuple[int, ...], rows: int, name: str
) -> dict[str, tuple[Sums, Sums]]:
    """Return the sum and count of each statistic by window and bin."""
    windows, copyable, start = texts.windows, texts.copyable, texts.start
    shape = (len(windows), len(edges) - 1)
    correct, loss, copied, copyable_tokens = (np.zeros(shape) for _ in range(4))
    for part in batches(len(windows), rows):
        ids = torch.from_numpy(np.array(windows[part], dtype=np.int64))
        scores = scores_from(scorer, ids, start)
        right = scores.correct.cpu().numpy()
        losses = scores.loss.double().cpu().numpy()
        if not np.isfinite(losses).all():
            position = start + int(np.argwhere(~np.isfinite(losses))[0][1])
            raise NormattnError(
                f"{name} gives a loss that is not finite at position {position} of the "
                f"{texts.protocol} windows of {texts.length} tokens"
            )
        correct[part], loss[part] = _bin_sums(right, edges), _bin_sums(losses, edges)
        if copyable is not None:
            scored = copyable[part, start:]
            copyable_tokens[part] = _bin_sums(scored, edges)
            copied[part] = _bin_sums(scored & right, edges)
    tokens = np.tile(np.diff(np.asarray(edges, dtype=float)), (len(windows), 1))
    counts = {"accuracy": (correct, tokens), "loss": (loss, tokens)}
    if copyable is not None:
        counts["accuracy_seen"] = copied, copyable_tokens
    return counts


def _bin_sums(values: NDArray[Any], edges: tuple[int, ...]) -> Sums:
    """Sum values (windows, scored positions) in each bin; column 0 is position edges[0]."""
    starts = np.asarray(edges[:-1]) - edges[0]
    return np.asarray(np.add.reduceat(values.astype(np.float64), starts, axis=1))


def bin_edges(start: int, length: int, train_length: int) -> tuple[int, ...]:
    """Return the edges of the position bins for scored positions start … length − 1.

    Bins are a quarter of the training length wide (at least 1). For texts longer than 16 training
    lengths, bins after the first training length grow by 2^(1/4) each.
    """
    width = max(1, train_length // 4)
    if length <= 16 * max(train_length, 4):
        inner = range(width, length, width)
        return (start, *(edge for edge in inner if edge > start), length)
    near = list(range(width, train_length + 1, width))
    octaves = np.arange(1, 4 * np.log2(length / train_length) + 1)
    far = [round(train_length * 2 ** (octave / 4)) for octave in octaves]
    inner_edges = sorted({edge for edge in (*near, *far) if start < edge < length})
    return (start, *inner_edges, length)


def rising_edges(length: int, train_length: int) -> tuple[int, ...]:
    """Return the edges of growing bins from position 0 to `length`, for a logarithmic axis.

    Two bins per octave below the training length L, four above. L·2^k is an edge for every k.
    """
    below = [round(train_length * 2 ** (-step / 2)) for step in range(1, 2 * 30)]
    above = [round(train_length * 2 ** (step / 4)) for step in range(4 * 30)]
    return (0, *sorted({edge for edge in (*below, *above) if 0 < edge < length}), length)


def _edges(evaluation_set: EvaluationSet) -> tuple[int, ...]:
    length, train_length = evaluation_set.length, evaluation_set.train_length
    if evaluation_set.protocol == "by_position":
        return rising_edges(length, train_length)
    return bin_edges(evaluation_set.start, length, train_length)


def evaluate_run(
    model: CausalLM,
    evaluation_sets: Sequence[AnySet],
    *,
    seed: int,
    methods: Sequence[str] = ("",),
    factor: float | None = None,
    store: MeasurementStore | None = None,
    precision: Precision = "fp32",
    split: str = "test",
    row: str = "",
    factors: Mapping[str, Factor] | None = None,
    tokens_per_batch: int = 16384,
    on_measured: Callable[[pl.DataFrame], None] | None = None,
    on_method: Callable[[str], None] = lambda method: None,
) -> list[pl.DataFrame]:
    """Evaluate a trained model with each method on each set.

    `methods` are "" (unmodified), "YaRN", "ReRoPE-logn+" and so on. `factor` is the extension
    factor of methods, the same for a whole table (default: the longest set over the training
    length). `split`, `factors` and `row` (default: the score's name) go into the measurements.
    Measurements in `store` are not made again. `on_measured` is called after each set, `on_method`
    after each method.
    """
    train_length = model.config.train_length
    if factor is None:
        factor = max(evaluation_set.length for evaluation_set in evaluation_sets) / train_length
    weights = weights_digest(model)
    trained = model.config.score.resolve(train_length=train_length)
    measured: list[pl.DataFrame] = []
    for method in methods:
        spec = trained.with_method(method).resolve(train_length=train_length, factor=factor)
        identity = Identity(
            study="",
            row=row or spec.variant_name,
            score=str(spec),
            seed=seed,
            method=spec.method_name,
            weights=weights,
            settings=precision,
            split=split,
            factors=factors or {},
        )
        scorer = CachedScorer(ModelScorer(model, precision))
        options: Any = {"store": store, "tokens_per_batch": tokens_per_batch}
        with nullcontext() if spec == trained else model.using(spec):
            for texts in evaluation_sets:
                measure: Any = evaluate_cell
                if isinstance(texts, RetrievalSet):
                    measure = evaluate_retrieval
                rows: pl.DataFrame = measure(scorer, texts, identity, **options)
                measured.append(rows)
                if on_measured is not None:
                    on_measured(rows)
        on_method(method)
    return measured
