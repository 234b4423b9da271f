"""What cells of translation models and Vision Transformers share: a learning rate of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

from pydantic import Field

from normattn.lab.stats import Identity
from normattn.lab.stats.measurements import Factor
from normattn.lab.studies.qknorm.rows import parts
from normattn.lab.sweep.settings import merged
from normattn.lab.sweep.study import Cell
from normattn.lab.training import LoopConfig

Config = TypeVar("Config", bound=LoopConfig)


class RatedCell(Cell):
    """A model at `rate` times the learning rate of `training`, the row's, less score and seed."""

    experiment: ClassVar[str]
    rate: float = Field(default=1.0, gt=0)
    training: dict[str, Any]

    def rated(self, kind: type[Config], scores: Mapping[str, Any]) -> Config:
        """The settings of this cell's training run with these scores."""
        subject, varied = f"the settings of {self.name}", {"seed": self.seed, **scores}
        config = kind.parse(merged(self.training, varied), subject)
        rate = {"optimiser.lr": config.optimiser.lr * self.rate}
        return kind.parse(merged(self.training, varied, rate), subject)

    def identity(self, protocol: str, **factors: Factor) -> Identity:
        """Whose measurement it is: row, seed, experiment, learning rate and any QK-Clip."""
        config = self.training_config
        own: dict[str, Factor] = {
            "experiment": self.experiment,
            "rate": self.rate,
            "learning_rate": config.optimiser.lr,
        }
        if config.qk_clip is not None:
            own["qk_clip"] = config.qk_clip
        return replace(
            super().identity(protocol, **own, **factors), row=self.row, score=self.own_score
        )

    @property
    def row(self) -> str:
        """The row, as the tables call it."""
        return self.variant

    @property
    def own_score(self) -> str:
        """The score of the row, without what else it is trained with."""
        return parts(self.row)[0]
