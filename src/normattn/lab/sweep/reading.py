"""The steps of a cell that read a trained language model: as it is, and under methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from normattn.lab.data import TokenData
from normattn.lab.data.windows import EvaluationSet
from normattn.lab.evaluation import evaluate_run
from normattn.lab.stats import MeasurementStore, digest
from normattn.lab.stats.measurements import Factor
from normattn.lab.sweep.measuring import (
    EVALUATIONS,
    count_evaluations,
    evaluate_trained,
    read_lengths,
)
from normattn.lab.sweep.settings import EvaluationSettings
from normattn.lab.sweep.stages import Note, Stage
from normattn.lab.training import TrainingConfig
from normattn.lab.training.distributed import choose_device
from normattn.lab.training.init_from import Continuation
from normattn.lab.training.planning import Cost
from normattn.lab.training.tasks.workload import kept_model
from normattn.models.flops import flops_per_token
from normattn.models.pretrained import CONFIG_FILE, load_model

AS_IS = "as is"


@dataclass(frozen=True)
class ReadStage(Stage):
    """Read the run in `folder` as it is and under each method, by the protocols of `settings`.

    `factors` are what else the study varies.
    """

    phase = "evaluation"
    config: TrainingConfig
    folder: Path
    methods: tuple[str, ...]
    settings: EvaluationSettings
    factors: Mapping[str, Factor] = field(default_factory=dict)

    @property
    def cost(self) -> Cost:
        """Every token that passes through the model, at most."""
        length = self.config.model.train_length
        lengths = [length * multiple for multiple in read_lengths(self.settings)]
        return cost_of(self.config, lengths, self.settings.max_windows * len(self.methods))

    @property
    def wanted(self) -> int:
        """The number of evaluations."""
        return count_evaluations(self.settings) * len(self.methods)

    def is_done(self) -> bool:
        """Whether every evaluation of every method is there (there may be others)."""
        store = MeasurementStore(self.folder / EVALUATIONS)
        return all(store.has_finished(self._work(method)) for method in self._named)

    def run(self, data: TokenData, note: Note) -> None:
        """Evaluate what is not yet on record."""
        store = MeasurementStore(self.folder / EVALUATIONS)
        evaluate_trained(
            self.folder,
            self.config,
            data,
            methods=self._named,
            settings=self.settings,
            factors=self.factors,
            on_done=lambda done: note(done, self.wanted, ""),
            on_method=lambda method: store.finish(self._work(method)),
            store=store,
        )

    @property
    def _named(self) -> list[str]:
        """The methods as `evaluate_trained` calls them."""
        return ["" if method == AS_IS else method for method in self.methods]

    def _work(self, method: str) -> str:
        return work_digest("read", method, self.settings, self.factors)


@dataclass(frozen=True)
class KeptStage(Stage):
    """Read the models that the continued run in `folder` kept, and the one it began with (step 0).

    Each is read under the method that the run trains with, on the windows that `sets` makes;
    what was measured is in a folder of its step, the factor `step`; `factors` are further ones.
    """

    phase = "evaluation"
    config: TrainingConfig
    folder: Path
    sets: Callable[[TokenData], Sequence[EvaluationSet]]
    lengths: tuple[int, ...]
    settings: EvaluationSettings
    factors: Mapping[str, Factor] = field(default_factory=dict)

    @property
    def cost(self) -> Cost:
        """Every token that passes through a model, at most."""
        return cost_of(self.config, self.lengths, self.settings.max_windows * len(self.steps))

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that are read."""
        return (0, *self.config.keep)

    def is_done(self) -> bool:
        """Whether every step that the run came to has all of its evaluations."""
        reached = self._reached()
        return bool(reached) and all(self._store(step).has_finished(self._work) for step in reached)

    def run(self, data: TokenData, note: Note) -> None:
        """Evaluate what is not yet on record."""
        sets, done = self.sets(data), 0
        steps = self._reached()
        for step in steps:

            def count(measured: object) -> None:
                nonlocal done
                done += 1
                note(done, len(steps) * len(sets), "")

            store = self._store(step)
            expected = self.config.model if step else self._continued.saved(self.config.model)
            evaluate_run(
                load_model(self._model(step), expected).to(choose_device(self.config.device)),
                sets,
                seed=self.config.seed,
                methods=[self._continued.method],
                store=store,
                precision=self.settings.precision,
                split=self.settings.split,
                factors={"step": step, **self.factors},
                tokens_per_batch=self.settings.max_tokens,
                on_measured=count,
            )
            store.finish(self._work)

    @property
    def _work(self) -> str:
        return work_digest(
            "kept", self._continued.method, self.settings, self.factors, self.lengths
        )

    def _store(self, step: int) -> MeasurementStore:
        return MeasurementStore(records_of(self.folder, step))

    @property
    def _continued(self) -> Continuation:
        assert self.config.continued is not None
        return self.config.continued

    def _reached(self) -> list[int]:
        """The steps whose models are there; a run that diverged came to fewer."""
        return [step for step in self.steps if (self._model(step) / CONFIG_FILE).is_file()]

    def _model(self, step: int) -> Path:
        return kept_model(self.folder, step) if step else Path(self._continued.start)


def work_digest(
    kind: str,
    method: str,
    settings: EvaluationSettings,
    factors: Mapping[str, Factor],
    lengths: Sequence[int] = (),
) -> str:
    """The name of a piece of evaluation: of all that its stage asks for, but for its data."""
    asked = settings.model_dump(mode="json", exclude={"max_tokens"})
    return digest(kind, method, asked, dict(factors), list(lengths))


def cost_of(config: TrainingConfig, lengths: Sequence[int], rows: int) -> Cost:
    """What it takes to read so many rows of texts of these lengths."""
    forward = (flops_per_token(config.model, length).forward * length for length in lengths)
    return Cost(scored=sum(lengths) * rows, flops=sum(forward) * rows)


def records_of(folder: Path, step: int) -> Path:
    """Where the records of a kept model are."""
    return folder / EVALUATIONS / f"step-{step:08d}"
