"""Train any kind of model, from a configuration to a saved model."""

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
from normattn.lab.training.distributed import process_group
from normattn.lab.training.init_from import KEPT_MODELS, TOKENISER_FILE, record_corpus
from normattn.lab.training.loop import train
from normattn.lab.training.planning import Cost, check_memory
from normattn.lab.training.task import TrainingResult, derive_seed
from normattn.models.config import StackConfig
from normattn.models.flops import planned_parameters
from normattn.models.pretrained import check_weights, save_model
from normattn.score import ScoreSpec
from normattn.settings import explain

MODEL = "model"
Loss = tuple[Tensor, Mapping[str, Tensor]]


class ModelTrainingConfig(LoopConfig, ABC):
    """A model, its data, and how it is trained.

    Settings of `model` that follow from the data, or have a default that does, may be left out
    (`from_data`). A subclass defines `kind` (of its run directories), `model_class`,
    `prepare_data`, the file of the tokeniser, the settings that may differ when a run resumes
    (`changeable`), and the methods `batches`, `loss` and `step_cost`.
    """

    kind: ClassVar[str]
    model_class: ClassVar[Any]
    prepare_data: ClassVar[Any]
    tokeniser_file: ClassVar[str] = TOKENISER_FILE
    changeable: ClassVar[frozenset[str]] = CHANGEABLE

    model: StackConfig
    data: SplitSettings

    @classmethod
    def from_data(cls, data: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the model's settings that follow from the data, and defaults that depend on it."""
        return {}, {}

    @property
    def scores(self) -> tuple[ScoreSpec, ...]:
        """The model's attention scores."""
        return (self.model.score,)

    @model_validator(mode="before")
    @classmethod
    def _fill_model(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or not isinstance(values.get("model"), Mapping):
            return values
        kind: Any = cls.model_fields["data"].annotation
        data, model = values.get("data", {}), values["model"]
        try:
            data = kind.model_validate(data) if isinstance(data, Mapping) else data
        except ValidationError as error:
            raise ValueError(f"data.{explain(error)}") from error
        required, defaults = cls.from_data(data)
        return {**values, "model": {**defaults, **required, **model}}

    @model_validator(mode="after")
    def _check_model(self) -> ModelTrainingConfig:
        for name, expected in self.from_data(self.data)[0].items():
            value = getattr(self.model, name)
            if value != expected:
                raise ValueError(
                    f"model.{name} is {value} but the data makes it {expected}; leave it out"
                )
        if self.unit_weights and self.model.placement != "nGPT":
            raise ValueError("unit_weights fixes weight norms: that needs model.placement nGPT")
        return self

    @abstractmethod
    def batches(self, data: Any, seed: int) -> Any:
        """Return an object whose pure function `batch(step, shard, shards)` returns arrays.

        Raises `InputError` if the data has no batch.
        """

    @abstractmethod
    def loss(self, model: Any, batch: Any, shards: int) -> Loss:
        """Return the mean loss () in nats of a batch, one of `shards`, and other means to log."""

    @abstractmethod
    def step_cost(self) -> tuple[int, float]:
        """Return the tokens and the FLOPs of a step; needs no prepared data."""

    def tokens_per_step(self, batches: Any) -> int:
        """Return the mean number of targets in the global batch."""
        return self.step_cost()[0]

    def save_extras(self, data: Any, out: Path) -> None:
        """Write files that the model needs, such as a tokeniser, into the run's directory."""
        if (tokeniser := getattr(data, "tokeniser", None)) is not None:
            tokeniser.save(out / self.tokeniser_file)

    def make_model(self) -> nn.Module:
        """Return the model that training starts with."""
        model: nn.Module = self.model_class(self.model)
        return model

    def prepare(self) -> Any:
        """Return the prepared data; `InputError` if it cannot be read."""
        return self.prepare_data(self.data)

    def cost(self) -> Cost:
        """Return the cost of the whole training."""
        tokens, flops = self.step_cost()
        return Cost(
            trained=self.steps * tokens,
            flops=self.steps * flops,
            parameters=planned_parameters(self.model_class, self.model),
            activations=self.model.dim * self.model.layers,
        )

    def check(self, data: Any, shards: int) -> None:
        """Raise `InputError` if there is no batch, or it does not divide into `shards`."""
        self.batches(data, derive_seed(self.seed, "batches")).batch(1, 0, shards)

    def task(self, data: Any, device: torch.device, shards: int) -> ModelTask:
        """Return the task on `device`, with `shards` shards a step."""
        return ModelTask(self, data, device, shards)


class BatchTrainingConfig(ModelTrainingConfig):
    """A training with a fixed number of rows per batch.

    batch_size: rows per optimiser step, over all processes and micro-batches. Their number must
    divide it.
    """

    batch_size: int = Field(default=32, ge=1, le=10**7)


class ModelTask:
    """A model with its batches and loss: the `task.Task` of the loop."""

    def __init__(
        self, config: ModelTrainingConfig, data: Any, device: torch.device, shards: int
    ) -> None:
        self.config, self.model = config, config.make_model().to(device)
        self._batches = config.batches(data, derive_seed(config.seed, "batches"))
        self.tokens_per_step = config.tokens_per_step(self._batches)
        self.loss = partial(config.loss, self.model, shards=shards)

    def batch(self, step: int, shard: int, shards: int) -> Any:
        """Return shard `shard` of `shards` of the batch of `step`, as tensors on the CPU."""
        return tree_map(torch.as_tensor, self._batches.batch(step, shard, shards))


def train_model(config: ModelTrainingConfig, out: Path | str, **options: Any) -> TrainingResult:
    """Train or resume the run of `config` in the directory `out`.

    `options` are passed to `train`: `on_step`, `should_stop`, `show_progress`, `probes`. Writes the
    trained model to `out/model/`, extras such as the tokeniser to `out`, and the models of
    `config.keep` to `out/kept/step-N/`. A finished run returns at once. Raises like `train`, and
    `InputError` for unusable data, the directory of another run, too little memory, or
    `config.inspect_every` without a probe.
    """
    out = Path(out)
    if config.inspect_every and not options.get("probes"):
        every = config.inspect_every
        raise InputError(
            f"inspect_every={every} needs a probe: pass probes=(DiagnosticsProbe({every}),)"
        )

    open_run = partial(RunDirectory.open, out, config, config.kind, changeable=config.changeable)
    with process_group(config.device) as world:
        # Check the directory before preparing data.
        result = world.on_main(lambda: _finished_result(open_run()))
        if result is not None:
            return result
        shards = world.size * config.accumulate

        def prepare() -> Any:
            check_memory(config.cost(), config, world)
            data = config.prepare()
            config.check(data, shards)
            return data

        data = world.on_all(prepare)

        def export(task: Any) -> None:
            config.save_extras(data, out)
            save_model(task.model, out / MODEL)

        return train(
            lambda world: config.task(data, world.device, shards),
            config,
            open_run(),
            on_start=lambda: record_corpus(data, out),
            export=export,
            export_kept=lambda task, step: save_model(task.model, kept_model(out, step)),
            **options,
        )


def kept_model(run: Path, step: int) -> Path:
    """Return the folder of the model of `step`, one of the run's `keep`."""
    return run / KEPT_MODELS / f"step-{step:08d}"


def _finished_result(run: RunDirectory) -> TrainingResult | None:
    status = run.status if run.exists else None
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
