"""A trained model × post-hoc methods × evaluation sets: every cell of its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

from normattn.data.retrieval import RetrievalSet
from normattn.errors import InputError
from normattn.evaluation.cells import AnySet, CellInfo, Progress
from normattn.evaluation.fingerprints import weights_digest
from normattn.evaluation.protocols import evaluate_cell
from normattn.evaluation.records import EvaluationStore
from normattn.evaluation.retrieval import evaluate_retrieval
from normattn.evaluation.scorers import Precision, TokenScorer, from_causal_lm
from normattn.models.causal_lm import CausalLM
from normattn.reports.records import AnyRecord
from normattn.score.spec import ScoreSpec


def evaluate_run(
    model: CausalLM,
    evaluation_sets: Sequence[AnySet],
    *,
    run: str,
    seed: int,
    methods: Sequence[str] = ("",),
    factor: float | None = None,
    store: EvaluationStore | None = None,
    precision: Precision = "fp32",
    tokens_per_batch: int = 16384,
    on_record: Callable[[AnyRecord], None] | None = None,
    progress: Progress | None = None,
) -> list[AnyRecord]:
    """Evaluate a trained model as it is or under each method on each set; undo every method.

    `methods` are texts such as "" (as is), "YaRN", "ReRoPE-logn+". `factor` is what stretching
    methods stretch by, fixed for a whole table (default: the longest set over the training
    length). Cells that `store` holds are not evaluated again. `on_record` is called after each.
    """
    if not evaluation_sets:
        raise InputError("there is nothing to evaluate: no evaluation set was given")
    train_length = model.config.train_length
    if factor is None:
        factor = max(each.length for each in evaluation_sets) / train_length
    weights = weights_digest(model)
    scorer = from_causal_lm(model, precision)
    own = model.config.score.resolve(train_length=train_length)
    records: list[AnyRecord] = []
    for method in methods:
        spec = own.with_method(method).resolve(train_length=train_length, factor=factor)
        cell = _cell_info(spec, run, seed, weights, precision)
        with nullcontext() if spec == own else model.using(spec):
            for evaluation_set in evaluation_sets:
                record = _evaluate(scorer, evaluation_set, cell, store, tokens_per_batch, progress)
                records.append(record)
                if on_record is not None:
                    on_record(record)
    return records


def _evaluate(
    scorer: TokenScorer,
    chosen: AnySet,
    cell: CellInfo,
    store: EvaluationStore | None,
    tokens: int,
    progress: Progress | None,
) -> AnyRecord:
    if isinstance(chosen, RetrievalSet):
        return evaluate_retrieval(
            scorer, chosen, cell, store=store, tokens_per_batch=tokens, progress=progress
        )
    return evaluate_cell(
        scorer, chosen, cell, store=store, tokens_per_batch=tokens, progress=progress
    )


def _cell_info(spec: ScoreSpec, run: str, seed: int, weights: str, precision: str) -> CellInfo:
    return CellInfo(
        run=run,
        seed=seed,
        variant=spec.variant_name,
        method=spec.method,
        name="-".join(filter(None, (spec.variant_name, spec.method))),
        spec=str(spec),
        weights=weights,
        precision=precision,
    )
