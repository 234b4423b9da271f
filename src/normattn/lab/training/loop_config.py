"""The settings of the training loop, without model and data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError, model_validator

from normattn.errors import InputError
from normattn.files import expanded
from normattn.lab.training.config_files import explain, read_settings, refuse_unknown
from normattn.lab.training.optimisers.config import AdamWConfig, OptimiserConfig
from normattn.lab.training.qk_clip import refuse_score
from normattn.lab.training.schedules import ScheduleConfig
from normattn.lab.training.trackers import TrackerName
from normattn.score import ScoreSpec
from normattn.structured import Settings, refuse_beyond

# Settings that leave the loss curve as it is (threads and parallel: up to rounding), so that a run
# may be resumed with others. `tensorboard` stands in the settings of runs from before `track`.
CHANGEABLE = frozenset({"threads", "checkpoint_seconds", "track", "tensorboard", "parallel"})


Config = TypeVar("Config", bound=BaseModel)


class LoopConfig(Settings):
    """How to train, in optimiser steps.

    steps: optimiser steps in all. accumulate: micro-batches per step and process. clip: largest
    gradient norm, None for no clipping. precision: fp32, or bf16 autocast (weights stay fp32).
    device: auto (CUDA where there is one), cpu, cuda, cuda:N. seed: of everything random.
    threads: of torch on the CPU. checkpoint_seconds: time between checkpoints (more where one
    takes long, so that they cost 5 % at most). log_every: steps between metrics lines. keep: steps
    after which the trained model is kept as it is then, beside the last one. inspect_every: steps
    between lines of what attention does inside (diagnostics.jsonl), 0 for none. parallel: what each
    process of torchrun holds: the whole model (ddp), or 1/N of every weight, gradient and moment
    (fsdp); the batch is divided either way, and one process alone holds everything. qk_clip: the
    largest logit that weights are left with (QK-Clip), None for no bound. track: where the
    curves go as well: tensorboard, trackio or wandb (`lab.training.trackers`).
    activation_checkpointing: a block keeps its input alone for the backward pass and computes the
    rest again: less memory for about a third more time (residual scores take another kernel, which
    draws its dropout otherwise).
    """

    steps: int = Field(default=1000, ge=1, le=10**9)
    accumulate: int = Field(default=1, ge=1, le=10**6)
    clip: float | None = Field(default=1.0, gt=0.0)
    precision: Literal["fp32", "bf16"] = "fp32"
    compile: bool = False
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    seed: int = Field(default=0, ge=0, lt=2**63)
    threads: int = Field(default=1, ge=1, le=1024)
    checkpoint_seconds: float = Field(default=30.0, ge=0.0)
    log_every: int = Field(default=1, ge=1)
    keep: tuple[int, ...] = ()
    inspect_every: int = Field(default=0, ge=0)
    # Left out of a dump where they say nothing: runs that were made before them stay the same.
    track: Annotated[TrackerName | None, Field(exclude_if=lambda name: name is None)] = None
    parallel: Annotated[
        Literal["ddp", "fsdp"], Field(exclude_if=lambda parallel: parallel == "ddp")
    ] = "ddp"
    qk_clip: Annotated[
        float | None, Field(gt=0.0, le=1e6, exclude_if=lambda threshold: threshold is None)
    ] = None
    activation_checkpointing: Annotated[bool, Field(exclude_if=lambda on: not on)] = False
    optimiser: OptimiserConfig = AdamWConfig()
    schedule: ScheduleConfig = ScheduleConfig()

    @property
    def scores(self) -> tuple[ScoreSpec, ...]:
        """The scores of the model's attention, where there is a model."""
        return ()

    @model_validator(mode="before")
    @classmethod
    def _name_optimiser(cls, values: Any) -> Any:
        """An optimiser that is not named is AdamW."""
        values = _without_kernels(_renamed(values))
        if isinstance(values, Mapping) and isinstance(values.get("optimiser"), Mapping):
            return {**values, "optimiser": {"name": "adamw", **values["optimiser"]}}
        return values

    @model_validator(mode="after")
    def _check_schedule(self) -> LoopConfig:
        if self.schedule.warmup_steps > self.steps:
            raise ValueError(
                f"schedule.warmup_steps is {self.schedule.warmup_steps}, more than the "
                f"{self.steps} steps of the whole training"
            )
        return self

    @model_validator(mode="after")
    def _check_keep(self) -> LoopConfig:
        if list(self.keep) != sorted(set(self.keep)) or not all(
            1 <= step <= self.steps for step in self.keep
        ):
            raise ValueError(
                f"keep names steps from 1 to {self.steps}, each once and rising, "
                f"got {list(self.keep)}"
            )
        return self

    @model_validator(mode="after")
    def _check_clip(self) -> LoopConfig:
        if self.qk_clip is not None and self.compile:
            raise ValueError("qk_clip looks at logits, which a compiled model does not show")
        return self

    @model_validator(mode="after")
    def _check_parallel(self) -> LoopConfig:
        if self.parallel == "ddp":
            return self
        if self.optimiser.name != "adamw":
            raise ValueError(
                f"parallel is fsdp, and a step of the optimiser {self.optimiser.name} needs whole "
                "matrices; expected adamw, or parallel ddp"
            )
        if self.qk_clip is not None:
            raise ValueError("parallel is fsdp, and qk_clip needs whole heads: expected ddp")
        if self.compile:
            raise ValueError("parallel is fsdp, under which nothing is compiled: expected ddp")
        if self.inspect_every:
            raise ValueError("parallel is fsdp, under which no layer is inspected: expected ddp")
        return self

    @model_validator(mode="after")
    def _check_scores(self) -> LoopConfig:
        if self.qk_clip is not None:
            for score in self.scores:
                refuse_score(score)
        return self

    @classmethod
    def parse(
        cls: type[Config], values: Mapping[str, Any], source: str = "the configuration"
    ) -> Config:
        """Check `values`; `InputError` names the field in `source` and what was expected."""
        values = _without_kernels(_renamed(values))
        refuse_unknown(values, cls, source)
        refuse_beyond(values, source)
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise InputError(f"{source}: {explain(error)}") from error

    @classmethod
    def load(cls: type[Config], path: Path | str) -> Config:
        """Read a .json or .toml file, or the config.json of a run."""
        return cls.parse(read_settings(expanded(path)), str(path))  # type: ignore[attr-defined,no-any-return]


def _renamed(values: Any) -> Any:
    """Settings from before `track`, in which `tensorboard` was on or off, as they are said now."""
    former = values.get("tensorboard") if isinstance(values, Mapping) else None
    if not isinstance(former, bool) or (former and "track" in values):
        return values
    others = {key: value for key, value in values.items() if key != "tensorboard"}
    return {**others, "track": "tensorboard"} if former else others


def _without_kernels(values: Any) -> Any:
    """Settings without the field `kernels` of version 0.x, whose "portable" is now the only rule.

    Raises `InputError` for another value.
    """
    if not isinstance(values, Mapping) or "kernels" not in values:
        return values
    if values["kernels"] != "portable":
        raise InputError(
            f"kernels is {values['kernels']!r}, but kernels are no longer chosen by timing; "
            "leave the field out"
        )
    return {name: value for name, value in values.items() if name != "kernels"}
