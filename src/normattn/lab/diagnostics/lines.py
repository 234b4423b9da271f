"""What a probe leaves of a training: a line of every layer's attention, as JSON."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from normattn.errors import InputError
from normattn.io import json_lines, open_file, parse_json
from normattn.lab.runs import check_unchanged
from normattn.settings import Settings, explain

FILE = "diagnostics.jsonl"
Heads = tuple[float | None, ...]


class LayerLine(Settings):
    """One layer at one step, a number per query head (norms of keys: per key head).

    `entropy` is the mean over queries of H = lse − E[s], in nats, `entropy_share` that of H / ln n
    over the queries that choose among n ≥ 2 keys (a learned sink counted as one), `largest` the
    largest logit of any visible pair, `first_mass` the mean weight on the key at position 0,
    `sink_mass` that on the learned sink, `q_norm` and `k_norm` the mean norms as the projections
    give them, `q_normed` and `k_normed` after the score's own normalisation. None where there is
    no such thing.
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
    """A probed step: every layer by its name, bottom first."""

    step: int
    layers: dict[str, LayerLine]

    @property
    def largest(self) -> float | None:
        """The largest logit of all heads of all layers."""
        known = (value for layer in self.layers.values() for value in layer.largest)
        return max((value for value in known if value is not None), default=None)


def read_diagnostics(run: Path) -> list[DiagnosticsLine]:
    """The lines that a run's probe has left; [] where there was none.

    `run` is the directory of the run or the file itself. Raises `InputError` for a damaged file.
    """
    path = check_unchanged(run / FILE if run.is_dir() else run)
    if not path.exists():
        return []
    with open_file(path) as file:
        lines = [line for _, line in json_lines(file.readline, lambda n: f"{path}, line {n},")]
    # A line that is being written has no end yet.
    whole = [line for line in lines if line.endswith(b"\n")]
    try:
        return [DiagnosticsLine.model_validate(parse_json(line, str(path))) for line in whole]
    except ValidationError as error:
        wrong = explain(error)
        raise InputError(
            f"{path} holds a line that is not a line of diagnostics: {wrong}"
        ) from None
