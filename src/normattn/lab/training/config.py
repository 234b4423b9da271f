"""The settings of a training without model and data: steps, optimiser, schedule, distribution."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, Field, ValidationError, model_validator

from normattn.errors import InputError
from normattn.io import expanded, read_json, read_toml
from normattn.lab.training.trackers import TrackerName
from normattn.score import ScoreSpec
from normattn.settings import Settings, refuse_beyond

# Settings that leave the loss curve as it is (threads and parallel: up to rounding), so that a run
# may be resumed with others. `tensorboard` stands in the settings of runs from before `track`.
CHANGEABLE = frozenset({"threads", "checkpoint_seconds", "track", "tensorboard", "parallel"})


Config = TypeVar("Config", bound=BaseModel)
_Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class AdamWConfig(Settings):
    """AdamW (arXiv 1711.05101). Weight decay acts on matrices and embeddings only.

    `moments`: numbers of state for each weight, at least.
    """

    moments: ClassVar[int] = 2
    name: Literal["adamw"] = "adamw"
    lr: float = Field(default=1e-3, gt=0.0, le=10.0)
    betas: tuple[_Beta, _Beta] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0.0, le=1.0)
    weight_decay: float = Field(default=0.1, ge=0.0, le=10.0)


class TigerConfig(Settings):
    """Tiger (kexue 9512). `lr` is relative: it is multiplied by the size of each parameter."""

    moments: ClassVar[int] = 1
    name: Literal["tiger"] = "tiger"
    lr: float = Field(default=1e-3, gt=0.0, le=10.0)
    beta: _Beta = 0.965
    weight_decay: float = Field(default=0.01, ge=0.0, le=10.0)


class MuonConfig(Settings):
    """Muon (arXiv 2502.16982) for matrices, AdamW with `betas` and `eps` for all else.

    One `lr` for both. Weight decay acts on matrices and embeddings only. `split`: attention's
    matrix of queries, keys and values takes its step as one (None), for each of the three ("qkv"),
    or for each of their heads ("heads").
    """

    moments: ClassVar[int] = 1
    name: Literal["muon"] = "muon"
    lr: float = Field(default=1e-3, gt=0.0, le=10.0)
    momentum: _Beta = 0.95
    betas: tuple[_Beta, _Beta] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0.0, le=1.0)
    weight_decay: float = Field(default=0.1, ge=0.0, le=10.0)
    split: Annotated[
        Literal["qkv", "heads"] | None, Field(exclude_if=lambda split: split is None)
    ] = None


OptimiserConfig = Annotated[AdamWConfig | TigerConfig | MuonConfig, Field(discriminator="name")]


class ScheduleConfig(Settings):
    """Warm-up from 0 over `warmup_steps`, then `constant`, or `cosine` down to `floor` × peak."""

    name: Literal["constant", "cosine"] = "cosine"
    warmup_steps: int = Field(default=100, ge=0)
    floor: float = Field(default=0.1, ge=0.0, le=1.0)

    @model_validator(mode="after")
    def _check_floor(self) -> ScheduleConfig:
        # What a run writes of its settings holds the default too, so that one is let pass.
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
        steps: optimiser steps in all.
        accumulate: micro-batches of a step on each process.
        clip: largest gradient norm, None for no clipping.
        precision: fp32, or autocast in bf16 or fp16 (weights stay fp32). Under fp16 the loss is
            scaled up; a step whose gradients overflow is taken again with half the scale.
        device: auto (CUDA where there is one), cpu, cuda, cuda:N.
        seed: of everything random.
        threads: of torch on the CPU.
        checkpoint_seconds: time between checkpoints; more where one takes long, so that they cost
            5 % at most.
        log_every: steps between metrics lines.
        keep: steps after which the trained model is kept, beside the last one.
        inspect_every: steps between lines of attention statistics (diagnostics.jsonl), 0 for none.
        track: where the curves go as well: tensorboard, trackio or wandb.
        parallel: what each process of torchrun holds: the whole model (ddp), or 1/N of every
            weight, gradient and moment (fsdp). The batch is divided either way.
        qk_clip: the largest logit that weights are left with (QK-Clip), None for no bound.
        activation_checkpointing: a block keeps only its input for the backward pass and computes
            the rest again: less memory for about a third more time. (RealFormer's scores take
            another kernel for it, which draws its dropout otherwise.)
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
        values = _of_this_version(values)
        if isinstance(values, Mapping) and isinstance(values.get("optimiser"), Mapping):
            return {**values, "optimiser": {"name": "adamw", **values["optimiser"]}}
        return values

    @model_validator(mode="after")
    def _check_steps(self) -> LoopConfig:
        if self.schedule.warmup_steps > self.steps:
            raise ValueError(
                f"schedule.warmup_steps is {self.schedule.warmup_steps}, more than the "
                f"{self.steps} steps of the whole training"
            )
        keep = list(self.keep)
        if keep != sorted({step for step in keep if 1 <= step <= self.steps}):
            raise ValueError(
                f"keep names steps from 1 to {self.steps}, each once and rising, got {keep}"
            )
        return self

    @model_validator(mode="after")
    def _check_together(self) -> LoopConfig:
        """Raise where one setting leaves no room for another."""
        fsdp, clip, name = self.parallel == "fsdp", self.qk_clip is not None, self.optimiser.name
        for excluded, why in (
            (fsdp and name != "adamw", f"a step of the optimiser {name} needs whole matrices"),
            (fsdp and clip, "qk_clip needs whole heads"),
            (fsdp and self.precision == "fp16", "the loss scale of fp16 needs whole gradients"),
            (fsdp and self.compile, "under it nothing is compiled"),
            (fsdp and bool(self.inspect_every), "under it no layer is inspected"),
        ):
            if excluded:
                raise ValueError(f"parallel is fsdp, and {why}: expected ddp")
        if clip and self.compile:
            raise ValueError("qk_clip looks at logits, which a compiled model does not show")
        for score in self.scores if clip else ():
            refuse_score(score)
        return self

    @classmethod
    def parse(
        cls: type[Config], values: Mapping[str, Any], source: str = "the configuration"
    ) -> Config:
        """Check `values`; `InputError` names the field in `source` and what was expected."""
        values = _of_this_version(values)
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


def _of_this_version(values: Any) -> Any:
    """Settings of earlier versions in the words of this one.

    `tensorboard` was on or off before there was `track`. `kernels` was a choice in version 0.x,
    whose "portable" is now the only rule; `InputError` for another value.
    """
    if not isinstance(values, Mapping):
        return values
    values, former = dict(values), values.get("tensorboard")
    if isinstance(former, bool) and not (former and "track" in values):
        del values["tensorboard"]
        values |= {"track": "tensorboard"} if former else {}
    if values.get("kernels", "portable") != "portable":
        raise InputError(
            f"kernels is {values['kernels']!r}, but kernels are no longer chosen by timing; "
            "leave the field out"
        )
    values.pop("kernels", None)
    return values


def refuse_score(spec: ScoreSpec) -> None:
    """Raise `InputError` where QK-Clip cannot bound the logits by making weights smaller."""
    norms = spec.variant.query_norm(), spec.variant.key_norm()
    for there, why in (
        (norms != (None, None), "its norm undoes it"),
        (spec.cap is not None, "its cap bends the logits"),
        (spec.bias is not None, "its bias is part of the logits"),
        (spec.forgets, "its forgetting is part of the logits"),
        (spec.selection is not None, "what its first head selects is taken off the logits"),
        (spec.residual is not None, "its logits are also those of the layers below"),
        (getattr(spec.position, "widens", False), "it bends queries and keys"),
    ):
        if there:
            raise InputError(f"qk_clip cannot bound the logits of {spec.name} by weights: {why}")


def multiplier(schedule: ScheduleConfig, step: int, steps: int) -> float:
    """The share of the peak learning rate at `step` (1-based) of `steps`.

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


def read_settings(path: Path) -> dict[str, Any]:
    """The object in a .json or .toml file; the configuration inside a run's config.json."""
    if path.suffix not in (".json", ".toml"):
        raise InputError(f"{path} is no configuration: expected a .json or .toml file")
    values = read_json(path) if path.suffix == ".json" else read_toml(path)
    if not isinstance(values, dict):
        raise InputError(f"{path}: expected an object with settings, got {type(values).__name__}")
    stored = values.get("config")
    if values.keys() == {"format", "kind", "config"} and isinstance(stored, dict):
        return stored
    return values


def refuse_unknown(values: Mapping[str, Any], model: type[BaseModel], source: str) -> None:
    """Raise `InputError` for the first field that `model` does not have, naming the nearest."""
    _refuse(values, model, source, "", list(_paths(model)))


def explain(error: ValidationError) -> str:
    """The first thing that is wrong, as one sentence with the dotted field."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    message = str(first["msg"]).removeprefix("Value error, ")
    given = first["input"]
    if first["type"] == "missing":
        return f"{where} is missing"
    if isinstance(given, str | int | float) and repr(given) not in message:
        message = f"{message}, got {given!r}"
    return f"{where}: {message}" if where else message


def _refuse(
    values: Mapping[str, Any], model: type[BaseModel], source: str, prefix: str, known: list[str]
) -> None:
    for key, value in values.items():
        name = f"{prefix}{key}"
        field = model.model_fields.get(key)
        if field is None:
            siblings = [f"{prefix}{sibling}" for sibling in model.model_fields]
            elsewhere = [path for path in known if path.rpartition(".")[2] == key]
            near = difflib.get_close_matches(name, siblings, n=1, cutoff=0.6) or elsewhere[:1]
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(siblings)}"
            raise InputError(f"{source}: unknown field {name}; {hint}")
        if isinstance(value, Mapping):
            inner = _model_for(field.annotation, value)
            if inner is not None:
                _refuse(value, inner, source, f"{name}.", known)


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The settings classes that a field may hold, through unions."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) is dict:  # Its keys are no fields.
        return []
    return [model for part in get_args(annotation) for model in _models(part)]


def _model_for(annotation: Any, value: Mapping[str, Any]) -> type[BaseModel] | None:
    """The class that `value` means: of several, the one of its `name`, or the first."""
    candidates = _models(annotation)
    for candidate in candidates:
        name = candidate.model_fields.get("name")
        if len(candidates) > 1 and name is not None and name.default == value.get("name"):
            return candidate
    return candidates[0] if candidates else None


def _paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted field of a settings class."""
    for key, field in model.model_fields.items():
        yield f"{prefix}{key}"
        for inner in _models(field.annotation):
            yield from _paths(inner, f"{prefix}{key}.")
