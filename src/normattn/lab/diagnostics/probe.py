"""A probe that looks at every layer's attention while a model trains, and warns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from normattn.errors import InputError
from normattn.lab.diagnostics.collecting import collecting
from normattn.lab.diagnostics.lines import LayerLine, read_diagnostics
from normattn.terminal import warn

CONCENTRATED = 0.02
"""A head whose mean H / ln n is below looks at one key, whatever the text is."""
SPREAD = 0.99
"""A head whose mean H / ln n is above looks at all keys alike."""
SETTLED = 0.2
"""Scores begin small, so that every head spreads: it is no news before this share of the steps."""


class DiagnosticsProbe:
    """Every `every` steps a line of every layer's attention, in RUN/diagnostics.jsonl.

    It looks on while the step runs; there is no second forward. A line is `{"step": …, "layers":
    {name: LayerLine}}`, of this process's share of the batch. Once a run and kind it warns on
    stderr: where a head's mean H / ln n is below 0.02 (scores concentrate), and, after a fifth of
    the steps, where one is above 0.99 (they spread). Works for any task whose model holds scores.
    `run` is the run's directory: what its earlier lines gave cause to say is not said again when
    the run resumes. Raises `InputError` for an `every` below 1.
    """

    name = "diagnostics"

    def __init__(
        self,
        every: int,
        warn: Callable[[str], None] = lambda text: warn(text),
        run: Path | None = None,
    ) -> None:
        if every < 1:
            raise InputError(f"diagnostics look every 1 or more steps, got {every}")
        self.every = every
        self._warn = warn
        self._warned: set[str] = set()
        self._steps = 0
        self._run = run

    def due(self, step: int, steps: int) -> bool:
        """The first step, every so many, and the last."""
        self._steps = steps
        return step % self.every == 0 or step in (1, steps)

    @contextmanager
    def around(self, task: Any, step: int) -> Iterator[Callable[[], Mapping[str, Any]]]:
        """Look on during a step."""
        model: nn.Module = task.model
        with collecting(model) as collector:

            def read() -> Mapping[str, Any]:
                lines = collector.lines()
                self._recall(step)
                self._consider(lines, step)
                return {"layers": {name: line.model_dump() for name, line in lines.items()}}

            yield read

    def _recall(self, step: int) -> None:
        """Take as said what lines before this step, left by an earlier process, gave cause for."""
        run, self._run = self._run, None
        warn, self._warn = self._warn, lambda text: None
        try:
            for line in [] if run is None else read_diagnostics(run):
                if line.step < step:
                    self._consider(line.layers, line.step)
        finally:
            self._warn = warn

    def _consider(self, lines: Mapping[str, LayerLine], step: int) -> None:
        shares = [
            (share, f"head {head} of {name}")
            for name, line in lines.items()
            for head, share in enumerate(line.entropy_share)
            if share is not None
        ]
        if not shares:
            return
        low, high = min(shares), max(shares)
        if low[0] < CONCENTRATED:
            self._say("concentrate", step, *low, "one key, whatever the text is")
        if high[0] > SPREAD and step >= SETTLED * self._steps:
            self._say("spread", step, *high, "all keys alike")

    def _say(self, kind: str, step: int, share: float, where: str, target: str) -> None:
        if kind in self._warned:
            return
        self._warned.add(kind)
        self._warn(
            f"warning: scores {kind} at step {step}: {where} has a mean entropy of "
            f"{share:.3f} ln n, it looks at {target} (said once; more in {self.name}.jsonl)"
        )
