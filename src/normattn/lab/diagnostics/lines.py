"""Attention statistics of a training, as JSON lines."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from normattn.errors import InputError
from normattn.lab.runs import read_metrics
from normattn.settings import Settings, explain

FILE = "diagnostics.jsonl"
Heads = tuple[float | None, ...]


class LayerLine(Settings):
    """One layer at one step: a number per query head (norms of keys: per key head), or None.

    - `entropy`: mean over queries of H = lse − E[s], in nats.
    - `entropy_share`: mean of H / ln n over queries with n ≥ 2 visible keys (or a learned sink).
    - `largest`: largest logit of any visible pair.
    - `first_mass`, `sink_mass`: mean weight on the key at position 0 and on the learned sink.
    - `q_norm`, `k_norm`: mean norms of the projections; `q_normed`, `k_normed` when normalised.
    """

    entropy: Heads
    entropy_share: Heads
    largest: Heads
    first_mass: Heads
    sink_mass: Heads | None = None
    q_norm: Heads
    k_norm: Heads
    q_normed: Heads | None = None
    k_normed: Heads | None = None


class DiagnosticsLine(Settings):
    """A measured step: every layer by its name, bottom first."""

    step: int
    layers: dict[str, LayerLine]

    @property
    def largest(self) -> float | None:
        """The largest logit of all heads of all layers."""
        values = (value for layer in self.layers.values() for value in layer.largest)
        return max((value for value in values if value is not None), default=None)


def read_diagnostics(run: Path) -> list[DiagnosticsLine]:
    """Return the diagnostics of a run's folder or a file, [] if none; `InputError` if damaged."""
    path = run / FILE if run.is_dir() else run
    try:
        return [DiagnosticsLine.model_validate(line) for line in read_metrics(path)]
    except ValidationError as error:
        problem = f"holds a line that is not a line of diagnostics: {explain(error)}"
        raise InputError(f"{path} {problem}") from None
