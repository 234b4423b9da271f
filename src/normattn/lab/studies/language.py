"""Settings, runs, texts and methods that the studies of causal language models share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import polars as pl

from normattn.errors import InputError
from normattn.lab.data import windows as texts
from normattn.lab.data.retrieval import TASKS, retrieval_set
from normattn.lab.data.tokens import TokenData
from normattn.lab.evaluation.language_model import evaluate_run
from normattn.lab.evaluation.scorer import AnySet
from normattn.lab.runs import require_finished
from normattn.lab.stats import MeasurementStore, concat, digest
from normattn.lab.stats.measurements import Factor
from normattn.lab.stats.store import EXTRA
from normattn.lab.studies.preset import EvaluationSettings, Preset
from normattn.lab.sweep.config import SweepConfig, merged
from normattn.lab.sweep.run import EVALUATIONS, Progress, Request, Run, Stage, Sweep
from normattn.lab.training import TrainingConfig
from normattn.lab.training.distributed import choose_device
from normattn.lab.training.init_from import refuse_other_data
from normattn.lab.training.planning import Cost
from normattn.lab.training.tasks.base import MODEL
from normattn.models.config import CausalLMConfig
from normattn.models.flops import flops_per_token
from normattn.models.pretrained import load_model
from normattn.score.parts import parts
from normattn.score.spec import UNMODIFIED, ScoreSpec, is_unmodified

AnyRun = TypeVar("AnyRun", bound=Run)
Sets = Callable[[TokenData, int, EvaluationSettings], Sequence[AnySet]]
"""(data, training length, settings) → the evaluation sets of a model."""


@dataclass(frozen=True)
class TextSetting:
    """The settings that all runs share; `training` is a `TrainingConfig` without score and seed."""

    preset: Preset
    training: Mapping[str, Any]
    evaluation: EvaluationSettings

    @classmethod
    def of(cls, preset: Preset, overrides: Mapping[str, Any] | None = None) -> TextSetting:
        """The settings of a preset; `overrides` replace fields of its `evaluation`."""
        training = preset.whole_training(TrainingConfig)
        fields = {**preset.evaluation.model_dump(), **(overrides or {})}
        subject = f"preset {preset.name}, evaluation of the study"
        return cls(preset, training, EvaluationSettings.parse(fields, subject))

    @property
    def train_length(self) -> int:
        """The training length L."""
        return int(self.training["model"]["train_length"])

    def training_of(self, score: str, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The training settings of a score, without the seed."""
        return merged(self.training, changes or {}, {"model.score": score})

    def run(
        self, trained_score: str, methods: Sequence[str] = (UNMODIFIED,), **fields: Any
    ) -> TextRun:
        """A training of a score, evaluated with each method; `fields` are other fields of a run."""
        return self.run_of(TextRun, trained_score, methods=tuple(methods), **fields)

    def run_of(self, kind: type[AnyRun], trained_score: str, **fields: Any) -> AnyRun:
        """The training of a score as a run of this kind."""
        training = self.training_of(trained_score)
        defaults = {"variant": trained_score, "training": training, "evaluation": self.evaluation}
        return kind(**{**defaults, **fields})

    def canonical_scores(self, variants: Sequence[str]) -> tuple[str, ...]:
        """The printed names of the scores to train; raises `InputError` if one cannot be."""
        names = []
        for variant in variants:
            spec = ScoreSpec.parse(variant)
            if spec.method:
                raise InputError(
                    f"{variant} holds {spec.method}, which is applied after training; "
                    f"name {spec.variant_name} among --variants and {spec.method} among --methods"
                )
            _ = self.run(spec.text).training_config  # raises where the score cannot be trained
            names.append(spec.text)
        return tuple(dict.fromkeys(names))

    def canonical_methods(self, methods: Sequence[str]) -> tuple[str, ...]:
        """The printed names of the methods; raises `InputError` for an unknown one."""
        names = []
        for method in methods:
            if is_unmodified(method):
                names.append(UNMODIFIED)
                continue
            spec = ScoreSpec.parse("Baseline").with_method(method)
            if spec.train_length not in (None, self.train_length):
                raise InputError(
                    f"{method} is for a training length of {spec.train_length}, but this table's "
                    f"is {self.train_length}"
                )
            if not spec.method_text:
                raise InputError(
                    f"{method} changes nothing after training, so it is not an entry of --methods"
                )
            names.append(spec.method_text)
        return tuple(dict.fromkeys(names))

    def applicable_methods(
        self, methods: Mapping[str, Sequence[str]]
    ) -> tuple[dict[str, tuple[str, ...]], list[str]]:
        """The supported methods of each score, and sentences on why the others are not."""
        applicable, skipped = {}, []
        for variant, requested in methods.items():
            spec = ScoreSpec.parse(variant, train_length=self.train_length)
            applicable[variant], why = supported_methods(spec, requested, self.evaluation.factor)
            skipped += why
        return applicable, skipped

    def sweep(
        self,
        request: Request,
        study: str,
        runs: Sequence[Run],
        skipped: Sequence[str] = (),
        sets: Sets | None = None,
        **settings: Any,
    ) -> Sweep:
        """The sweep of these runs with every seed; `settings` are recorded too.

        `sets` makes the evaluation sets of a run (default: `evaluation_sets`); the plan counts
        their documents.
        """
        make_sets = sets or evaluation_sets

        def describe(run: Any, data: TokenData) -> list[str]:
            config = run.training_config
            model_sets = make_sets(data, config.model.train_length, run.evaluation)
            documents = {name for evaluation_set in model_sets for name in evaluation_set.documents}
            lines = [
                f"corpus {config.data.corpus}: {data.train.total:,} training tokens in "
                f"{len(data.train):,} documents; {len(documents):,} held-out documents are scored"
            ]
            epochs = config.cost().trained / max(1, data.train.total)
            if epochs > 1:
                lines.append(f"each run sees the training text about {epochs:.1f} times")
            return lines

        seeds = request.seeds_or(self.preset.seeds)
        shared = {"training": self.training, "evaluation": self.evaluation, **settings}
        return Sweep.of(
            request,
            study,
            SweepConfig.of(self.preset.name, **shared),
            [run.model_copy(update={"seed": seed}) for seed in seeds for run in runs],
            describe=describe,
            skipped=tuple(dict.fromkeys(skipped)),
        )


# Runs


class TextRun(Run):
    """A causal language model, trained and evaluated with each of `methods`."""

    training_class: ClassVar[type[TrainingConfig]] = TrainingConfig
    kind: Literal["read"] = "read"
    evaluation: EvaluationSettings
    methods: tuple[str, ...] = (UNMODIFIED,)

    def measurement_stage(self, folder: Path, config: TrainingConfig) -> Stage:
        """Evaluate the model with each method, by the protocols of `evaluation`."""
        settings, factors = self.evaluation, self.factors
        methods = ["" if is_unmodified(method) else method for method in self.methods]
        markers = {method: marker_key("read", method, settings, factors) for method in methods}
        store = MeasurementStore(folder / EVALUATIONS)
        task = ModelEvaluation(folder / MODEL, config.model, store, markers, factors, self.row)
        windows = settings.max_windows * len(methods)
        cost = partial(evaluation_cost, config, set_lengths(settings), windows)
        return evaluation_stage(config, settings, evaluation_sets, cost, lambda: [task])


@dataclass(frozen=True)
class ModelEvaluation:
    """A saved model, the methods to evaluate it with, and the store of its measurements.

    `markers` has the done-marker of each method ("": none is written). `row` is the model's name in
    tables (default: its score), `factors` are what else the study varies.
    """

    model: Path
    config: CausalLMConfig
    store: MeasurementStore
    markers: Mapping[str, str]
    factors: Mapping[str, Factor]
    row: str = ""

    def run(
        self,
        sets: Sequence[AnySet],
        config: TrainingConfig,
        settings: EvaluationSettings,
        on_measured: Callable[[pl.DataFrame], None],
    ) -> pl.DataFrame:
        """Evaluate with each method, except where the store has the measurements."""

        def finish(method: str) -> None:
            if marker := self.markers[method]:
                self.store.finish(marker)

        measured = evaluate_run(
            load_model(self.model, self.config).to(choose_device(config.device)),
            sets,
            seed=config.seed,
            methods=[*self.markers],
            factor=settings.factor,
            store=self.store,
            precision=settings.precision,
            split=settings.split,
            row=self.row,
            factors=self.factors,
            tokens_per_batch=settings.max_tokens,
            on_measured=on_measured,
            on_method=finish,
        )
        return concat(measured)


def evaluation_stage(
    config: TrainingConfig,
    settings: EvaluationSettings,
    sets: Sets,
    cost: Callable[[], Cost],
    evaluations: Callable[[], Sequence[ModelEvaluation]],
) -> Stage:
    """Evaluate the models of a training on the sets that `sets` makes.

    `evaluations` returns an evaluation for each model that exists when it is called.
    """

    def run(data: TokenData, progress: Progress) -> None:
        texts, tasks = sets(data, config.model.train_length, settings), evaluations()
        total, done = len(texts) * sum(len(task.markers) for task in tasks), count(1)
        for task in tasks:
            refuse_other_data(data, task.model.parent)
            task.run(texts, config, settings, lambda measured: progress(next(done), total, ""))

    def is_done() -> bool:
        markers = [
            (task.store, marker) for task in evaluations() for marker in task.markers.values()
        ]
        return bool(markers) and all(store.has_finished(marker) for store, marker in markers)

    return Stage("evaluation", cost, is_done, run)


def marker_key(
    kind: str, method: str, settings: EvaluationSettings, factors: Mapping[str, Factor]
) -> str:
    """The done-marker of an evaluation: a digest of its inputs except the data."""
    fields = settings.model_dump(mode="json", exclude={"max_tokens"})
    return digest(kind, method, fields, dict(factors))


def evaluation_cost(config: TrainingConfig, multiples: Iterable[int], windows: int) -> Cost:
    """An upper bound of the cost of evaluating `windows` texts at each of `multiples` × L."""
    lengths = [config.model.train_length * multiple for multiple in multiples]
    flops = sum(flops_per_token(config.model, length).forward * length for length in lengths)
    return Cost(scored=sum(lengths) * windows, flops=flops * windows)


def evaluate_finished_run(
    run: Path,
    config: TrainingConfig,
    data: TokenData,
    *,
    methods: Sequence[str],
    settings: EvaluationSettings,
    store: MeasurementStore,
    on_done: Callable[[int], None],
) -> pl.DataFrame:
    """Evaluate a finished run with each method, except where `store` has the measurements.

    `on_done` receives the number of finished evaluations. Raises `InputError` for a run that has
    not finished or was trained on other data, and for a method that cannot be applied.
    """
    refuse_other_data(data, run)
    require_finished(run, "be evaluated")
    sets, done = evaluation_sets(data, config.model.train_length, settings), count(1)
    task = ModelEvaluation(run / MODEL, config.model, store, dict.fromkeys(methods, ""), {})
    return task.run(sets, config, settings, lambda measured: on_done(next(done)))


def standalone_store(run: Path) -> MeasurementStore:
    """The store for `normattn evaluate` on a study's run, separate from the study's store."""
    return MeasurementStore(run / EVALUATIONS / EXTRA)


# Texts


def _lengths(settings: EvaluationSettings) -> dict[str, tuple[int, ...]]:
    """The length of each set of each protocol, in units of L.

    Whole texts have the longest length only, as their positions show the shorter ones.
    """
    multiples, longest = settings.multiples, settings.multiples[-1:]
    beyond = longest if longest > (1,) else ()
    lengths = {
        "train_length": (1,),
        "non_repeated": beyond,
        "repeated": beyond,
        "last_segment": multiples,
        "by_position": longest,
        "retrieval": multiples * len(TASKS),
    }
    return {protocol: lengths[protocol] for protocol in lengths if protocol in settings.protocols}


def set_lengths(settings: EvaluationSettings) -> list[int]:
    """The length of each evaluation set in units of L, without making them."""
    return [length for lengths in _lengths(settings).values() for length in lengths]


def evaluation_sets(
    data: TokenData, train_length: int, settings: EvaluationSettings
) -> list[AnySet]:
    """The sets of held-out windows for `settings`.

    Raises `InputError` when no test document is long enough, naming the longest, and when a length
    is too short for retrieval.
    """
    split, sampling = data.split(settings.split), (settings.max_windows, settings.seed)
    sets: list[AnySet] = []
    for protocol, lengths in _lengths(settings).items():
        if protocol == "last_segment":
            sets += texts.last_segment_sets(split, train_length, lengths, *sampling)
        elif protocol == "retrieval":
            sets += [
                retrieval_set(data, task, train_length, multiple, *sampling, settings.split)
                for task in TASKS
                for multiple in settings.multiples
            ]
        elif protocol == "repeated":
            sets += [texts.repeated_set(split, train_length, n, *sampling) for n in lengths]
        else:
            make = partial(texts.natural_set, protocol, split, train_length)
            sets += [make(multiple, *sampling) for multiple in lengths]
    if not sets:
        raise InputError("nothing to evaluate: non-repeated and repeated need a multiple above 1")
    return sets


# Methods

ALL = "all"
WITH_LOGN = ("NTK", "YaRN", "ReRoPE")
"""The methods that are also evaluated with inference-time log-n scaling."""


def candidates() -> tuple[str, ...]:
    """All registered inference-time methods, then those combined with log-n scaling."""
    alone = [name for name, part in parts().items() if part.when != "training-time"]
    return (*alone, *(f"{name}-logn+" for name in WITH_LOGN if name in alone))


def supported_methods(
    spec: ScoreSpec, methods: Sequence[str], factor: float
) -> tuple[tuple[str, ...], list[str]]:
    """The methods that `spec` supports, and a sentence for each reason against the others.

    `factor` is the stretch factor, which decides whether parameters are in range.
    """
    supported: list[str] = []
    reasons: dict[str, list[str]] = {}
    for name in methods:
        try:
            spec.with_method("" if name == UNMODIFIED else name).resolve(factor=factor)
            supported.append(name)
        except InputError as error:
            # Without the names of both, so that methods with one reason share a sentence.
            statement, _, reason = str(error).partition(": ")
            why = reason if "cannot be combined" in statement else str(error)
            method = ScoreSpec.parse("Baseline").with_method(name)
            if not spec.position.rotary and any(part.needs_rotary for part in method.parts):
                why = "it has no rotary positions"
            reasons.setdefault(why, []).append(name)
    return tuple(supported), [
        f"{spec.name} is not evaluated with {', '.join(names)}: {why}"
        for why, names in reasons.items()
    ]
