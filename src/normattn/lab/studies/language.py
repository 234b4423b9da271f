"""What the studies of causal language models share: their settings, runs, texts and scores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, Literal

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
from normattn.lab.stats import MeasurementStore, digest, joined
from normattn.lab.stats.measurements import Factor
from normattn.lab.stats.store import BESIDE
from normattn.lab.studies.preset import EvaluationSettings, Preset
from normattn.lab.sweep.config import SweepConfig, merged, validated
from normattn.lab.sweep.paths import RunPaths
from normattn.lab.sweep.run import (
    EVALUATIONS,
    UNKNOWN,
    Note,
    Request,
    Run,
    Stage,
    Sweep,
    training_stage,
)
from normattn.lab.training import TrainingConfig
from normattn.lab.training.distributed import choose_device
from normattn.lab.training.init_from import refuse_other_data
from normattn.lab.training.planning import Cost
from normattn.lab.training.tasks.text import CausalWorkload
from normattn.lab.training.tasks.workload import MODEL, kept_model
from normattn.models import CausalLM
from normattn.models.flops import flops_per_token
from normattn.models.pretrained import CONFIG_FILE, load_model

AS_IS = "as is"
Sets = Callable[[TokenData, int, EvaluationSettings], Sequence[AnySet]]


# Settings


@dataclass(frozen=True)
class TextSetting:
    """What every run of a study of language models shares.

    `training` is a whole `TrainingConfig` without the score and the seed.
    """

    preset: Preset
    training: Mapping[str, Any]
    evaluation: EvaluationSettings

    @classmethod
    def of(cls, preset: Preset, read: Mapping[str, Any] | None = None) -> TextSetting:
        """What a preset says of it, but for what the study reads: settings of `evaluation`."""
        varied = {"seed": 0, "model.score": "Baseline"}
        whole = TrainingConfig.parse(
            merged(preset.training, varied), f"preset {preset.name}, training"
        ).model_dump(mode="json")
        del whole["seed"], whole["model"]["score"]
        evaluation = validated(
            EvaluationSettings,
            {**preset.evaluation.model_dump(), **(read or {})},
            f"preset {preset.name}, what the study reads",
        )
        return cls(preset, whole, evaluation)

    @property
    def train_length(self) -> int:
        """The training length L."""
        return int(self.training["model"]["train_length"])

    def trains(self, score: str, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The settings of a training with this score, all but its seed."""
        return merged(self.training, changes or {}, {"model.score": score})

    def sweep(
        self,
        request: Request,
        study: str,
        runs: Sequence[Run],
        skipped: Sequence[str] = (),
        sets: Sets | None = None,
        **own: Any,
    ) -> Sweep:
        """The sweep of these runs; `own` are settings that this study alone has.

        `sets` makes the texts that each run reads, to say how many documents they are from.
        """
        evaluation = self.evaluation
        config = SweepConfig.of(
            self.preset.name, training=self.training, evaluation=evaluation, **own
        )
        longest = self.train_length * max(evaluation.multiples)
        return Sweep.of(
            request,
            study,
            config,
            runs,
            describe=lambda run, data: _described(run, data, (sets or evaluation_sets)),
            facts=(("trained at, tested up to", f"{self.train_length}, {longest}"),),
            skipped=tuple(dict.fromkeys(skipped)),
        )


def _described(run: TextRun, data: TokenData, sets: Sets) -> list[str]:
    """What a study says of its corpus."""
    config = run.training_config
    texts = sets(data, config.model.train_length, run.evaluation)
    documents = {name for chosen in texts for name in chosen.documents}
    said = [
        f"corpus {config.data.corpus}: {data.train.total:,} training tokens in "
        f"{len(data.train):,} documents; {len(documents):,} held-out documents are scored"
    ]
    passes = run.workload.cost(config).trained / max(1, data.train.total)
    if passes > 1:
        said.append(f"each run sees the training text about {passes:.1f} times")
    return said


# Runs


class TextRun(Run):
    """A causal language model, trained and read in the ways that `methods` name."""

    workload: ClassVar[CausalWorkload] = CausalWorkload()
    kind: Literal["read"] = "read"
    evaluation: EvaluationSettings
    methods: tuple[str, ...] = (AS_IS,)

    @property
    def readings(self) -> int:
        """A row for every way of reading."""
        return len(self.methods)

    def stages(self, paths: RunPaths) -> list[Stage]:
        """Train, then read."""
        config = self.training_config
        return [
            training_stage(self.workload, config, paths.run),
            self._reading_stage(config, paths.run),
        ]

    def _reading_stage(self, config: TrainingConfig, folder: Path) -> Stage:
        """Read the run in `folder` under each method, by the protocols of `evaluation`."""
        settings, named = self.evaluation, ["" if m == AS_IS else m for m in self.methods]
        store = MeasurementStore(folder / EVALUATIONS)
        lengths, wanted = read_lengths(settings), len(set_lengths(settings)) * len(named)

        def work(method: str) -> str:
            return _work("read", method, settings, self.factors)

        def run(data: TokenData, note: Note) -> None:
            evaluate_trained(
                folder,
                config,
                data,
                methods=named,
                settings=settings,
                row=self.row,
                factors=self.factors,
                on_done=lambda done: note(done, wanted, ""),
                on_method=lambda method: store.finish(work(method)),
                store=store,
            )

        return Stage(
            "evaluation",
            lambda: reading_cost(config, lengths, settings.max_windows * len(named)),
            lambda: all(store.has_finished(work(method)) for method in named),
            run,
        )


def text_runs(
    setting: TextSetting, seeds: Sequence[int], methods: Mapping[str, Sequence[str]]
) -> list[TextRun]:
    """A training of each score and seed, read in the ways that `methods` name for the score."""
    trained = {score: setting.trains(score) for score in methods}
    return [
        TextRun(
            variant=score,
            seed=seed,
            training=trained[score],
            evaluation=setting.evaluation,
            methods=tuple(own),
        )
        for seed in seeds
        for score, own in methods.items()
    ]


def kept_stage(
    config: TrainingConfig,
    folder: Path,
    sets: Sets,
    multiples: Sequence[int],
    settings: EvaluationSettings,
    factors: Mapping[str, Factor],
) -> Stage:
    """Read the models that the continued run in `folder` kept, and the one it began with (step 0).

    Each is read under the method that the run trains with, on the windows that `sets` makes, of so
    many `multiples` of the training length. What was measured is in a folder of its step, the
    factor `step`; `factors` are further ones.
    """
    continued, steps = config.continued, (0, *config.keep)
    assert continued is not None
    work = _work("kept", continued.method, settings, {**factors, "multiples": str(multiples)})

    def model(step: int) -> Path:
        return kept_model(folder, step) if step else Path(continued.start)

    def store(step: int) -> MeasurementStore:
        return MeasurementStore(folder / EVALUATIONS / f"step-{step:08d}")

    def reached() -> list[int]:
        """The steps whose models are there; a run that diverged came to fewer."""
        return [step for step in steps if (model(step) / CONFIG_FILE).is_file()]

    def cost() -> Cost:
        return reading_cost(config, multiples, settings.max_windows * len(steps))

    def run(data: TokenData, note: Note) -> None:
        texts, read = sets(data, config.model.train_length, settings), reached()
        done = count()
        for step in read:
            expected = config.model if step else continued.saved(config.model)
            records = store(step)
            evaluate_run(
                load_model(model(step), expected).to(choose_device(config.device)),
                texts,
                seed=config.seed,
                methods=[continued.method],
                store=records,
                precision=settings.precision,
                split=settings.split,
                factors={"step": step, **factors},
                tokens_per_batch=settings.max_tokens,
                on_measured=lambda measured: note(next(done) + 1, len(read) * len(texts), ""),
            )
            records.finish(work)

    def is_done() -> bool:
        read = reached()
        return bool(read) and all(store(step).has_finished(work) for step in read)

    return Stage("evaluation", cost, is_done, run)


def continued_config(run: Run, paths: RunPaths, changes: Mapping[str, Any]) -> TrainingConfig:
    """The settings of a training that goes on from the model of `run`, with these changes."""
    going_on = {"continued": {"start": str(paths.run / MODEL), "weights": UNKNOWN}}
    fields = merged(run.training_config.model_dump(mode="json"), going_on, changes)
    return TrainingConfig.parse(fields, f"the settings of {run.name}")


def _work(
    kind: str, method: str, settings: EvaluationSettings, factors: Mapping[str, Factor]
) -> str:
    """The name of a piece of evaluation: of all that its stage asks for, but for its data."""
    asked = settings.model_dump(mode="json", exclude={"max_tokens"})
    return digest(kind, method, asked, dict(factors))


def reading_cost(config: TrainingConfig, multiples: Iterable[int], rows: int) -> Cost:
    """What it takes, at most, to read so many rows of texts of so many training lengths."""
    lengths = [config.model.train_length * multiple for multiple in multiples]
    forward = (flops_per_token(config.model, length).forward * length for length in lengths)
    return Cost(scored=sum(lengths) * rows, flops=sum(forward) * rows)


# Texts


def evaluation_sets(
    data: TokenData, train_length: int, settings: EvaluationSettings
) -> list[AnySet]:
    """The windows of held-out text that `settings` ask for, of documents never trained on.

    Raises `InputError` when no test document is long enough, naming the longest, and when a length
    is too short for what retrieval states and asks.
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
    position are the same windows, which go through the model once (`evaluation.recalling`).
    """
    lengths, (longest,) = set_lengths(settings), settings.multiples[-1:]
    alike = {"non_repeated", "last_segment", "by_position"}.intersection(settings.protocols)
    for _ in range(len(alike) - 1 if longest > 1 else 0):
        lengths.remove(longest)
    return lengths


def evaluate_trained(
    run: Path,
    config: TrainingConfig,
    data: TokenData,
    *,
    methods: Sequence[str],
    settings: EvaluationSettings,
    row: str = "",
    factors: Mapping[str, Factor] | None = None,
    on_done: Callable[[int], None] = lambda done: None,
    on_method: Callable[[str], None] = lambda method: None,
    store: MeasurementStore | None = None,
) -> pl.DataFrame:
    """Evaluate the finished run in `run` under each method; what was measured is not done again.

    `row` is what the tables call it (default: its score), `factors` what else the study varies;
    `on_done` is told how many evaluations are done,
    `on_method` of each method that is finished; `store` keeps the records, by default the run's
    own. Raises `InputError` for a run that has not finished or was trained on other data than
    `data`, and for a method that cannot be applied.
    """
    refuse_other_data(data, run)
    done = count(1)
    return joined(
        evaluate_run(
            trained_model(run, config),
            evaluation_sets(data, config.model.train_length, settings),
            seed=config.seed,
            methods=methods,
            factor=settings.factor,
            store=MeasurementStore(run / EVALUATIONS) if store is None else store,
            precision=settings.precision,
            split=settings.split,
            row=row,
            factors=factors,
            tokens_per_batch=settings.max_tokens,
            on_measured=lambda measured: on_done(next(done)),
            on_method=on_method,
        )
    )


def asked_alone(run: Path) -> MeasurementStore:
    """What `normattn evaluate` measured of a run in a study's directory, beside the study's own."""
    return MeasurementStore(run / EVALUATIONS / BESIDE)


def trained_model(run: Path, config: TrainingConfig) -> CausalLM:
    """The model of the run in `run`, on its device; `InputError` where it has not finished."""
    require_finished(run, "be evaluated")
    return load_model(run / MODEL, config.model).to(choose_device(config.device))
