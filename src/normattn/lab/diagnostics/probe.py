"""A probe that looks at every layer's attention while a model trains, and warns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from normattn.errors import InputError
from normattn.lab.diagnostics.collector import collecting
from normattn.lab.diagnostics.lines import LayerLine
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
    {name: LayerLine}}`, of this process's share of the batch. Once a kind it warns on
    stderr: where a head's mean H / ln n is below 0.02 (scores concentrate), and, after a fifth of
    the steps, where one is above 0.99 (they spread). Raises
    `InputError` for an `every` below 1.
    """

    name = "diagnostics"

    def __init__(
        self,
        every: int,
        warn: Callable[[str], None] = lambda text: warn(text),
    ) -> None:
        if every < 1:
            raise InputError(f"diagnostics look every 1 or more steps, got {every}")
        self.every = every
        self._warn = warn
        self._warned: set[str] = set()
        self._steps = 0

    def due(self, step: int, steps: int) -> bool:
        """The first step, every so many, and the last."""
        self._steps = steps
        return step % self.every == 0 or step in (1, steps)

    @contextmanager
    def around(self, task: Any, step: int) -> Iterator[Callable[[], Mapping[str, Any]]]:
        """Look on during a step."""
        with collecting(task.model) as collector:

            def read() -> Mapping[str, Any]:
                layers = collector.lines()
                for kind, cause in self._causes(layers, step).items():
                    if kind not in self._warned:
                        self._warned.add(kind)
                        self._warn(
                            f"warning: scores {kind} at step {step}: {cause} "
                            f"(said once; more in {self.name}.jsonl)"
                        )
                return {"layers": {name: line.model_dump() for name, line in layers.items()}}

            yield read

    def _causes(self, layers: Mapping[str, LayerLine], step: int) -> dict[str, str]:
        """What a line gives cause to warn of, by its kind."""
        shares = [
            (share, f"head {head} of {name} has a mean entropy of {share:.3f} ln n, it looks at")
            for name, line in layers.items()
            for head, share in enumerate(line.entropy_share)
            if share is not None
        ]
        causes = {}
        if shares and (low := min(shares))[0] < CONCENTRATED:
            causes["concentrate"] = f"{low[1]} one key, whatever the text is"
        if shares and (high := max(shares))[0] > SPREAD and step >= SETTLED * self._steps:
            causes["spread"] = f"{high[1]} all keys alike"
        return causes
