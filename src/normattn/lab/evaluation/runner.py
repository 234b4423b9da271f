"""A trained model × post-hoc methods × evaluation sets: every cell of its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import polars as pl

from normattn.errors import InputError
from normattn.lab.data.retrieval import RetrievalSet
from normattn.lab.evaluation.cells import AnySet, CellInfo
from normattn.lab.evaluation.fingerprints import weights_digest
from normattn.lab.evaluation.protocols import evaluate_cell
from normattn.lab.evaluation.recall import recalling
from normattn.lab.evaluation.retrieval import evaluate_retrieval
from normattn.lab.evaluation.scorers import Precision, TokenScorer, from_causal_lm
from normattn.lab.stats import MeasurementStore
from normattn.lab.stats.frame import Factor
from normattn.models.causal_lm import CausalLM


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
    factors: Mapping[str, Factor] | None = None,
    tokens_per_batch: int = 16384,
    on_measured: Callable[[pl.DataFrame], None] | None = None,
    on_method: Callable[[str], None] = lambda method: None,
) -> list[pl.DataFrame]:
    """Evaluate a trained model as it is or under each method on each set; undo every method.

    `methods` are texts such as "" (as is), "YaRN", "ReRoPE-logn+". `factor` is what stretching
    methods stretch by, fixed for a whole table (default: the longest set over the training
    length); `split` and `factors` say of what documents and what else varies. Cells that `store`
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
        cell = CellInfo(
            variant=spec.variant_name,
            seed=seed,
            method=spec.method_name,
            spec=str(spec),
            weights=weights,
            precision=precision,
            split=split,
            factors=factors or {},
        )
        scorer_of = recalling(scorer, evaluation_sets)
        with nullcontext() if spec == own else model.using(spec):
            for evaluation_set in evaluation_sets:
                own_scorer = scorer_of(evaluation_set)
                rows = _evaluate(own_scorer, evaluation_set, cell, store, tokens_per_batch)
                measured.append(rows)
                if on_measured is not None:
                    on_measured(rows)
        on_method(method)
    return measured


def _evaluate(
    scorer: TokenScorer,
    chosen: AnySet,
    cell: CellInfo,
    store: MeasurementStore | None,
    tokens: int,
) -> pl.DataFrame:
    how: Any = {"store": store, "tokens_per_batch": tokens}
    if isinstance(chosen, RetrievalSet):
        return evaluate_retrieval(scorer, chosen, cell, **how)
    return evaluate_cell(scorer, chosen, cell, **how)
