"""A probe that records every layer's attention while a model trains, and warns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from normattn.lab.diagnostics.collector import collecting
from normattn.lab.diagnostics.lines import LayerLine
from normattn.terminal import warn

CONCENTRATED = 0.02
"""Below this mean H / ln n, nearly every query of a head attends to a single key."""


class DiagnosticsProbe:
    """Writes statistics of every layer to RUN/diagnostics.jsonl at the steps that are `due`.

    They are recorded in the step's own forward passes. A line is `{"step": …, "layers": {name:
    LayerLine}}`, for this process's shard of the batch. Warns once on stderr if a head's mean
    H / ln n is below 0.02: its scores concentrate.
    """

    name = "diagnostics"

    def __init__(self, every: int, warn: Callable[[str], None] = lambda text: warn(text)) -> None:
        self.every = every
        self._warn = warn
        self._warned = False

    def due(self, step: int, steps: int) -> bool:
        """Return true for the first step, every `every` steps, and the last."""
        return step % self.every == 0 or step in (1, steps)

    @contextmanager
    def around(self, task: Any, step: int) -> Iterator[Callable[[], Mapping[str, Any]]]:
        """Record a step."""
        with collecting(task.model) as collector:

            def line() -> Mapping[str, Any]:
                layers = collector.lines()
                self._look_for_concentration(layers, step)
                return {"layers": {name: layer.model_dump() for name, layer in layers.items()}}

            yield line

    def _look_for_concentration(self, layers: Mapping[str, LayerLine], step: int) -> None:
        shares = [
            (share, f"head {head} of {name}")
            for name, layer in layers.items()
            for head, share in enumerate(layer.entropy_share)
            if share is not None
        ]
        share, head = min(shares, default=(1.0, ""))
        if share < CONCENTRATED and not self._warned:
            self._warned = True
            self._warn(
                f"warning: scores concentrate at step {step}: {head} has a mean entropy of "
                f"{share:.3f} ln n, so nearly every query attends to one key (said once; more in "
                f"{self.name}.jsonl)"
            )
