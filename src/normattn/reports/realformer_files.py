"""The RealFormer study's numbers as files: table.csv, table.json, layers.csv, grid.csv."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from typing import Any

from normattn.reports.bootstrap import Bootstrap
from normattn.reports.metrics import Estimate
from normattn.reports.realformer_claims import Finding
from normattn.reports.realformer_grid import Panel
from normattn.reports.realformer_records import Failure
from normattn.reports.realformer_rows import EncoderRow, Ratio, by_layer, estimated

_LAYERS = ("correct", "variance", "entropy", "agreement", "agreement_mean")
_FIRST = {"variance": 0, "agreement": 2, "agreement_mean": 2}
STATISTICS = {
    "correct": "accuracy after it, %",
    "variance": "variance of the stream",
    "entropy": "entropy, nats",
    "agreement": "agreement with the layer below",
    "agreement_mean": "the same, mean heads",
    "gradients_start": "gradient norm before training",
    "gradients": "gradient norm after it",
}
"""What is measured in every layer, and what a column of it is called."""


def table_json(
    rows: Sequence[EncoderRow],
    lost: Sequence[Failure],
    found: Sequence[Finding],
    bootstrap: Bootstrap,
) -> str:
    """table.json: rows, diverged runs and claims."""
    facts = {
        "rows": [
            {
                **row.setting.model_dump(exclude={"seed", "part"}),
                "seeds": list(row.seeds),
                "accuracy": estimated([(1.0, row.accuracy())], row.counts, bootstrap).as_json(),
                "loss": estimated([(1.0, row.loss())], row.counts, bootstrap).as_json(),
            }
            for row in rows
        ],
        "diverged": [
            {"row": each.setting.row, "size": each.setting.size, "seed": each.setting.seed}
            | {"step": each.step, "where": each.where}
            for each in lost
        ],
        "claims": [
            {"claim": each.claim, "source": each.source, "size": each.size, "measured": each.what}
            | {"difference": each.difference.as_json(), "verdict": each.verdict}
            for each in found
        ],
    }
    return json.dumps(facts, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def table_csv(rows: Sequence[EncoderRow], bootstrap: Bootstrap) -> str:
    """Rows with the ends of their intervals."""
    names = ("size", "row", "placement", "score", "shared", "layers", "dim", "parameters", "steps")
    head = [*names, "seeds", *(n + e for n in ("accuracy", "loss") for e in ("", "_low", "_high"))]
    lines = []
    for row in rows:
        numbers = [
            number
            for each in (row.accuracy(), row.loss())
            for value in [estimated([(1.0, each)], row.counts, bootstrap)]
            for number in (value.value, value.low, value.high)
        ]
        lines.append([*(getattr(row.setting, n) for n in names), len(row.seeds), *numbers])
    return _csv(head, lines)


def layers_csv(rows: Sequence[EncoderRow], bootstrap: Bootstrap) -> str:
    """Every statistic of every layer: the numbers behind the figures."""
    lines = [
        [row.setting.size, row.setting.row, name, layer, value.value, value.low, value.high]
        for row in rows
        for name in STATISTICS
        for layer, value in enumerate(each_layer(row, name, bootstrap), _FIRST.get(name, 1))
    ]
    return _csv(["size", "row", "statistic", "layer", "value", "low", "high"], lines)


def grid_csv(panels: Sequence[Panel]) -> str:
    """The cells of the robustness grid."""
    lines = [
        [cell.row, cell.warmup, cell.learning_rate, cell.dropout, cell.state]
        + ([cell.loss.value, cell.loss.low, cell.loss.high] if cell.loss else [None] * 3)
        for panel in panels
        for cell in panel.cells.values()
    ]
    names = ["row", "warmup", "learning_rate", "dropout", "state", "loss", "low", "high"]
    return _csv(names, lines)


def _csv(head: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(["" if value is None else value for value in line] for line in lines)
    return text.getvalue()


def each_layer(row: EncoderRow, name: str, bootstrap: Bootstrap) -> list[Estimate]:
    """A statistic of every layer; none where layers share what it is about."""
    statistic: Ratio | None = row.layers(name) if name in _LAYERS else row.gradients(name)
    if statistic is None or statistic.above.shape[-1] == 0:
        return []
    return by_layer(statistic, row.counts, bootstrap)
