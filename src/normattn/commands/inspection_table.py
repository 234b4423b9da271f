"""What an inspection found, as a table on the terminal that fits 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from normattn.commands.inspection_figures import layer_titles
from normattn.diagnostics.records import InspectionRecord, LayerRecord

COLUMNS = {
    "entropy": "entropy",
    "entropy_share": "/ ln n",
    "largest": "largest",
    "first_mass": "token\n0",
    "sink_mass": "sink",
    "beyond_mass": "beyond\nL",
    "angle_mass": "unseen",
}


def print_layers(record: InspectionRecord) -> None:
    """One line per layer: means over its heads, of largest logits the largest.

    A column that says nothing is left out: a text within the training length has nothing beyond.
    """
    console = Console(highlight=False)
    console.print(
        f"{record.facts['score']}, {record.facts['method']}: {record.facts['texts']}, "
        f"trained at {record.facts['train_length']:,}",
        markup=False,
        soft_wrap=True,
    )
    known = [field for field in COLUMNS if _tells(record, field)]
    table = Table(box=None, padding=(0, 0, 0, 2), pad_edge=False)
    for title in ("layer", *(COLUMNS[field] for field in known), "‖q‖", "‖k‖"):
        table.add_column(title, no_wrap=True, justify="left" if title == "layer" else "right")
    if any(layer.cosines is not None for layer in record.layers):
        table.add_column("cos 5–95 %", no_wrap=True, justify="right")
    titles = layer_titles([layer.name for layer in record.layers])
    for title, layer in zip(titles, record.layers, strict=True):
        cells = [_cell(field, layer.by_head(field)) for field in known]
        cells += [_cell("norm", heads) for heads in (layer.q_norm, layer.k_norm)]
        if layer.cosines is not None:
            cells.append(_range(layer))
        table.add_row(title, *cells)
    console.print(table)


def _tells(record: InspectionRecord, field: str) -> bool:
    """Whether a column says anything."""
    values = [value for layer in record.layers for value in layer.by_head(field)]
    return (
        any(value for value in values)
        if field.endswith("mass")
        else any(value is not None for value in values)
    )


def _cell(field: str, heads: Sequence[float | None]) -> str:
    """The mean over heads, or the largest of largest logits."""
    values = [value for value in heads if value is not None]
    if not values:
        return "–"
    value = max(values) if field == "largest" else sum(values) / len(values)
    digits = {"largest": 1, "norm": 1, "entropy": 2, "entropy_share": 2}.get(field, 3)
    return f"{value:.{digits}f}"


def _range(layer: LayerRecord) -> str:
    """From the 5th to the 95th percentile, the mean over heads of each."""
    known = [row for row in layer.cosines or () if row[0] is not None]
    if not known:
        return "–"
    low, high = (sum(row[place] or 0.0 for row in known) / len(known) for place in (1, 3))
    return f"{low:+.2f} {high:+.2f}"
