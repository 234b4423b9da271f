"""What the studies of causal language models share: settings, runs, texts and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, Literal

import polars as pl

from normattn.errors import InputError
from normattn.lab.data import windows as texts
from normattn.lab.data.retrieval import TASKS, retrieval_set
from normattn.lab.data.tokens import TokenData
from normattn.lab.evaluation.language_model import evaluate_run
from normattn.lab.evaluation.scorer import AnySet
from normattn.lab.runs import require_finished
from normattn.lab.stats import MeasurementStore, digest, joined
from normattn.lab.stats.measurements import Factor
from normattn.lab.stats.store import BESIDE
from normattn.lab.studies.preset import EvaluationSettings, Preset
from normattn.lab.sweep.config import SweepConfig, merged
from normattn.lab.sweep.run import EVALUATIONS, Note, Request, Run, Stage, Sweep
from normattn.lab.training import TrainingConfig
from normattn.lab.training.distributed import choose_device
from normattn.lab.training.init_from import refuse_other_data
from normattn.lab.training.planning import Cost
from normattn.lab.training.tasks.base import MODEL
from normattn.models.config import CausalLMConfig
from normattn.models.flops import flops_per_token
from normattn.models.pretrained import load_model
from normattn.score.spec import UNMODIFIED, is_unmodified

Sets = Callable[[TokenData, int, EvaluationSettings], Sequence[AnySet]]
"""(data, training length, settings) → the texts that a model reads."""


@dataclass(frozen=True)
class TextSetting:
    """What every run of a study shares; `training` is a `TrainingConfig` without score and seed."""

    preset: Preset
    training: Mapping[str, Any]
    evaluation: EvaluationSettings

    @classmethod
    def of(cls, preset: Preset, read: Mapping[str, Any] | None = None) -> TextSetting:
        """The setting of a preset, with the settings of `evaluation` that the study decides."""
        whole = preset.whole_training(TrainingConfig)
        fields = {**preset.evaluation.model_dump(), **(read or {})}
        subject = f"preset {preset.name}, what the study reads"
        return cls(preset, whole, EvaluationSettings.parse(fields, subject))

    @property
    def train_length(self) -> int:
        """The training length L."""
        return int(self.training["model"]["train_length"])

    def trains(self, score: str, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The settings of a training with this score, all but its seed."""
        return merged(self.training, changes or {}, {"model.score": score})

    def run(self, trained: str, methods: Sequence[str] = (UNMODIFIED,), **own: Any) -> TextRun:
        """A training of a score, read with each method; `own` are further fields of the run."""
        known = {"variant": trained, "training": self.trains(trained), "methods": tuple(methods)}
        return TextRun(**{**known, "evaluation": self.evaluation, **own})

    def sweep(
        self,
        request: Request,
        study: str,
        runs: Sequence[Run],
        skipped: Sequence[str] = (),
        sets: Sets | None = None,
        **own: Any,
    ) -> Sweep:
        """The sweep of these runs with every seed; `own` are settings that this study alone has.

        `sets` makes the texts that each run reads, to count the documents they are from.
        """
        evaluation = self.evaluation

        def describe(run: Any, data: TokenData) -> list[str]:
            config = run.training_config
            read = (sets or evaluation_sets)(data, config.model.train_length, run.evaluation)
            documents = {name for chosen in read for name in chosen.documents}
            lines = [
                f"corpus {config.data.corpus}: {data.train.total:,} training tokens in "
                f"{len(data.train):,} documents; {len(documents):,} held-out documents are scored"
            ]
            passes = config.cost().trained / max(1, data.train.total)
            more = f"each run sees the training text about {passes:.1f} times"
            return [*lines, more] if passes > 1 else lines

        seeds = request.seeds_or(self.preset.seeds)
        longest = self.train_length * max(evaluation.multiples)
        return Sweep.of(
            request,
            study,
            SweepConfig.of(self.preset.name, training=self.training, evaluation=evaluation, **own),
            [run.model_copy(update={"seed": seed}) for seed in seeds for run in runs],
            describe=describe,
            facts=(("trained at, tested up to", f"{self.train_length}, {longest}"),),
            skipped=tuple(dict.fromkeys(skipped)),
        )


# Runs


class TextRun(Run):
    """A causal language model, trained and read in the ways that `methods` name."""

    training_class: ClassVar[type[TrainingConfig]] = TrainingConfig
    kind: Literal["read"] = "read"
    evaluation: EvaluationSettings
    methods: tuple[str, ...] = (UNMODIFIED,)

    @property
    def readings(self) -> int:
        """A row for every way of reading."""
        return len(self.methods)

    def measuring(self, folder: Path, config: TrainingConfig) -> Stage:
        """Read the model under each method, by the protocols of `evaluation`."""
        settings, factors = self.evaluation, self.factors
        named = ["" if is_unmodified(method) else method for method in self.methods]
        work = {method: work_key("read", method, settings, factors) for method in named}
        store = MeasurementStore(folder / EVALUATIONS)
        reading = Reading(folder / MODEL, config.model, store, work, factors, self.row)
        rows = settings.max_windows * len(named)
        cost = partial(reading_cost, config, read_lengths(settings), rows)
        return reading_stage(config, settings, evaluation_sets, cost, lambda: [reading])


@dataclass(frozen=True)
class Reading:
    """A saved model, the methods that it is read with, and the store of what is measured.

    `work` has the done-marker of each method ("": none is written). `row` is what tables call the
    model (default: its score), `factors` what else is varied.
    """

    model: Path
    config: CausalLMConfig
    store: MeasurementStore
    work: Mapping[str, str]
    factors: Mapping[str, Factor]
    row: str = ""

    def run(
        self,
        sets: Sequence[AnySet],
        config: TrainingConfig,
        settings: EvaluationSettings,
        on_measured: Callable[[pl.DataFrame], None],
    ) -> pl.DataFrame:
        """Read the texts with each method; what the store holds is not measured again."""

        def finish(method: str) -> None:
            if key := self.work[method]:
                self.store.finish(key)

        measured = evaluate_run(
            load_model(self.model, self.config).to(choose_device(config.device)),
            sets,
            seed=config.seed,
            methods=[*self.work],
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
        return joined(measured)


def reading_stage(
    config: TrainingConfig,
    settings: EvaluationSettings,
    sets: Sets,
    cost: Callable[[], Cost],
    readings: Callable[[], Sequence[Reading]],
) -> Stage:
    """Read models of a training on the texts that `sets` makes.

    `readings` are those of the models that exist by the time it is asked.
    """

    def run(data: TokenData, note: Note) -> None:
        texts, found, done = sets(data, config.model.train_length, settings), readings(), count(1)
        wanted = len(texts) * sum(len(reading.work) for reading in found)
        for reading in found:
            refuse_other_data(data, reading.model.parent)
            reading.run(texts, config, settings, lambda measured: note(next(done), wanted, ""))

    def is_done() -> bool:
        every = [(reading.store, key) for reading in readings() for key in reading.work.values()]
        return bool(every) and all(store.has_finished(key) for store, key in every)

    return Stage("evaluation", cost, is_done, run)


def work_key(
    kind: str, method: str, settings: EvaluationSettings, factors: Mapping[str, Factor]
) -> str:
    """The done-marker of one piece of evaluation: a digest of all it depends on but the data."""
    asked = settings.model_dump(mode="json", exclude={"max_tokens"})
    return digest(kind, method, asked, dict(factors))


def reading_cost(config: TrainingConfig, multiples: Iterable[int], rows: int) -> Cost:
    """What it takes, at most, to read so many rows of texts of so many training lengths."""
    lengths = [config.model.train_length * multiple for multiple in multiples]
    forward = (flops_per_token(config.model, length).forward * length for length in lengths)
    return Cost(scored=sum(lengths) * rows, flops=sum(forward) * rows)


def evaluate_trained(
    run: Path,
    config: TrainingConfig,
    data: TokenData,
    *,
    methods: Sequence[str],
    settings: EvaluationSettings,
    store: MeasurementStore,
    on_done: Callable[[int], None],
) -> pl.DataFrame:
    """Evaluate the finished run in `run` under each method; what `store` holds is not done again.

    `on_done` receives how many evaluations are done. Raises `InputError` for a run that has not
    finished or was trained on other data than `data`, and for a method that cannot be applied.
    """
    refuse_other_data(data, run)
    require_finished(run, "be evaluated")
    sets, done = evaluation_sets(data, config.model.train_length, settings), count(1)
    reading = Reading(run / MODEL, config.model, store, dict.fromkeys(methods, ""), {})
    return reading.run(sets, config, settings, lambda measured: on_done(next(done)))


def asked_alone(run: Path) -> MeasurementStore:
    """What `normattn evaluate` measured of a run in a study's directory, apart from the study's."""
    return MeasurementStore(run / EVALUATIONS / BESIDE)


# Texts


def _multiples(protocol: str, settings: EvaluationSettings) -> list[int]:
    """The lengths of a protocol's texts, in units of L.

    Whole texts are scored at the longest length: their shorter readings are its positions.
    """
    every, longest = list(settings.multiples), settings.multiples[-1]
    if protocol == "train_length":
        return [1]
    if protocol in ("non_repeated", "repeated"):
        return [longest] if longest > 1 else []
    return {"by_position": [longest], "retrieval": len(TASKS) * every}.get(protocol, every)


def evaluation_sets(
    data: TokenData, train_length: int, settings: EvaluationSettings
) -> list[AnySet]:
    """The windows of held-out text that `settings` ask for, of documents never trained on.

    Raises `InputError` when no test document is long enough, naming the longest, and when a length
    is too short for what retrieval states and asks.
    """
    at, drawn = (data.split(settings.split), train_length), (settings.max_windows, settings.seed)
    sets: list[AnySet] = []
    for protocol in ("train_length", "non_repeated", "repeated", "last_segment", "by_position"):
        if protocol not in settings.protocols:
            continue
        if protocol == "last_segment":
            sets += texts.last_segment_sets(*at, settings.multiples, *drawn)
            continue
        for multiple in _multiples(protocol, settings):
            if protocol == "repeated":
                sets.append(texts.repeated_set(*at, multiple, *drawn))
            else:
                sets.append(texts.natural_set(protocol, *at, multiple, *drawn))
    if "retrieval" in settings.protocols:
        sets += [
            retrieval_set(data, task, train_length, multiple, *drawn, settings.split)
            for task in TASKS
            for multiple in settings.multiples
        ]
    if not sets:
        raise InputError("nothing to evaluate: non-repeated and repeated need a multiple above 1")
    return sets


def set_lengths(settings: EvaluationSettings) -> list[int]:
    """The length of each evaluation set in units of L, without making them."""
    return [n for protocol in settings.protocols for n in _multiples(protocol, settings)]


def read_lengths(settings: EvaluationSettings) -> list[int]:
    """The length of what a method reads in units of L, set by set, at most.

    The longest natural text, the last segment behind the longest context and the text read by
    position are the same windows, which go through the model once (`Remembering`).
    """
    lengths, longest = set_lengths(settings), settings.multiples[-1]
    alike = {"non_repeated", "last_segment", "by_position"}.intersection(settings.protocols)
    for _ in range(len(alike) - 1 if longest > 1 else 0):
        lengths.remove(longest)
    return lengths
