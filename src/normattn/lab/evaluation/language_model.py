"""Language models by text protocol: each set of windows through one scorer, in bounded batches.

`evaluate_run` takes a trained model through every inference-time method and every set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray

from normattn.errors import InputError, NormattnError
from normattn.lab.data.retrieval import RetrievalSet
from normattn.lab.data.windows import EvaluationSet
from normattn.lab.evaluation.retrieval import evaluate_retrieval
from normattn.lab.evaluation.scorer import (
    AnySet,
    ModelScorer,
    Precision,
    Remembering,
    TokenScorer,
    batches,
    identity,
    rows_within,
    scores_from,
    weights_digest,
)
from normattn.lab.stats import Identity, MeasurementStore, digest, identified, sums
from normattn.lab.stats.measurements import Factor
from normattn.models.causal_lm import CausalLM

Sums = NDArray[np.float64]


def evaluate_cell(
    scorer: TokenScorer,
    evaluation_set: EvaluationSet,
    whose: Identity,
    *,
    store: MeasurementStore | None = None,
    tokens_per_batch: int = 16384,
) -> pl.DataFrame:
    """Measure one model by document and position, or return what `store` already has of it.

    Statistics: `accuracy` and `loss` (nats) of every scored token; of tiled text also
    `accuracy_seen`, of the tokens whose answer occurs earlier in the context, and the same by how
    far back it occurs (`accuracy_by_distance`). Bins are those of
    `bin_edges` (`rising_edges` of the protocol `by_position`), by the 0-based position t of the
    query whose next token is scored.
    `tokens_per_batch` bounds the input tokens scored at once (one window is the least) and changes
    nothing beyond the rounding of the scorer. Raises `NormattnError` when a loss is not finite.
    """
    rows = rows_within(tokens_per_batch, evaluation_set.length)
    edges = _edges(evaluation_set)
    at_set = identity(whose, evaluation_set)

    def measure() -> pl.DataFrame:
        counts = _count(scorer, evaluation_set, edges, rows, whose.name)
        documents = evaluation_set.documents
        frames = [
            sums(name, documents, above, of, axis="position", edges=edges)
            for name, (above, of) in counts.items()
        ]
        if "accuracy_seen" in counts:
            frames.append(_by_distance(evaluation_set, *counts["accuracy_seen"]))
        return identified(at_set, frames)

    distances = [] if evaluation_set.segments is None else ["accuracy_by_distance"]
    key = digest(at_set.columns(), edges, *distances)
    return measure() if store is None else store.once(key, measure)


def _by_distance(texts: EvaluationSet, right: Sums, of: Sums) -> pl.DataFrame:
    """Tokens of repeated text whose answer occurs earlier, by its distance: segment − 1."""
    assert texts.segments is not None
    segments = np.unique(texts.segments)
    own = texts.segments[:, None] == segments
    above, below = (part.sum(1)[:, None] * own for part in (right, of))
    at: dict[str, Any] = {"axis": "distance", "edges": (segments - 1).tolist()}
    return sums("accuracy_by_distance", texts.documents, above, below, **at)


def _count(
    scorer: TokenScorer, texts: EvaluationSet, edges: tuple[int, ...], rows: int, name: str
) -> dict[str, tuple[Sums, Sums]]:
    """Each statistic as its sum and count, both by window and bin."""
    windows, seen, start = texts.windows, texts.copyable, texts.start
    shape = (len(windows), len(edges) - 1)
    correct, loss, right_of_seen, of_seen = (np.zeros(shape) for _ in range(4))
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
        if seen is not None:
            known = seen[part, start:]
            of_seen[part], right_of_seen[part] = (
                _bin_sums(known, edges),
                _bin_sums(known & right, edges),
            )
    tokens = np.tile(np.diff(np.asarray(edges, dtype=float)), (len(windows), 1))
    counts = {"accuracy": (correct, tokens), "loss": (loss, tokens)}
    return counts if seen is None else {**counts, "accuracy_seen": (right_of_seen, of_seen)}


def _bin_sums(values: NDArray[Any], edges: tuple[int, ...]) -> Sums:
    """Sums of (windows, scored positions) within each bin; column 0 is position edges[0]."""
    starts = np.asarray(edges[:-1]) - edges[0]
    return np.asarray(np.add.reduceat(values.astype(np.float64), starts, axis=1))


def bin_edges(start: int, length: int, train_length: int) -> tuple[int, ...]:
    """Edges of the position bins that cover the scored positions start … length − 1.

    Bins are a quarter of the training length wide (at least 1). Where the text is longer than 16
    training lengths, the bins beyond one training length grow by 2^(1/4) each instead.
    """
    if not 0 <= start < length:
        raise InputError(f"scored positions {start} to {length} are empty or negative")
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
    """Edges of bins that grow from position 0 to `length`, for a logarithmic axis.

    Two bins to an octave below the training length L, four beyond; L·2^k is an edge for every k.
    """
    if length < 1 or train_length < 1:
        raise InputError(f"a text of {length} tokens at a training length of {train_length}")
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
    """Evaluate a trained model unmodified or under each method on each set; undo every method.

    `methods` are texts such as "" (as is), "YaRN", "ReRoPE-logn+". `factor` is what stretching
    methods stretch by, fixed for a whole table (default: the longest set over the training
    length); `split` and `factors` say of what documents and what else varies, `row` what tables
    call the model (default: its score). Cells that `store`
    holds are not evaluated again. `on_measured` is called after each,
    `on_method` after the last one of a method.
    """
    if not evaluation_sets:
        raise InputError("there is nothing to evaluate: no evaluation set was given")
    train_length = model.config.train_length
    if factor is None:
        factor = max(evaluation_set.length for evaluation_set in evaluation_sets) / train_length
    weights = weights_digest(model)
    own = model.config.score.resolve(train_length=train_length)
    measured: list[pl.DataFrame] = []
    for method in methods:
        spec = own.with_method(method).resolve(train_length=train_length, factor=factor)
        whose = Identity(
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
        scorer = Remembering(ModelScorer(model, precision))
        how: Any = {"store": store, "tokens_per_batch": tokens_per_batch}
        with nullcontext() if spec == own else model.using(spec):
            for chosen in evaluation_sets:
                measure: Any = (
                    evaluate_retrieval if isinstance(chosen, RetrievalSet) else evaluate_cell
                )
                rows: pl.DataFrame = measure(scorer, chosen, whose, **how)
                measured.append(rows)
                if on_measured is not None:
                    on_measured(rows)
        on_method(method)
    return measured
