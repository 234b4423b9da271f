"""Training a causal language model from one configuration to one saved model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from normattn.data import TokenData, TrainingBatches, prepare_tokens
from normattn.errors import InputError
from normattn.models import CausalLM
from normattn.models.pretrained import save_model
from normattn.runs import RunDirectory, read_metrics
from normattn.training.config import TrainingConfig
from normattn.training.continuation import new_model
from normattn.training.distribution import World, world
from normattn.training.loop import OnStep, train
from normattn.training.loop_config import CHANGEABLE
from normattn.training.reports import Callback, TrainingResult
from normattn.training.seeds import derive_seed
from normattn.training.task import Task

KIND = "causal-lm"
KEPT = "kept"
# The weights decide where a continued run starts; their folder may move.
_CHANGEABLE = CHANGEABLE | {"continued.start"}


class CausalTask:
    """Next-token prediction on random windows of a corpus."""

    def __init__(
        self, config: TrainingConfig, batches: TrainingBatches, device: torch.device
    ) -> None:
        self.config = config
        self.model = new_model(config).to(device)
        self._batches = batches

    @property
    def tokens_per_step(self) -> int:
        """Targets in the global batch."""
        return self.config.batch_size * self.config.sequence_length

    def batch(self, step: int, share: int, shares: int) -> Tensor:
        """Part `share` of `shares` of the sequences of `step`, (rows, length + 1) int64."""
        return torch.from_numpy(self._batches.batch(step, share, shares))

    def loss(self, batch: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Mean cross-entropy in nats, and the share of tokens predicted right."""
        result = self.model.loss(batch)
        targets = batch.shape[0] * (batch.shape[1] - 1)
        return result.loss, {"accuracy": result.correct / targets}


def train_causal(
    config: TrainingConfig,
    out: Path | str,
    on_step: OnStep | None = None,
    should_stop: Callable[[], bool] | None = None,
    show_progress: bool = True,
    callbacks: Sequence[Callback] = (),
) -> TrainingResult:
    """Train what `config` says in the run directory `out`, or go on where it was stopped.

    At the end `out/model/` holds the trained model (config.json, model.safetensors) and
    `out/tokeniser.json` the tokeniser, if there is one; `out/kept/step-N/` the models of
    `config.keep`. A finished run is returned as it is.
    Raises as `train` does, and `InputError` for unusable data or a directory of another run.
    """
    out = Path(out)
    with world(config.device) as place:
        done = place.on_main(lambda: _finished(config, out))
        if done is not None:
            return done
        data = prepare_tokens(config.data)
        batches = _batches(config, data, place)
        place.on_main(lambda: _create(config, out))
        run = RunDirectory.existing(out, KIND)

        def make_task(place: World) -> CausalTask:
            return CausalTask(config, batches, place.device)

        def export(task: Task) -> None:
            assert isinstance(task.model, CausalLM)
            if data.tokeniser is not None:
                data.tokeniser.save(out / "tokeniser.json")
            save_model(task.model, out / "model")

        def export_kept(task: Task, step: int) -> None:
            assert isinstance(task.model, CausalLM)
            save_model(task.model, kept_model(out, step))

        return train(
            make_task,
            config,
            run,
            on_step=on_step,
            should_stop=should_stop,
            callbacks=callbacks,
            show_progress=show_progress,
            export=export,
            export_kept=export_kept,
        )


def kept_model(run: Path, step: int) -> Path:
    """Where the run in `run` keeps its model of `step`, one of its configuration's `keep`."""
    return run / KEPT / f"step-{step:08d}"


def _open(config: TrainingConfig, out: Path) -> RunDirectory:
    return RunDirectory.open(out, config, KIND, changeable=_CHANGEABLE)


def _create(config: TrainingConfig, out: Path) -> None:
    _open(config, out)


def _finished(config: TrainingConfig, out: Path) -> TrainingResult | None:
    """The result of a run that is done; None where there is work left.

    A directory that cannot hold this run is refused here, before data is prepared for it.
    """
    if not (out / "config.json").exists():
        RunDirectory.check_place(out)
        return None
    run = _open(config, out)
    status = run.status
    if status is None or status.state != "finished":
        return None
    records = read_metrics(run.metrics.path)
    if not records or not (out / "model").is_dir():
        raise InputError(
            f"the run in {out} is marked as finished, but its metrics.jsonl or model is gone; "
            "delete its status.json to go on from the last checkpoint"
        )
    last = records[-1]
    known = {"step", "loss", "gradient_norm", "learning_rate", "tokens"}
    metrics = {name: value for name, value in last.items() if name not in known}
    return TrainingResult(out, last["step"], last["tokens"], last["loss"], metrics)


def _batches(config: TrainingConfig, data: TokenData, place: World) -> TrainingBatches:
    shares = place.size * config.accumulate
    if config.batch_size % shares:
        raise InputError(
            f"batch_size {config.batch_size} does not divide into {shares} micro-batches "
            f"({place.size} processes, accumulate {config.accumulate})"
        )
    return TrainingBatches(
        data.train,
        config.sequence_length,
        config.batch_size,
        derive_seed(config.seed, "batches"),
        config.data.tiling,
    )
