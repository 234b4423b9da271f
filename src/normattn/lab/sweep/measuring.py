"""A trained run under stretching methods and protocols: the sets and what is measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import polars as pl

from normattn.errors import InputError
from normattn.lab.data import TokenData
from normattn.lab.data.retrieval import retrieval_set
from normattn.lab.data.retrieval_facts import TASKS
from normattn.lab.data.windows import (
    by_position_set,
    last_segment_sets,
    non_repeated_set,
    repeated_set,
    train_length_set,
)
from normattn.lab.evaluation import AnySet, evaluate_run
from normattn.lab.runs import require_finished
from normattn.lab.stats import MeasurementStore, joined
from normattn.lab.stats.measurements import Factor
from normattn.lab.stats.store import BESIDE
from normattn.lab.sweep.settings import EvaluationSettings
from normattn.lab.training import TrainingConfig
from normattn.lab.training.distributed import choose_device
from normattn.lab.training.init_from import refuse_other_data
from normattn.models import CausalLM
from normattn.models.pretrained import load_model

EVALUATIONS = "evaluations"
MODEL = "model"


def evaluation_sets(
    data: TokenData, train_length: int, settings: EvaluationSettings
) -> list[AnySet]:
    """The windows of held-out text that `settings` ask for, of documents never trained on.

    Raises `InputError` when no test document is long enough, naming the longest, and when a length
    is too short for what retrieval states and asks, or for a text of every label and a question.
    """
    at, drawn = (data.split(settings.split), train_length), (settings.max_windows, settings.seed)
    longest = _beyond(settings)
    sets: list[AnySet] = []
    if "train_length" in settings.protocols:
        sets.append(train_length_set(*at, *drawn))
    if "non_repeated" in settings.protocols:
        sets += [non_repeated_set(*at, multiple, *drawn) for multiple in longest]
    if "repeated" in settings.protocols:
        sets += [repeated_set(*at, multiple, *drawn) for multiple in longest]
    if "last_segment" in settings.protocols:
        sets += last_segment_sets(*at, settings.multiples, *drawn)
    if "by_position" in settings.protocols:
        sets.append(by_position_set(*at, settings.multiples[-1], *drawn))
    if "retrieval" in settings.protocols:
        sets += [
            retrieval_set(data, task, train_length, multiple, *drawn, settings.split)
            for task in TASKS
            for multiple in settings.multiples
        ]
    if not sets:
        raise InputError("nothing to evaluate: non-repeated and repeated need a multiple above 1")
    return sets


def _beyond(settings: EvaluationSettings) -> list[int]:
    """The multiple at which whole texts are scored: their shorter readings are its positions."""
    return [multiple for multiple in settings.multiples[-1:] if multiple > 1]


def set_lengths(settings: EvaluationSettings) -> list[int]:
    """The length of each evaluation set in units of L, without making them."""
    longest = _beyond(settings)
    lengths = {
        "train_length": [1],
        "non_repeated": longest,
        "repeated": longest,
        "last_segment": list(settings.multiples),
        "by_position": list(settings.multiples[-1:]),
        "retrieval": len(TASKS) * list(settings.multiples),
    }
    return [length for protocol in settings.protocols for length in lengths[protocol]]


def read_lengths(settings: EvaluationSettings) -> list[int]:
    """The length of what a method reads in units of L, set by set, at most.

    The longest natural text, the last segment behind the longest context and the text read by
    position are the same windows, which go through the model once (`evaluation.recall`).
    """
    lengths, (longest,) = set_lengths(settings), settings.multiples[-1:]
    alike = {"non_repeated", "last_segment", "by_position"}.intersection(settings.protocols)
    for _ in range(len(alike) - 1 if longest > 1 else 0):
        lengths.remove(longest)
    return lengths


def count_evaluations(settings: EvaluationSettings) -> int:
    """How many evaluations one method takes."""
    return len(set_lengths(settings))


def evaluate_trained(
    run: Path,
    config: TrainingConfig,
    data: TokenData,
    *,
    methods: Sequence[str],
    settings: EvaluationSettings,
    factors: Mapping[str, Factor] | None = None,
    on_done: Callable[[int], None] = lambda done: None,
    on_method: Callable[[str], None] = lambda method: None,
    store: MeasurementStore | None = None,
) -> pl.DataFrame:
    """Evaluate the finished run in `run` under each method; what was measured is not done again.

    `factors` are what else the study varies; `on_done` is told how many evaluations are done,
    `on_method` of each method that is finished; `store` keeps
    the records, by default the run's own. Raises `InputError` for a run that has not finished or
    was trained on other data than `data`, and for a method that cannot be applied.
    """
    refuse_other_data(data, run)
    model = trained_model(run, config)
    done = 0

    def count(measured: pl.DataFrame) -> None:
        nonlocal done
        done += 1
        on_done(done)

    frames = evaluate_run(
        model,
        evaluation_sets(data, config.model.train_length, settings),
        seed=config.seed,
        methods=methods,
        factor=settings.factor,
        store=MeasurementStore(run / EVALUATIONS) if store is None else store,
        precision=settings.precision,
        split=settings.split,
        factors=factors,
        tokens_per_batch=settings.max_tokens,
        on_measured=count,
        on_method=on_method,
    )
    return joined(frames)


def asked_alone(run: Path) -> MeasurementStore:
    """What `normattn evaluate` measured of a run in a study's directory, beside the study's own."""
    return MeasurementStore(run / EVALUATIONS / BESIDE)


def trained_model(run: Path, config: TrainingConfig) -> CausalLM:
    """The model of the run in `run`, on its device; `InputError` where it has not finished."""
    require_finished(run, "be evaluated")
    return load_model(run / MODEL, config.model).to(choose_device(config.device))
