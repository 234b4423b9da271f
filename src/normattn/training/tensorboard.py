"""TensorBoard as a callback; needs the extra `track`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from normattn.errors import InputError
from normattn.training.reports import StepReport


class TensorBoard:
    """Writes loss, metrics, gradient norm and learning rate as scalars into `folder`.

    Raises `InputError` when TensorBoard is not installed.
    """

    def __init__(self, folder: Path, every: int = 1) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            raise InputError(
                "TensorBoard is not installed; `pip install 'normattn[track]'` brings it, or set "
                "tensorboard to false"
            ) from error
        self._make: Any = SummaryWriter
        self._writer: Any = None
        self._folder = folder
        self._every = every

    def start(self, done: int, steps: int) -> None:
        """Open the event file; what an interrupted run wrote past `done` is hidden."""
        self._writer = self._make(str(self._folder), purge_step=done + 1)

    def step(self, report: StepReport) -> None:
        """Add this step's scalars."""
        if report.step % self._every and report.step != report.steps:
            return
        scalars = {
            "loss": report.loss,
            "gradient_norm": report.gradient_norm,
            "learning_rate": report.learning_rate,
            "tokens_per_second": report.tokens_per_second,
            **report.metrics,
        }
        for name, value in scalars.items():
            self._writer.add_scalar(f"train/{name}", value, report.step)

    def stop(self) -> None:
        """Write everything out."""
        if self._writer is not None:
            self._writer.close()
