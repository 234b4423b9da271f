"""What studies of trained models share: the model to measure, whose its numbers are, how it ended.

A training has *learned*, or is *stuck* (less than `MARGIN` nats better than the unigram model, so
that it learned nothing of the context), or has *diverged* (its loss stopped being finite).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import polars as pl
from torch import nn

from normattn.lab.evaluation.masked import learnt_nothing
from normattn.lab.evaluation.scorer import weights_digest
from normattn.lab.report.view import View
from normattn.lab.stats import Identity, fact, identified
from normattn.lab.stats.arrays import Where
from normattn.lab.sweep.paths import RunPaths
from normattn.lab.sweep.run import Note, Run, Stage, measuring_stage, training_stage
from normattn.lab.training.distributed import choose_device
from normattn.lab.training.planning import Cost
from normattn.lab.training.tasks.base import MODEL
from normattn.models.pretrained import load_as

End = Literal["diverged", "stuck", "learned"]
"""From the worst to the best."""


class ModelRun(Run):
    """A training, and what its model measures once: the record of the name `record`."""

    record: ClassVar[str]
    phase: ClassVar[str] = "evaluation"

    def stages(self, paths: RunPaths) -> list[Stage]:
        """Train, then measure the model."""
        config = self.training_config
        return [
            training_stage(config, paths.run),
            self.measuring(paths.run, config),
        ]

    def measuring(self, folder: Path, config: Any) -> Stage:
        """Measure the model that was trained with `config` in `folder`."""
        return measuring_stage(
            folder,
            self.record,
            lambda data, note: self.measure(folder, config, data, note),
            lambda: self.cost(config),
            self.phase,
        )

    @abstractmethod
    def measure(self, folder: Path, config: Any, data: Any, note: Note) -> pl.DataFrame:
        """What the model in `folder` gives."""

    @abstractmethod
    def cost(self, config: Any) -> Cost:
        """What measuring takes."""

    def model_in(self, folder: Path, config: Any) -> Any:
        """The model that was trained with `config` in `folder`, on its device."""
        kind = self.training_class.model_class
        return load_as(kind, folder / MODEL, config.model).to(choose_device(config.device))

    def whose(
        self,
        protocol: str,
        model: nn.Module,
        *,
        data: str,
        split: str = "test",
        length: int = 0,
        settings: str = "",
    ) -> Identity:
        """Whose scores they are: those of this run's model on the data of this fingerprint."""
        return replace(
            self.identity(protocol),
            length=length,
            train_length=length,
            split=split,
            data=data,
            weights=weights_digest(model),
            settings=settings,
        )


def training_facts(whose: Identity, facts: Mapping[str, float | int]) -> pl.DataFrame:
    """Numbers of a training, under the protocol "training"."""
    parts = [fact(name, float(value)) for name, value in facts.items()]
    return identified(replace(whose, protocol="training"), parts)


def ends(view: View, where: Where) -> dict[int, End]:
    """How the training of each seed ended, in the rows `where`; empty where none was measured.

    Each seed stands for itself: a mean over seeds would hide one that learned nothing.
    """
    found: dict[int, End] = {}
    losses, unigrams = (view.sums(name, where) for name in ("loss", "unigram_loss"))
    if losses is not None and unigrams is not None:
        ours, guesses = (
            (part.numerator.sum((1, 2)) / part.denominator.sum((1, 2))).tolist()
            for part in (losses, unigrams)
        )
        for seed, *both in zip(losses.seeds, ours, guesses, strict=True):
            found[seed] = "stuck" if learnt_nothing(*both) else "learned"
    lost = view.values("seed", {**where, "protocol": "training", "statistic": "diverged"})
    return found | dict.fromkeys(sorted(lost), "diverged")
