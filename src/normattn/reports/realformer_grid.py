"""The robustness grid: which learning rates and dropouts a placement survives, and which not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from normattn.reports.bootstrap import Bootstrap
from normattn.reports.metrics import Estimate
from normattn.reports.realformer_records import EncoderRecord, Failure, Setting
from normattn.reports.realformer_rows import EncoderRow, estimated
from normattn.reports.unigram import learnt_nothing

State = Literal["learned", "stuck", "diverged"]


@dataclass(frozen=True)
class GridCell:
    """One setting: the held-out loss over its seeds (None where every seed diverged).

    "diverged": the loss of some seed stopped being finite; "stuck": it ends above that of the
    words' frequencies alone, so that nothing of the context was learned.
    """

    row: str
    learning_rate: float
    dropout: float
    warmup: int
    loss: Estimate | None
    state: State


@dataclass(frozen=True)
class Panel:
    """The cells of one row with or without warm-up."""

    row: str
    warmup: int
    cells: dict[tuple[float, float], GridCell]

    @property
    def failed(self) -> int:
        """Settings that diverged or learned nothing."""
        return sum(cell.state != "learned" for cell in self.cells.values())

    @property
    def best(self) -> GridCell | None:
        """The cell with the lowest loss."""
        known = [cell for cell in self.cells.values() if cell.loss and cell.state == "learned"]
        return min(known, key=lambda cell: cell.loss.value if cell.loss else 0.0, default=None)


def grid_panels(
    records: Sequence[EncoderRecord], failures: Sequence[Failure], bootstrap: Bootstrap
) -> list[Panel]:
    """Panels in the order of the records: each row with warm-up, then without."""
    trained: dict[tuple[str, int, float, float], list[EncoderRecord]] = defaultdict(list)
    for record in records:
        trained[_place(record.setting)].append(record)
    diverged = {_place(failure.setting) for failure in failures}
    panels: dict[tuple[str, int], dict[tuple[float, float], GridCell]] = defaultdict(dict)
    for place in [*trained, *(place for place in diverged if place not in trained)]:
        row, warmup, rate, dropout = place
        cell = _cell(place, trained.get(place, []), place in diverged, bootstrap)
        panels[row, warmup][rate, dropout] = cell
    names = list(dict.fromkeys(s.row for s in _settings(records, failures)))
    ordered = sorted(panels, key=lambda key: (names.index(key[0]), -key[1]))
    return [Panel(row, warmup, panels[row, warmup]) for row, warmup in ordered]


def _cell(
    place: tuple[str, int, float, float],
    records: Sequence[EncoderRecord],
    diverged: bool,
    bootstrap: Bootstrap,
) -> GridCell:
    row, warmup, rate, dropout = place
    if not records:
        return GridCell(row, rate, dropout, warmup, None, "diverged")
    ordered = sorted(records, key=lambda record: record.setting.seed)
    whole = EncoderRow(ordered[0].setting, tuple(ordered))
    loss = estimated([(1.0, whole.loss())], whole.counts, bootstrap)
    stuck = learnt_nothing(loss.value, float(whole.unigram().value()[0]))
    state: State = "diverged" if diverged else "stuck" if stuck else "learned"
    return GridCell(row, rate, dropout, warmup, loss, state)


def _settings(records: Sequence[EncoderRecord], failures: Sequence[Failure]) -> list[Setting]:
    return [*(each.setting for each in records), *(each.setting for each in failures)]


def _place(setting: Setting) -> tuple[str, int, float, float]:
    return setting.row, setting.warmup, setting.learning_rate, setting.dropout
