"""A callback for transformers' Trainer: what every layer's attention does while a model trains."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from normattn.errors import InputError
from normattn.hf.looking import looking
from normattn.lab.diagnostics.collecting import Collector
from normattn.lab.diagnostics.lines import FILE, LayerLine

LARGEST = "attention_largest"


class AttentionCallback(TrainerCallback):
    """Every `every` steps a line of every layer's attention: entropy, largest logit, sinks, norms.

        Trainer(..., callbacks=[normattn.hf.AttentionCallback(every=100)])

    It looks on while the step runs: there is no second forward, and the step's own numbers are what
    they are without it; attention is computed once more, tile by tile, on the steps that are looked
    at. A line is `{"step": …, "layers": {path: LayerLine}}` in `diagnostics.jsonl` of the
    output directory, as `normattn train` leaves them (`lab.diagnostics.lines` reads them). The
    largest logit of every layer, what one watches for exploding attention, is in the Trainer's
    `state.log_history` too, as `attention_largest/PATH`. Only the first process looks, at its own
    share of the batch. Raises `InputError` for an `every` below 1.
    """

    def __init__(self, every: int = 100) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise InputError(f"diagnostics look every 1 or more steps, got {every!r}")
        self.every = every
        self._open: ExitStack | None = None
        self._collector: Collector | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Begin to look, where the step is due: the first, and every so many."""
        self._close()
        step = state.global_step + 1
        if state.is_world_process_zero and (step == 1 or step % self.every == 0):
            self._open = ExitStack()
            self._collector = self._open.enter_context(looking(more["model"]))

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Write what was seen."""
        collector = self._collector
        self._close()
        if collector is None:
            return
        lines = collector.lines()
        _write(Path(args.output_dir) / FILE, state.global_step, lines)
        largest = {
            f"{LARGEST}/{name}": max(logit for logit in line.largest if logit is not None)
            for name, line in lines.items()
            if any(logit is not None for logit in line.largest)
        }
        state.log_history.append({**largest, "step": state.global_step})

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Nothing stays behind."""
        self._close()

    def _close(self) -> None:
        stack, self._open, self._collector = self._open, None, None
        if stack is not None:
            stack.close()


def _write(path: Path, step: int, lines: dict[str, LayerLine]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"step": step, "layers": {name: line.model_dump() for name, line in lines.items()}}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
