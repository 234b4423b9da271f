"""The steps of a cell that read a trained language model: as it is, and under methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from normattn.data import TokenData
from normattn.data.evaluation_sets import EvaluationSet
from normattn.evaluation import EvaluationStore, evaluate_run
from normattn.models.accounting import flops_per_token
from normattn.models.pretrained import CONFIG_FILE, load_model
from normattn.recipes.measuring import (
    EVALUATIONS,
    count_evaluations,
    evaluate_trained,
    set_lengths,
)
from normattn.recipes.settings import EvaluationSettings
from normattn.recipes.stages import Note, Stage
from normattn.training import TrainingConfig
from normattn.training.continuation import Continuation
from normattn.training.distribution import choose_device
from normattn.training.workload import Cost, kept_model

AS_IS = "as is"


@dataclass(frozen=True)
class ReadStage(Stage):
    """Read the run in `place` as it is and under each method, by the protocols of `settings`."""

    phase = "evaluation"
    config: TrainingConfig
    place: Path
    methods: tuple[str, ...]
    settings: EvaluationSettings
    name: str

    @property
    def cost(self) -> Cost:
        """Every token that passes through the model, at most."""
        model, rows = self.config.model, self.settings.max_windows * len(self.methods)
        lengths = [length * model.train_length for length in set_lengths(self.settings)]
        flops = sum(flops_per_token(model, length).forward * length for length in lengths)
        return Cost(scored=sum(lengths) * rows, flops=flops * rows)

    @property
    def wanted(self) -> int:
        """The number of evaluations."""
        return count_evaluations(self.settings) * len(self.methods)

    def is_done(self) -> bool:
        """Whether there are as many records as this stage leaves (it may be asked for others)."""
        return len(list((self.place / EVALUATIONS).glob("*.json"))) >= self.wanted

    def run(self, data: TokenData, note: Note) -> str | None:
        """Evaluate what is not yet on record."""
        evaluate_trained(
            self.place,
            self.config,
            data,
            methods=["" if method == AS_IS else method for method in self.methods],
            settings=self.settings,
            name=self.name,
            on_done=lambda done: note(done, self.wanted, ""),
        )
        return None


@dataclass(frozen=True)
class KeptStage(Stage):
    """Read the models that the continued run in `place` kept, and the one it began with (step 0).

    Each is read under the method that the run trains with, on the windows that `sets` makes;
    its records are in a folder of its step.
    """

    phase = "evaluation"
    config: TrainingConfig
    place: Path
    sets: Callable[[TokenData], Sequence[EvaluationSet]]
    lengths: tuple[int, ...]
    settings: EvaluationSettings
    name: str

    @property
    def cost(self) -> Cost:
        """Every token that passes through a model, at most."""
        rows = self.settings.max_windows * len(self.steps)
        model = self.config.model
        flops = sum(flops_per_token(model, length).forward * length for length in self.lengths)
        return Cost(scored=sum(self.lengths) * rows, flops=flops * rows)

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that are read."""
        return (0, *self.config.keep)

    def is_done(self) -> bool:
        """Whether every step that the run came to has its records."""
        found = [list(records_of(self.place, step).glob("*.json")) for step in self._reached()]
        return bool(found) and all(len(records) >= len(self.lengths) for records in found)

    def run(self, data: TokenData, note: Note) -> str | None:
        """Evaluate what is not yet on record."""
        sets, done = self.sets(data), 0
        steps = self._reached()
        for step in steps:

            def count(record: object) -> None:
                nonlocal done
                done += 1
                note(done, len(steps) * len(sets), "")

            evaluate_run(
                load_model(self._model(step), self.config.model).to(
                    choose_device(self.config.device)
                ),
                sets,
                run=f"{self.name}/step{step}",
                seed=self.config.seed,
                methods=[self._continued.method],
                store=EvaluationStore(records_of(self.place, step)),
                precision=self.settings.precision,
                tokens_per_batch=self.settings.max_tokens,
                on_record=count,
            )
        return None

    @property
    def _continued(self) -> Continuation:
        assert self.config.continued is not None
        return self.config.continued

    def _reached(self) -> list[int]:
        """The steps whose models are there; a run that diverged came to fewer."""
        return [step for step in self.steps if (self._model(step) / CONFIG_FILE).is_file()]

    def _model(self, step: int) -> Path:
        return kept_model(self.place, step) if step else Path(self._continued.start)


def records_of(place: Path, step: int) -> Path:
    """Where the records of a kept model are."""
    return place / EVALUATIONS / f"step-{step:08d}"
