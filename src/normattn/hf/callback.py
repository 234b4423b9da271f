"""A callback for transformers' Trainer that records attention statistics of every layer."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from normattn.errors import InputError
from normattn.hf.observe import collect_statistics
from normattn.kernels.stats import AttentionStatistics

FILE = "diagnostics.jsonl"
STATISTICS = ("entropy", "entropy_share", "largest", "first_mass", "sink_mass", "q_norm", "k_norm")
LARGEST = "attention_largest"


class AttentionCallback(TrainerCallback):
    """Every `every` steps, write statistics of each layer's attention: entropy, largest logit, …

        trainer = Trainer(...)
        trainer.add_callback(normattn.hf.AttentionCallback(every=100, trainer=trainer))

    It observes the training step itself: there is no second forward, and the step's results do not
    change. On observed steps attention is computed twice, the second time tile by tile.

    Each line of `diagnostics.jsonl` in the output directory is `{"step": …, "layers": {path: …}}`,
    the format of `normattn train` (read by `lab.diagnostics.lines`). The largest logit of each
    layer, which shows exploding attention, is logged as `attention_largest/PATH`.

    Args:
        every: the number of steps between two observations.
        trainer: its `log` passes the largest logits to Weights & Biases, TensorBoard and all other
            callbacks. transformers does not pass the trainer to callbacks. Without it
            (`Trainer(callbacks=[AttentionCallback()])`) they are only in `state.log_history`.

    Only the first process observes, its own share of the batch. Raises `InputError` for an `every`
    below 1, for a `trainer` that cannot log, and at the start of a training that reports to Weights
    & Biases, TensorBoard or others without a `trainer`.
    """

    def __init__(self, every: int = 100, trainer: Any = None) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise InputError(f"every must be a whole number of at least 1, but it is {every!r}")
        if trainer is not None and not callable(getattr(trainer, "log", None)):
            raise InputError(f"trainer must be a Trainer, but it is a {type(trainer).__name__}")
        self.every, self.trainer = every, trainer
        self._open = ExitStack()
        self._statistics: AttentionStatistics | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Raise `InputError` where the training's reports would lack the largest logits."""
        if self.trainer is None and args.report_to:
            raise InputError(
                f"the training reports to {', '.join(args.report_to)}, which would not get the "
                "largest logits: pass the trainer, as in "
                "trainer.add_callback(AttentionCallback(trainer=trainer))"
            )

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Start observing the first step, and each whose number is a multiple of `every`."""
        self.on_train_end(args, state, control)
        step = state.global_step + 1
        if state.is_world_process_zero and (step == 1 or step % self.every == 0):
            model = more["model"]
            self._statistics = self._open.enter_context(collect_statistics(model))
            # A training whose forward raises ends without another call.
            hook = model.register_forward_hook(
                lambda *call: self._open.close() if call[-1] is None else None, always_call=True
            )
            self._open.callback(hook.remove)

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Write the statistics, and log the largest logits."""
        statistics = self._statistics
        self.on_train_end(args, state, control)
        if statistics is None:
            return
        lines = {name: sums.means(STATISTICS) for name, sums in statistics.sums.items()}
        path = Path(args.output_dir) / FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": state.global_step, "layers": lines}) + "\n")
        logits = {
            f"{LARGEST}/{name}": [x for x in line.get("largest", ()) if x is not None]
            for name, line in lines.items()
        }
        largest = {name: max(values) for name, values in logits.items() if values}
        if self.trainer is not None:
            self.trainer.log(largest)
        else:
            state.log_history.append({**largest, "step": state.global_step})

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Stop observing."""
        self._statistics = None
        self._open.close()
