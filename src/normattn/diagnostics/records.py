"""What diagnostics found in every layer's attention, as JSON: in a training, and of one model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from normattn.diagnostics.record_file import first_of, read_file, write_file
from normattn.errors import InputError
from normattn.files import open_file
from normattn.structured import json_lines, parse_json

FILE = "diagnostics.jsonl"
Heads = tuple[float | None, ...]
Grid = tuple[Heads, ...]


class LayerLine(BaseModel):
    """One layer at one step, a number per query head (norms of keys: per key head).

    `entropy` is the mean over queries of H = lse − E[s], in nats, `entropy_share` that of H / ln n
    over the queries that choose among n ≥ 2 keys (a learned sink counted as one), `largest` the
    largest logit of any visible pair, `first_mass` the mean weight on the key at position 0,
    `sink_mass` that on the learned sink, `q_norm` and `k_norm` the mean norms as the projections
    give them, `q_normed` and `k_normed` after the score's own normalisation. None where there is
    no such thing.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    entropy: Heads
    entropy_share: Heads
    largest: Heads
    first_mass: Heads
    sink_mass: Heads | None = None
    q_norm: Heads
    k_norm: Heads
    q_normed: Heads | None = None
    k_normed: Heads | None = None


class DiagnosticsLine(BaseModel):
    """A probed step: every layer by its name, bottom first."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    step: int
    layers: dict[str, LayerLine]

    def values(self, field: str) -> list[list[float]]:
        """What is known of a field, layer by layer, head by head."""
        found = [getattr(layer, field) or () for layer in self.layers.values()]
        return [[value for value in heads if value is not None] for heads in found]

    def by_layer(self, field: str) -> list[float | None]:
        """The mean over the heads of each layer."""
        return [sum(heads) / len(heads) if heads else None for heads in self.values(field)]

    def mean(self, field: str) -> float | None:
        """The mean over all heads of all layers."""
        every = [value for heads in self.values(field) for value in heads]
        return sum(every) / len(every) if every else None

    def most(self, field: str) -> float | None:
        """The largest over all heads of all layers."""
        return max((value for heads in self.values(field) for value in heads), default=None)


def read_diagnostics(run: Path) -> list[DiagnosticsLine]:
    """The lines that a run's probe has left; [] where there was none.

    `run` is the directory of the run or the file itself. Raises `InputError` for a damaged file.
    """
    path = run / FILE if run.is_dir() else run
    if not path.exists():
        return []
    # A line that is being written has no end yet.
    with open_file(path) as file:
        lines = [line for _, line in json_lines(file, lambda n: f"{path}, line {n},")]
    whole = [line for line in lines if line.endswith(b"\n")]
    try:
        return [DiagnosticsLine.model_validate(parse_json(line, str(path))) for line in whole]
    except ValidationError as error:
        raise InputError(
            f"{path} holds a line that is none of the diagnostics: {first_of(error)}"
        ) from None


class LayerRecord(BaseModel):
    """One layer's attention to a text: a number per query head and bin of the query's position.

    Beside the fields of `LayerLine`, here by bin (norms: per head): `lse` is the mean
    log-sum-exp, `beyond_mass` the mean attention to keys at i − j ≥ L, L being the training length,
    and `beyond_share` the share of visible keys there; `angle_mass` and `angle_share` likewise
    the share of rotary feature pairs whose angle did not occur in training. `cosines` are, per
    head, the least, the 5th, 50th and 95th percentile and the largest of cos(q, k), where asked,
    and `cosines_at` the same by head and bin. `norms` holds the norms by head and bin of the
    query's or key's own position, under the names of the fields.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str
    heads: int = Field(ge=1)
    entropy: Grid
    entropy_share: Grid
    lse: Grid
    largest: Grid
    first_mass: Grid
    sink_mass: Grid | None = None
    beyond_mass: Grid | None = None
    beyond_share: Grid | None = None
    angle_mass: Grid | None = None
    angle_share: Grid | None = None
    q_norm: Heads
    k_norm: Heads
    q_normed: Heads | None = None
    k_normed: Heads | None = None
    cosines: Grid | None = None
    cosines_at: tuple[Grid, ...] | None = None
    norms: Mapping[str, Grid] = Field(default_factory=dict)
    rows: tuple[tuple[int, ...], ...]

    def by_head(self, field: str) -> Heads:
        """A field over all positions: means weighted by their queries, the largest of `largest`."""
        grid: Grid | None = getattr(self, field)
        if grid is None:
            return (None,) * self.heads
        return tuple(
            _over(values, counts, field == "largest")
            for values, counts in zip(grid, self.rows, strict=True)
        )


def _over(values: Heads, counts: tuple[int, ...], most: bool) -> float | None:
    known = [(v, n) for v, n in zip(values, counts, strict=True) if v is not None and n]
    if not known:
        return None
    if most:
        return max(v for v, _ in known)
    return sum(v * n for v, n in known) / sum(n for _, n in known)


class InspectionRecord(BaseModel):
    """A model's attention to texts: `edges` of the position bins, and every layer, bottom first.

    Bin b holds the queries at positions edges[b] … edges[b + 1] − 1.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    format: Literal[1] = 1
    edges: tuple[int, ...] = Field(min_length=2)
    layers: tuple[LayerRecord, ...] = Field(min_length=1)
    facts: Mapping[str, Any] = Field(default_factory=dict)

    def layer(self, name: str) -> LayerRecord:
        """A layer by its name; `InputError` for an unknown one."""
        for layer in self.layers:
            if layer.name == name:
                return layer
        known = ", ".join(layer.name for layer in self.layers)
        raise InputError(f"no layer is called {name!r}; there are {known}")


def write_inspection(path: Path, record: InspectionRecord) -> None:
    """Write one record, whole or not at all."""
    write_file(path, record)


def read_inspection(path: Path) -> InspectionRecord:
    """Read one record; `InputError` names the file when it cannot be used."""
    return read_file(path, InspectionRecord, "of an inspection")
