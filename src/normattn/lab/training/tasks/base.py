"""A training of any kind of model: from one configuration to one saved model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import Field, ValidationError, model_validator
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from normattn.errors import InputError
from normattn.lab.data.sources import SplitSettings
from normattn.lab.runs import RunDirectory, read_metrics
from normattn.lab.training.config import CHANGEABLE, LoopConfig
from normattn.lab.training.distributed import World, world
from normattn.lab.training.init_from import KEPT, begin_corpus
from normattn.lab.training.loop import train
from normattn.lab.training.planning import Cost, check_memory
from normattn.lab.training.task import TrainingResult, derive_seed
from normattn.models.config import StackConfig
from normattn.models.flops import planned_parameters
from normattn.models.pretrained import check_weights, save_model
from normattn.score import ScoreSpec
from normattn.settings import explain
from normattn.terminal import warn

MODEL = "model"
Loss = tuple[Tensor, Mapping[str, Tensor]]


class ModelTrainingConfig(LoopConfig, ABC):
    """A model, its data, and how it is trained: the settings, and what follows from them.

    Settings of `model` that its data decides (`decided`) or suggests (`suggested`) may be left out.
    A kind of training names its run directories (`kind`), the class of its model, the function that
    prepares its data, and the settings that may differ when a run resumes (`changeable`). It
    defines `batches`, `loss` and `work`.
    """

    kind: ClassVar[str]
    model_class: ClassVar[Any]
    prepare_data: ClassVar[Any]
    changeable: ClassVar[frozenset[str]] = CHANGEABLE

    model: StackConfig
    data: SplitSettings

    @classmethod
    def decided(cls, data: Any) -> dict[str, Any]:
        """The settings of the model that its data decides: others are refused."""
        return {}

    @classmethod
    def suggested(cls, data: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of the model that its data suggests, where `given` does not have them."""
        return {}

    @property
    def scores(self) -> tuple[ScoreSpec, ...]:
        """The scores that the model computes."""
        return (self.model.score,)

    @model_validator(mode="before")
    @classmethod
    def _fill_model(cls, values: Any) -> Any:
        """What the data decides; saying it twice is allowed, not needed."""
        if not isinstance(values, Mapping) or not isinstance(values.get("model"), Mapping):
            return values
        kind: Any = cls.model_fields["data"].annotation
        data, given = values.get("data", {}), values["model"]
        try:
            data = kind.model_validate(data) if isinstance(data, Mapping) else data
        except ValidationError as error:
            raise ValueError(f"data.{explain(error)}") from error
        filled = {**cls.suggested(data, given), **cls.decided(data), **given}
        return {**values, "model": filled}

    @model_validator(mode="after")
    def _check_decided(self) -> ModelTrainingConfig:
        """The model's settings must be those of the data."""
        for name, wanted in self.decided(self.data).items():
            given = getattr(self.model, name)
            if given != wanted:
                raise ValueError(
                    f"model.{name} is {given} but the data makes it {wanted}; leave it out"
                )
        return self

    @abstractmethod
    def batches(self, data: Any, seed: int) -> Any:
        """Batches with `batch(step, shard, shards)`, a pure function of the step, as arrays.

        Raises `InputError` for data that gives none.
        """

    @abstractmethod
    def loss(self, model: Any, batch: Any, shards: int) -> Loss:
        """The mean loss () in nats of a batch, one of `shards`, and other () means to log."""

    @abstractmethod
    def work(self) -> tuple[int, float]:
        """The tokens of a step, and its floating-point operations, before data is prepared."""

    def tokens_per_step(self, batches: Any) -> int:
        """Targets in the global batch, on average."""
        return self.work()[0]

    def leave(self, data: Any, out: Path) -> None:
        """Write into the run's directory what a reader of the model needs besides it."""

    def make_model(self) -> nn.Module:
        """The model that training begins with."""
        model: nn.Module = self.model_class(self.model)
        return model

    def prepare(self) -> Any:
        """The data, from its cache where there is one; `InputError` for data that cannot be."""
        return self.prepare_data(self.data)

    def cost(self) -> Cost:
        """What the whole training takes."""
        tokens, flops = self.work()
        return Cost(
            trained=self.steps * tokens,
            flops=self.steps * flops,
            parameters=planned_parameters(self.model_class, self.model),
            kept=self.model.dim * self.model.layers,
        )

    def check(self, data: Any, shards: int) -> None:
        """Raise `InputError` for what cannot be trained, before the run directory is made."""
        self.batches(data, derive_seed(self.seed, "batches"))

    def task(self, data: Any, device: torch.device, shards: int) -> ModelTask:
        """The task on `device`, whose batches come in `shards` shards a step."""
        return ModelTask(self, data, device, shards)


class BatchTrainingConfig(ModelTrainingConfig):
    """A training by batches of as many rows.

    batch_size: rows per optimiser step, over all processes and micro-batches, whose number must
    divide it.
    """

    batch_size: int = Field(default=32, ge=1, le=10**7)

    @model_validator(mode="after")
    def _check_batch(self) -> BatchTrainingConfig:
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"batch_size {self.batch_size} does not divide into {self.accumulate} "
                "micro-batches; accumulate must divide it"
            )
        return self

    def check(self, data: Any, shards: int) -> None:
        """Besides, the batch must divide into the micro-batches of all processes."""
        if self.batch_size % shards:
            raise InputError(
                f"batch_size {self.batch_size} does not divide into {shards} micro-batches "
                "(processes × accumulate)"
            )
        super().check(data, shards)


class ModelTask:
    """A model with its batches and loss, as the loop trains it (`task.Task`)."""

    def __init__(
        self, config: ModelTrainingConfig, data: Any, device: torch.device, shards: int
    ) -> None:
        self.config, self.model = config, config.make_model().to(device)
        self._batches = config.batches(data, derive_seed(config.seed, "batches"))
        self.tokens_per_step = config.tokens_per_step(self._batches)
        self.loss = partial(config.loss, self.model, shards=shards)

    def batch(self, step: int, shard: int, shards: int) -> Any:
        """Shard `shard` of `shards` of the global batch of `step`, as tensors on the CPU."""
        return tree_map(torch.as_tensor, self._batches.batch(step, shard, shards))


def train_model(config: ModelTrainingConfig, out: Path | str, **choices: Any) -> TrainingResult:
    """Train what `config` says in the run directory `out`, or resume it where it was stopped.

    `choices` are those of `train`: `on_step`, `should_stop`, `show_progress`, `probes`. At the end
    `out/model/` holds the trained model (config.json, model.safetensors), `out` what the kind of
    training leaves (such as the tokeniser), and `out/kept/step-N/` the models of `config.keep`. A
    finished run is returned at once. Raises as `train` does, and `InputError` for unusable data, a
    directory of another run and a training that cannot fit into memory.
    """
    out = Path(out)

    def opened() -> RunDirectory:
        return RunDirectory.open(out, config, config.kind, changeable=config.changeable)

    with world(config.device) as process:
        # A directory that cannot hold this run is refused here, before data is prepared for it.
        done = process.on_main(lambda: _finished(opened()))
        if done is not None:
            return done
        check_memory(config.cost(), config, process)
        data = config.prepare()
        shards = process.size * config.accumulate
        config.check(data, shards)

        def make_task(this_process: World) -> ModelTask:
            # Now that the directory is this run's and locked.
            this_process.on_main(lambda: begin_corpus(data, out))
            return config.task(data, this_process.device, shards)

        def export(task: Any) -> None:
            config.leave(data, out)
            save_model(task.model, out / MODEL)

        def export_kept(task: Any, step: int) -> None:
            save_model(task.model, kept_model(out, step))

        choices |= {"export": export, "export_kept": export_kept}
        return train(make_task, config, opened(), **choices)


def kept_model(run: Path, step: int) -> Path:
    """Where the run in `run` keeps its model of `step`, one of its configuration's `keep`."""
    return run / KEPT / f"step-{step:08d}"


def _finished(run: RunDirectory) -> TrainingResult | None:
    """The result of a run that is done; None where there is work left."""
    if not run.begun:
        return None
    try:
        status = run.status
    except InputError as error:
        warn(f"warning: {error}; resuming from the last checkpoint")
        return None
    if status is None or status.state != "finished":
        return None
    records, problem = read_metrics(run.metrics.path), "its metrics.jsonl is gone"
    try:
        check_weights(run.path / MODEL)
    except InputError as error:
        records, problem = [], str(error)
    if not records:
        raise InputError(
            f"the run in {run.path} is marked as finished, but {problem}; delete its status.json "
            "to resume from the last checkpoint"
        )
    last = records[-1]
    known = {"step", "loss", "gradient_norm", "learning_rate", "tokens"}
    metrics = {name: value for name, value in last.items() if name not in known}
    return TrainingResult(run.path, last["step"], last["tokens"], last["loss"], metrics)
