"""A probe that records every layer's attention while a model trains, and warns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from normattn.errors import InputError
from normattn.lab.diagnostics.collector import collecting
from normattn.lab.diagnostics.lines import LayerLine
from normattn.terminal import warn

CONCENTRATED = 0.02
"""A head with a lower mean H / ln n attends to one key, whatever the text."""
SPREAD = 0.99
"""A head with a higher mean H / ln n attends to all keys equally."""
MIN_SHARE_OF_STEPS = 0.2
"""No warning of spread heads before this share of the steps: initial scores are small."""


class DiagnosticsProbe:
    """Writes statistics of every layer to RUN/diagnostics.jsonl every `every` steps.

    They are recorded in the step's own forward passes. A line is `{"step": …, "layers": {name:
    LayerLine}}`, for this process's shard of the batch. Warns once on stderr if a head's mean
    H / ln n is below 0.02 (scores concentrate), and once if, after a fifth of the steps, one is
    above 0.99 (they spread). Raises `InputError` for an `every` below 1.
    """

    name = "diagnostics"

    def __init__(self, every: int, warn: Callable[[str], None] = lambda text: warn(text)) -> None:
        if every < 1:
            raise InputError(f"diagnostics look every 1 or more steps, got {every}")
        self.every = every
        self._warn = warn
        self._warned: set[str] = set()
        self._steps = 0

    def due(self, step: int, steps: int) -> bool:
        """Return true for the first step, every `every` steps, and the last."""
        self._steps = steps
        return step % self.every == 0 or step in (1, steps)

    @contextmanager
    def around(self, task: Any, step: int) -> Iterator[Callable[[], Mapping[str, Any]]]:
        """Record a step."""
        with collecting(task.model) as collector:

            def line() -> Mapping[str, Any]:
                layers = collector.lines()
                for kind, cause in self._warnings(layers, step).items():
                    if kind not in self._warned:
                        self._warned.add(kind)
                        self._warn(
                            f"warning: scores {kind} at step {step}: {cause} "
                            f"(said once; more in {self.name}.jsonl)"
                        )
                return {"layers": {name: layer.model_dump() for name, layer in layers.items()}}

            yield line

    def _warnings(self, layers: Mapping[str, LayerLine], step: int) -> dict[str, str]:
        shares = [
            (share, f"head {head} of {name} has a mean entropy of {share:.3f} ln n, it looks at")
            for name, layer in layers.items()
            for head, share in enumerate(layer.entropy_share)
            if share is not None
        ]
        warnings = {}
        if shares and (low := min(shares))[0] < CONCENTRATED:
            warnings["concentrate"] = f"{low[1]} one key, whatever the text is"
        if (
            shares
            and (high := max(shares))[0] > SPREAD
            and step >= MIN_SHARE_OF_STEPS * self._steps
        ):
            warnings["spread"] = f"{high[1]} all keys alike"
        return warnings
