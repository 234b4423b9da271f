"""What cells of translation models and Vision Transformers share: a learning rate of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

from pydantic import Field

from normattn.measure import Identity
from normattn.measure.frame import Factor
from normattn.sweep.merging import merged
from normattn.sweep.study import Cell
from normattn.training import LoopConfig

Config = TypeVar("Config", bound=LoopConfig)


class RatedCell(Cell):
    """A model at `rate` times the learning rate of `training`, which is less score and seed."""

    experiment: ClassVar[str]
    rate: float = Field(default=1.0, gt=0)
    training: dict[str, Any]

    def rated(self, kind: type[Config], scores: Mapping[str, Any]) -> Config:
        """The settings of this cell's training run with these scores."""
        what, varied = f"the settings of {self.name}", {"seed": self.seed, **scores}
        config = kind.parse(merged(self.training, varied), what)
        rate = {"optimiser.lr": config.optimiser.lr * self.rate}
        return kind.parse(merged(self.training, varied, rate), what)

    def identity(self, protocol: str, **factors: Factor) -> Identity:
        """Whose measurement it is: the experiment and the learning rate beside row and seed."""
        own: dict[str, Factor] = {
            "experiment": self.experiment,
            "rate": self.rate,
            "learning_rate": self.training_config.optimiser.lr,
        }
        return replace(super().identity(protocol, **own, **factors), row=self.row, score=self.row)

    @property
    def row(self) -> str:
        """The score, as the tables call it."""
        return self.variant
