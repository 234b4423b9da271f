"""Language models by text protocol: each set of windows through one scorer, in bounded batches.

`evaluate_run` takes a trained model through every post-hoc method and every set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
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
    Precision,
    TokenScorer,
    batches,
    from_causal_lm,
    identity,
    recalling,
    scores_from,
    weights_digest,
)
from normattn.lab.stats import Identity, MeasurementStore, digest, identified, sums
from normattn.lab.stats.measurements import Factor
from normattn.models.causal_lm import CausalLM

Counts = NDArray[np.int64]
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
    `accuracy_seen`, of the tokens whose answer stands earlier in the context, and the same by how
    far back it stands (`accuracy_by_distance`). Bins are those of
    `bin_edges` (`rising_edges` of the protocol `by_position`), by the 0-based position t of the
    query whose next token is scored.
    `tokens_per_batch` bounds the input tokens scored at once (one window is the least) and changes
    nothing beyond the rounding of the scorer. Raises `NormattnError` when a loss is not finite.
    """
    if tokens_per_batch < 1:
        raise InputError(f"tokens_per_batch must be at least 1, got {tokens_per_batch}")
    edges = _edges(evaluation_set)
    at_set = identity(whose, evaluation_set)
    distances = [] if evaluation_set.segments is None else ["accuracy_by_distance"]
    key = digest(at_set.columns(), edges, *distances)

    def measure() -> pl.DataFrame:
        counts = _count(scorer, evaluation_set, edges, tokens_per_batch, whose.name)
        rows = counts.rows(evaluation_set.documents, edges)
        if counts.seen_correct is not None and counts.seen_tokens is not None:
            rows.append(_by_distance(evaluation_set, counts.seen_correct, counts.seen_tokens))
        return identified(at_set, rows)

    return measure() if store is None else store.once(key, measure)


def _by_distance(texts: EvaluationSet, right: NDArray[Any], of: NDArray[Any]) -> pl.DataFrame:
    """Of tiled text the tokens whose answer stands earlier, by how far back: segment − 1 tokens."""
    assert texts.segments is not None
    segments = np.unique(texts.segments)
    own = texts.segments[:, None] == segments
    above, below = (part.sum(1)[:, None] * own for part in (right, of))
    at: dict[str, Any] = {"axis": "distance", "edges": (segments - 1).tolist()}
    return sums("accuracy_by_distance", texts.documents, above, below, **at)


@dataclass(frozen=True)
class _WindowCounts:
    """Sums per window and bin; `seen` ones are None for natural text."""

    tokens: Counts
    correct: Counts
    loss: Sums
    seen_tokens: Counts | None
    seen_correct: Counts | None

    def rows(self, documents: Sequence[str], edges: tuple[int, ...]) -> list[pl.DataFrame]:
        """The counts as rows of the frame."""
        parts = {"accuracy": (self.correct, self.tokens), "loss": (self.loss, self.tokens)}
        if self.seen_tokens is not None and self.seen_correct is not None:
            parts["accuracy_seen"] = (self.seen_correct, self.seen_tokens)
        return [
            sums(name, documents, above, of, axis="position", edges=edges)
            for name, (above, of) in parts.items()
        ]


def _count(
    scorer: TokenScorer,
    evaluation_set: EvaluationSet,
    edges: tuple[int, ...],
    tokens_per_batch: int,
    name: str,
) -> _WindowCounts:
    start, length = evaluation_set.start, evaluation_set.length
    windows, seen = evaluation_set.windows, evaluation_set.seen
    shape = (len(windows), len(edges) - 1)
    correct, seen_correct = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    seen_tokens, loss = np.zeros(shape, np.int64), np.zeros(shape)
    for rows in batches(len(windows), max(1, tokens_per_batch // length)):
        ids = torch.from_numpy(np.array(windows[rows], dtype=np.int64))
        scores = scores_from(scorer, ids, start)
        right = scores.correct.cpu().numpy()
        losses = scores.loss.double().cpu().numpy()
        _require_finite(losses, start, name, evaluation_set)
        correct[rows] = _bin_sums(right.astype(np.int64), edges)
        loss[rows] = _bin_sums(losses, edges)
        if seen is not None:
            known = seen[rows, start:]
            seen_tokens[rows] = _bin_sums(known.astype(np.int64), edges)
            seen_correct[rows] = _bin_sums((known & right).astype(np.int64), edges)
    return _WindowCounts(
        tokens=np.tile(np.diff(np.asarray(edges, dtype=np.int64)), (len(windows), 1)),
        correct=correct,
        loss=loss,
        seen_tokens=seen_tokens if seen is not None else None,
        seen_correct=seen_correct if seen is not None else None,
    )


def _bin_sums(
    values: NDArray[np.int64] | NDArray[np.float64], edges: tuple[int, ...]
) -> NDArray[np.int64] | NDArray[np.float64]:
    """Sums of (windows, scored positions) within each bin; column 0 is position edges[0]."""
    starts = np.asarray(edges[:-1]) - edges[0]
    return np.add.reduceat(values, starts, axis=1)


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


def _require_finite(losses: Sums, start: int, name: str, evaluation_set: EvaluationSet) -> None:
    if np.isfinite(losses).all():
        return
    position = start + int(np.argwhere(~np.isfinite(losses))[0][1])
    raise NormattnError(
        f"{name} gives a loss that is not finite at position {position} of the "
        f"{evaluation_set.protocol} windows of {evaluation_set.length} tokens"
    )


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
    """Evaluate a trained model as it is or under each method on each set; undo every method.

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
    scorer = from_causal_lm(model, precision)
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
        scorer_of = recalling(scorer, evaluation_sets)
        with nullcontext() if spec == own else model.using(spec):
            for evaluation_set in evaluation_sets:
                own_scorer = scorer_of(evaluation_set)
                rows = _evaluate(own_scorer, evaluation_set, whose, store, tokens_per_batch)
                measured.append(rows)
                if on_measured is not None:
                    on_measured(rows)
        on_method(method)
    return measured


def _evaluate(
    scorer: TokenScorer,
    chosen: AnySet,
    whose: Identity,
    store: MeasurementStore | None,
    tokens: int,
) -> pl.DataFrame:
    how: Any = {"store": store, "tokens_per_batch": tokens}
    if isinstance(chosen, RetrievalSet):
        return evaluate_retrieval(scorer, chosen, whose, **how)
    return evaluate_cell(scorer, chosen, whose, **how)
