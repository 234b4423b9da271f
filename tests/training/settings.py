"""Tiny trainings on generated tokens: no text, no tokeniser, no download.

`python -m training.settings OUT JSON` trains with these changes, and prints a line per step.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from normattn.errors import Interrupted, NormattnError
from normattn.lab.runs import read_metrics, read_status
from normattn.lab.training import StepReport, TrainingConfig, TrainingResult, train_model

SMALL: dict[str, Any] = {
    "steps": 12,
    "batch_size": 8,
    "device": "cpu",
    "model": {"dim": 16, "layers": 2, "heads": 2, "train_length": 16, "score": "KNA-logn"},
    "data": {"corpus": "synthetic:copy?low=3&high=6", "vocab_size": 32},
    "optimiser": {"lr": 3e-3},
    "schedule": {"warmup_steps": 4},
}
NGPT: dict[str, Any] = {"score": "NGPT-RotateFirst", "placement": "nGPT"}


def changed(**changes: Any) -> dict[str, Any]:
    """SMALL with other settings, and in its groups."""
    groups = {name: value for name, value in changes.items() if isinstance(value, dict)}
    merged = {name: {**SMALL.get(name, {}), **group} for name, group in groups.items()}
    return {**SMALL, **changes, **merged}


def small(**changes: Any) -> TrainingConfig:
    return TrainingConfig.parse(changed(**changes))


def run(config: Any, out: Path, stop: int | None = None, **options: Any) -> TrainingResult:
    """Train; asked to stop after `stop` steps, it says `Interrupted`."""
    asked = itertools.count(1)
    options = {"should_stop": lambda: next(asked) == stop, **options}
    return train_model(config, out, show_progress=False, **options)


def stop(config: Any, out: Path, after: int) -> None:
    with pytest.raises(Interrupted):
        run(config, out, after)


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(out / "metrics.jsonl")]


def state_of(out: Path) -> tuple[str, int]:
    status = read_status(out)
    assert status is not None
    return status.state, status.step


BAD_STEP = 5


class Faulty(TrainingConfig):
    """Goes wrong at `BAD_STEP`, in the way that `fault` says."""

    fault: str

    def make_model(self) -> Any:
        model = super().make_model()
        # What a forward pass changes, as batch norm's running statistics are.
        model.register_buffer("passes", torch.zeros(()))
        return model

    def loss(self, model: Any, batch: Tensor, shards: int) -> Any:
        model.passes.add_(1)
        if model.passes != BAD_STEP:
            return super().loss(model, batch, shards)
        layer = model.blocks[1].feed_forward.sublayer.up
        if self.fault == "parameter":
            with torch.no_grad():
                layer.weight[3] = float("inf")
        nan = layer.register_forward_hook(lambda m, i, out: out * float("nan"), prepend=True)
        if self.fault != "module":
            nan.remove()
        loss, metrics = super().loss(model, batch, shards)
        nan.remove()
        if self.fault == "loss":
            loss = loss * float("nan")
        if self.fault == "gradient":
            # √x at 0: a finite value whose derivative is not.
            loss = loss + (layer.weight * 0).sum().sqrt()
        return loss, metrics


def faulty(fault: str, **changes: Any) -> Faulty:
    return Faulty.parse(changed(fault=fault, **changes))


def main() -> int:
    changes = json.loads(sys.argv[2])
    pause = changes.pop("pause")

    def on_step(report: StepReport) -> None:
        print(report.step, flush=True)
        time.sleep(pause)

    try:
        run(small(**changes), Path(sys.argv[1]), on_step=on_step)
    except NormattnError as error:
        print(error, file=sys.stderr)
        return 130 if isinstance(error, Interrupted) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
