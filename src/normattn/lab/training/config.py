"""Training settings other than model and data: steps, optimiser, schedule, distribution."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field, model_validator

from normattn.errors import InputError
from normattn.io import expand_path, read_json, read_toml
from normattn.lab.training.trackers import TrackerName
from normattn.score import ScoreSpec
from normattn.settings import Settings

# Settings that may change when a run resumes: they do not affect the losses, or (threads, parallel)
# only by rounding.
CHANGEABLE = frozenset({"threads", "checkpoint_seconds", "track", "parallel"})


Config = TypeVar("Config", bound="LoopConfig")
Share = Annotated[float, Field(ge=0.0, lt=1.0)]
Rate = Annotated[float, Field(gt=0.0, le=10.0)]
Decay = Annotated[float, Field(ge=0.0, le=10.0)]
Epsilon = Annotated[float, Field(gt=0.0, le=1.0)]


def omit_default(default: object) -> Any:
    """Return a field that is not dumped at its default, so that older runs keep their digests."""
    return Field(exclude_if=lambda value: value == default)


class AdamWConfig(Settings):
    """AdamW (arXiv 1711.05101). Weight decay applies to matrices and embeddings only.

    `moments`: the least number of state tensors per weight.
    """

    moments: ClassVar[int] = 2
    name: Literal["adamw"] = "adamw"
    lr: Rate = 1e-3
    betas: tuple[Share, Share] = (0.9, 0.95)
    eps: Epsilon = 1e-8
    weight_decay: Decay = 0.1


class TigerConfig(Settings):
    """Tiger (kexue 9512). `lr` is relative to the size of each parameter."""

    moments: ClassVar[int] = 1
    name: Literal["tiger"] = "tiger"
    lr: Rate = 1e-3
    beta: Share = 0.965
    weight_decay: Decay = 0.01


class MuonConfig(Settings):
    """Muon (arXiv 2502.16982) for hidden matrices, AdamW (`betas`, `eps`) for all else.

    AdamW also updates embeddings and the head. Both use `lr`. Weight decay applies to matrices and
    embeddings only. `split`: attention's fused matrix is orthogonalised as one (None), as queries,
    keys and values ("qkv"), or by head ("heads").
    """

    moments: ClassVar[int] = 1
    name: Literal["muon"] = "muon"
    lr: Rate = 1e-3
    momentum: Share = 0.95
    betas: tuple[Share, Share] = (0.9, 0.95)
    eps: Epsilon = 1e-8
    weight_decay: Decay = 0.1
    split: Annotated[Literal["qkv", "heads"] | None, omit_default(None)] = None


OptimiserConfig = Annotated[AdamWConfig | TigerConfig | MuonConfig, Field(discriminator="name")]


class ScheduleConfig(Settings):
    """Warm-up from 0 over `warmup_steps`, then `constant`, or `cosine` down to `floor` × peak."""

    name: Literal["constant", "cosine"] = "cosine"
    warmup_steps: int = Field(default=100, ge=0)
    floor: float = Field(default=0.1, ge=0.0, le=1.0)

    @model_validator(mode="after")
    def _check_floor(self) -> ScheduleConfig:
        # The default is allowed, because saved settings contain it.
        default = type(self).model_fields["floor"].default
        if self.name == "constant" and self.floor != default:
            raise ValueError(
                f"floor {self.floor:g} changes nothing where the learning rate stays constant; "
                f"leave it at {default:g}, or take cosine"
            )
        return self


class LoopConfig(Settings):
    """How to train, in optimiser steps.

    Args:
        steps: number of optimiser steps.
        accumulate: micro-batches of a step on each process.
        clip: maximum gradient norm, None for no clipping.
        precision: fp32, or autocast in bf16 or fp16 (weights stay fp32). Under fp16 the loss is
            scaled; a step whose gradients overflow is repeated with half the scale.
        compile: whether torch.compile compiles the forward and backward passes.
        device: auto (CUDA if available), cpu, cuda, cuda:N.
        seed: seed of all random numbers.
        threads: torch's threads on the CPU.
        checkpoint_seconds: time between checkpoints, 0 for one after every step; longer if they
            would take more than 5 % of the time, except for 0.
        log_every: steps between metrics lines; the first and the last step always have one.
        keep: steps after which the model is saved, in addition to the last one.
        inspect_every: steps between attention statistics, 0 for none; in Python add a probe.
        track: experiment tracker: tensorboard, trackio or wandb.
        parallel: each process of torchrun holds the full model (ddp), or 1/N of every weight,
            gradient and moment (fsdp). Both divide the batch.
        qk_clip: bound on attention logits (QK-Clip), None for no bound.
        unit_weights: normalise the weight matrices along the model's width before the first step
            and after each, as nGPT does; for `placement` nGPT.
        activation_checkpointing: store only the inputs of blocks for the backward pass and
            recompute the rest: less memory for about a third more time. (RealFormer then uses
            another kernel, whose dropout is drawn differently.)
    """

    steps: int = Field(default=1000, ge=1, le=10**9)
    accumulate: int = Field(default=1, ge=1, le=10**6)
    clip: float | None = Field(default=1.0, gt=0.0)
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    compile: bool = False
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    seed: int = Field(default=0, ge=0, lt=2**63)
    threads: int = Field(default=1, ge=1, le=1024)
    checkpoint_seconds: float = Field(default=30.0, ge=0.0)
    log_every: int = Field(default=1, ge=1)
    keep: tuple[int, ...] = ()
    inspect_every: int = Field(default=0, ge=0)
    track: Annotated[TrackerName | None, omit_default(None)] = None
    parallel: Annotated[Literal["ddp", "fsdp"], omit_default("ddp")] = "ddp"
    qk_clip: Annotated[float | None, Field(gt=0.0, le=1e6), omit_default(None)] = None
    unit_weights: Annotated[bool, omit_default(False)] = False
    activation_checkpointing: Annotated[bool, omit_default(False)] = False
    optimiser: OptimiserConfig = AdamWConfig()
    schedule: ScheduleConfig = ScheduleConfig()

    @property
    def scores(self) -> tuple[ScoreSpec, ...]:
        """The model's attention scores; () without a model."""
        return ()

    @model_validator(mode="before")
    @classmethod
    def _name_optimiser(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and isinstance(values.get("optimiser"), Mapping):
            return {**values, "optimiser": {"name": "adamw", **values["optimiser"]}}
        return values

    @model_validator(mode="after")
    def _check_together(self) -> LoopConfig:
        warmup, keep = self.schedule.warmup_steps, list(self.keep)
        if warmup > self.steps:
            raise ValueError(
                f"schedule.warmup_steps is {warmup}, more than the {self.steps} steps of the whole "
                "training"
            )
        if keep != sorted({step for step in keep if 1 <= step <= self.steps}):
            raise ValueError(
                f"keep names steps from 1 to {self.steps}, each once and rising, got {keep}"
            )
        unsupported_by_fsdp = {
            "a step of the optimiser tiger needs the size of whole matrices": (
                self.optimiser.name == "tiger"
            ),
            "the loss scale of fp16 needs whole gradients": self.precision == "fp16",
            "nothing is compiled under it": self.compile,
            "no layer is inspected under it": self.inspect_every > 0,
            "unit_weights needs whole columns": self.unit_weights,
        }
        for why, used in unsupported_by_fsdp.items():
            if used and self.parallel == "fsdp":
                raise ValueError(f"parallel is fsdp, and {why}: expected ddp")
        qk_clip = self.qk_clip is not None
        if qk_clip and self.unit_weights:
            raise ValueError("qk_clip makes weights smaller, which unit_weights undoes")
        if qk_clip and self.compile:
            raise ValueError("qk_clip looks at logits, which a compiled model does not show")
        for score in self.scores if qk_clip else ():
            check_qk_clip(score)
        return self

    @classmethod
    def load(cls: type[Config], path: Path | str) -> Config:
        """Read settings from a .json or .toml file, or from a run's config.json."""
        return cls.parse(read_settings(expand_path(path)), str(path))


def lr_multiplier(schedule: ScheduleConfig, step: int, steps: int) -> float:
    """Return the learning rate at `step` (1-based) of `steps` as a share of its peak.

    Warm-up: t/w for t ≤ w. Then 1, or floor + (1 − floor)·(1 + cos(π·(t − w)/(T − w)))/2, which is
    1 at t = w and `floor` at the last step.
    """
    warmup = schedule.warmup_steps
    if step <= warmup:
        return step / warmup
    if schedule.name == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return schedule.floor + (1.0 - schedule.floor) * (1.0 + math.cos(math.pi * progress)) / 2.0


def check_qk_clip(spec: ScoreSpec) -> None:
    """Raise `InputError` if shrinking weights cannot bound the logits of a score."""
    norms = spec.variant.query_norm(), spec.variant.key_norm()
    for applies, why in (
        (norms != (None, None), "its norm undoes it"),
        (spec.cap is not None, "its cap bends the logits"),
        (spec.bias is not None, "its bias is part of the logits"),
        (spec.forgets, "its forgetting is part of the logits"),
        (spec.selection is not None, "what its first head selects is taken off the logits"),
        (spec.residual is not None, "its logits are also those of the layers below"),
        (getattr(spec.position, "widens", False), "it bends queries and keys"),
    ):
        if applies:
            raise InputError(f"qk_clip cannot bound the logits of {spec.name} by weights: {why}")


def read_settings(path: Path) -> dict[str, Any]:
    """Read settings from a .json or .toml file, or from a run's config.json."""
    if path.suffix not in (".json", ".toml"):
        raise InputError(f"{path} is not a configuration: expected a .json or .toml file")
    values = read_json(path) if path.suffix == ".json" else read_toml(path)
    if not isinstance(values, dict):
        raise InputError(f"{path}: expected an object with settings, got {type(values).__name__}")
    stored = values.get("config")
    if values.keys() == {"format", "kind", "config"} and isinstance(stored, dict):
        return stored
    return values
