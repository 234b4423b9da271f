"""Evaluate a language model with every inference-time method on windows and retrieval tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import polars as pl
import torch
from jaxtyping import Float64, Int64
from numpy.typing import NDArray

from normattn.errors import NormattnError
from normattn.lab.data.retrieval import RetrievalSet
from normattn.lab.data.windows import EvaluationSet
from normattn.lab.evaluation.scorer import (
    AnySet,
    CachedScorer,
    ModelScorer,
    Precision,
    TokenScorer,
    batches,
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
    length, train_length = evaluation_set.length, evaluation_set.train_length
    if evaluation_set.protocol == "by_position":
        edges = rising_edges(length, train_length)
    else:
        edges = bin_edges(evaluation_set.start, length, train_length)
    identity = set_identity(model, evaluation_set)
    documents, segments = evaluation_set.documents, evaluation_set.segments

    def measure() -> pl.DataFrame:
        rows = max(1, tokens_per_batch // length)
        counts = _count_by_position(scorer, evaluation_set, edges, rows, model.name)
        frames = [
            sums(name, documents, total, of, axis="position", edges=edges)
            for name, (total, of) in counts.items()
        ]
        if segments is not None:
            # An earlier occurrence of a token is segment − 1 tokens before its query.
            periods = np.unique(segments)
            member = segments[:, None] == periods
            right, of = (count.sum(1)[:, None] * member for count in counts["accuracy_seen"])
            bins: dict[str, Any] = {"axis": "distance", "edges": (periods - 1).tolist()}
            frames.append(sums("accuracy_by_distance", documents, right, of, **bins))
        return with_identity(identity, frames)

    distances = [] if segments is None else ["accuracy_by_distance"]
    key = digest(identity.columns(), edges, *distances)
    return measure() if store is None else store.once(key, measure)


def _count_by_position(
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
    inner = list(range(width, length, width))
    if length > 16 * max(train_length, 4):
        steps = np.arange(1, 4 * np.log2(length / train_length) + 1)
        far = [round(train_length * 2 ** (step / 4)) for step in steps]
        inner = [*range(width, train_length + 1, width), *far]
    return (start, *sorted({edge for edge in inner if start < edge < length}), length)


def rising_edges(length: int, train_length: int) -> tuple[int, ...]:
    """Return the edges of growing bins from position 0 to `length`, for a logarithmic axis.

    Two bins per octave below the training length L, four above. L·2^k is an edge for every k.
    """
    below = [round(train_length * 2 ** (-step / 2)) for step in range(1, 2 * 30)]
    above = [round(train_length * 2 ** (step / 4)) for step in range(4 * 30)]
    return (0, *sorted({edge for edge in (*below, *above) if 0 < edge < length}), length)


def evaluate_retrieval(
    scorer: TokenScorer,
    retrieval: RetrievalSet,
    model: Identity,
    *,
    store: MeasurementStore | None = None,
    tokens_per_batch: int = 16384,
) -> pl.DataFrame:
    """Measure a task at one length by sample and depth, or return the stored measurements.

    Statistics: `exact` (the whole answer is right), `accuracy` and `loss` of the answers' tokens.
    The factor `task` is the task. Tokens are scored with the true tokens before them, so an answer
    is exact if and only if greedy decoding gives it. `tokens_per_batch` bounds the input tokens of
    a batch. Raises `NormattnError` if a loss is not finite.
    """
    rows = max(1, tokens_per_batch // retrieval.length)
    identity = set_identity(model, retrieval, task=retrieval.task)

    def measure() -> pl.DataFrame:
        correct, loss = _count_answers(scorer, retrieval, rows, model.name)
        tokens = np.tile(retrieval.scored.sum(axis=1)[:, None], (1, len(retrieval.depths)))
        statistics = {
            "exact": (correct == tokens, 1.0 * (tokens > 0)),
            "accuracy": (correct, tokens),
            "loss": (loss, tokens),
        }
        # The bootstrap's units are samples, even if several have filler from one document.
        samples = [f"{number:04d} {name}" for number, name in enumerate(retrieval.documents)]
        frames = [
            sums(name, samples, total, of, axis="depth", edges=retrieval.depths)
            for name, (total, of) in statistics.items()
        ]
        return with_identity(identity, frames)

    key = digest(identity.columns())
    return measure() if store is None else store.once(key, measure)


def _count_answers(
    scorer: TokenScorer, retrieval: RetrievalSet, rows: int, name: str
) -> tuple[Int64[np.ndarray, "samples depths"], Float64[np.ndarray, "samples depths"]]:
    """Return the number of correct scored tokens of each window, and their summed loss."""
    samples, depths, width = retrieval.windows.shape
    windows = retrieval.windows.reshape(-1, width)
    scored = np.repeat(retrieval.scored, depths, axis=0)
    correct, loss = np.zeros(len(windows), np.int64), np.zeros(len(windows))
    for part in batches(len(windows), rows):
        mask = scored[part]
        first = int(mask.any(axis=0).argmax())
        scores = scores_from(scorer, torch.from_numpy(windows[part].astype(np.int64)), first)
        # Losses have the full length, because the rounding of a sum depends on it.
        losses = np.zeros(mask.shape)
        mask = mask[:, first:]
        losses[:, first:] = np.where(mask, scores.loss.double().cpu().numpy(), 0.0)
        if not np.isfinite(losses).all():
            raise NormattnError(
                f"{name} gives a loss that is not finite in an answer of the {retrieval.task} "
                f"windows of {retrieval.length} tokens"
            )
        correct[part] = (scores.correct.cpu().numpy() & mask).sum(axis=1)
        loss[part] = losses.sum(axis=1)
    return correct.reshape(samples, depths), loss.reshape(samples, depths)


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
    on_measured: Callable[[pl.DataFrame], object] = lambda rows: None,
    on_method: Callable[[str], None] = lambda method: None,
) -> list[pl.DataFrame]:
    """Evaluate a trained model with each method on each set.

    `methods` are "" (unmodified), "YaRN", "ReRoPE-logn+" and so on. `factor` is the extension
    factor of methods, the same for a whole table (default: the longest set over the training
    length). `split`, `factors` and `row` (default: the score's name) go into the measurements.
    Measurements in `store` are not repeated. `on_measured` is called after each set, `on_method`
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
                is_retrieval = isinstance(texts, RetrievalSet)
                measure: Any = evaluate_retrieval if is_retrieval else evaluate_cell
                rows: pl.DataFrame = measure(scorer, texts, identity, **options)
                measured.append(rows)
                on_measured(rows)
        on_method(method)
    return measured
