"""The RealFormer study's page: the table, the sources' sentences, layer by layer, the grid."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from normattn.atomic import write_text
from normattn.errors import InputError
from normattn.reports.bootstrap import Bootstrap
from normattn.reports.history import read_losses
from normattn.reports.markdown import FEW, few_note, grid
from normattn.reports.metrics import Estimate
from normattn.reports.realformer_claims import POSTLN, Finding, findings
from normattn.reports.realformer_files import (
    STATISTICS,
    each_layer,
    grid_csv,
    layers_csv,
    table_csv,
    table_json,
)
from normattn.reports.realformer_grid import Panel, grid_panels
from normattn.reports.realformer_records import EncoderRecord, Failure, Setting
from normattn.reports.realformer_rows import (
    EncoderRow,
    encoder_rows,
    estimated,
    paired,
)
from normattn.reports.unigram import MARGIN


def realformer_report(
    records: Sequence[EncoderRecord],
    failures: Sequence[Failure],
    histories: Mapping[Setting, Path],
    out: Path,
    bootstrap: Bootstrap | None = None,
) -> list[Path]:
    """Write table.md, .csv, .json, layers.csv, grid.csv and the figures; return the figures' files.

    Records come in the order of the table; `histories` are the metrics files of its runs. The same
    records give the same bytes. Raises `InputError` when there is nothing to report.
    """
    drawn = bootstrap or Bootstrap()
    rows = encoder_rows([each for each in records if each.setting.part == "table"])
    panels = grid_panels(
        [each for each in records if each.setting.part == "grid"],
        [each for each in failures if each.setting.part == "grid"],
        drawn,
    )
    lost = [each for each in failures if each.setting.part == "table"]
    if not (rows or lost or panels):
        raise InputError("there is nothing to report: no encoder was scored")
    found = findings(rows, panels, drawn)
    write_text(out / "table.md", _markdown(rows, lost, panels, found, drawn))
    write_text(out / "table.csv", table_csv(rows, drawn))
    write_text(out / "layers.csv", layers_csv(rows, drawn))
    write_text(out / "grid.csv", grid_csv(panels))
    write_text(out / "table.json", table_json(rows, lost, found, drawn))
    from normattn.reports.figures.realformer import draw_depth, draw_grid, draw_losses

    losses = defaultdict(list)
    for setting, path in histories.items():
        losses[setting.size, setting.row].append(read_losses(path))
    folder = out / "figures"
    paths = draw_depth(rows, drawn, folder) + draw_losses(losses, folder)
    return paths + draw_grid(panels, folder)


def _markdown(
    rows: Sequence[EncoderRow],
    lost: Sequence[Failure],
    panels: Sequence[Panel],
    found: Sequence[Finding],
    bootstrap: Bootstrap,
) -> str:
    parts = [
        "# Residual scores and where norms stand",
        "A masked language model's accuracy (in %) and loss (in nats) on hidden tokens of "
        f"held-out text, with {bootstrap.level:.0%} intervals from {bootstrap.resamples} bootstrap "
        "resamples of the documents, and of the seeds where there are several. All models read the "
        "same texts with the same tokens hidden, so that differences are paired.",
        *(_size_table(size, rows, bootstrap) for size in _sizes(rows)),
        _legend(rows),
        "\n".join(
            f"- {each.setting.size} {each.setting.row}, seed {each.setting.seed}: diverged at step "
            f"{each.step}; the first value that is not finite came from {each.where}."
            for each in lost
        ),
        _claims(found),
        _depth_table(rows, bootstrap),
        _grid_tables(panels),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _sizes(rows: Sequence[EncoderRow]) -> list[str]:
    return list(dict.fromkeys(row.setting.size for row in rows))


def _size_table(size: str, rows: Sequence[EncoderRow], bootstrap: Bootstrap) -> str:
    own = [row for row in rows if row.setting.size == size]
    base = next((row for row in own if row.setting.row == POSTLN), None)
    head = ("row", "accuracy", "− PostLN", "loss", "steps", "parameters", "seeds")
    lines = []
    for row in own:
        setting = row.setting
        accuracy, loss = (
            estimated([(1.0, each)], row.counts, bootstrap) for each in (row.accuracy(), row.loss())
        )
        lines.append(
            (
                setting.row,
                _shown(accuracy, 1),
                _shown(_against(row, base, bootstrap), 1, signed=True),
                _shown(loss, 3),
                f"{setting.steps:,}",
                f"{setting.parameters:,}",
                ", ".join(map(str, row.seeds)),
            )
        )
    first = own[0].setting
    return f"## {size}: {first.layers} layers of width {first.dim}\n\n{grid(head, lines)}"


def _against(row: EncoderRow, base: EncoderRow | None, bootstrap: Bootstrap) -> Estimate | None:
    if base is None or row is base or not set(row.seeds) & set(base.seeds):
        return None
    a, b = paired(row, base)
    return estimated([(1.0, a.accuracy()), (-1.0, b.accuracy())], a.counts, bootstrap)


def _legend(rows: Sequence[EncoderRow]) -> str:
    if not rows:
        return ""
    documents, tokens, _ = rows[0].counts
    unigram = float(rows[0].unigram().value()[0])
    note = (
        f"Behind each value: {documents} documents, {tokens:,} hidden tokens. The words' "
        f"frequencies alone have a loss of {unigram:.3f}."
    )
    if any(1 < len(row.seeds) < 5 for row in rows):
        note += " Resampling so few seeds understates how much further seeds would vary."
    if any(len(row.seeds) == 1 for row in rows):
        note += " A row of one seed speaks of that trained model only."
    if documents < FEW:
        note += few_note("documents")
    return note + (
        "\n\n- RealFormer: PostLN, and every layer adds its scores to those of the layers below; "
        "-mean: softmax reads\n  their mean; -PreLN: the same under PreLN; -half: half the steps, "
        "with a schedule of its own that ends there.\n"
        "- ResidualQK: PostLN, and every layer adds its queries and keys to those below.\n"
        "- ReZero: x + α·f(N(x)), α = 0 at first; ReZeroNoNorm: x + α·f(x); FixedScale: "
        "x + 0.1·f(x), both without any norm.\n"
        "- -shared: one block's weights for all layers (ALBERT)."
    )


def _claims(found: Sequence[Finding]) -> str:
    if not found:
        return ""
    head = ("the source says", "source", "size", "measured", "difference", "verdict")
    lines = [
        (
            *(each.claim, each.source, each.size, each.what),
            *(_shown(each.difference, 2, True), each.verdict),
        )
        for each in found
    ]
    intro = (
        "A sentence counts as found only where the interval of its difference, paired over "
        "documents and seeds, lies on the claimed side of 0; each stands alone (no correction for "
        "their number). Settings of the grid are no sample: there a two-sided exact sign test at "
        "5 % decides, over the settings in which only one of both failed."
    )
    return f"## What the sources say, and what was found\n\n{intro}\n\n{grid(head, lines)}"


def _depth_table(rows: Sequence[EncoderRow], bootstrap: Bootstrap) -> str:
    """The lowest, the middle and the highest layer; all of them are in layers.csv."""
    lines = []
    for row in rows:
        cells = []
        for name in STATISTICS:
            values = each_layer(row, name, bootstrap)
            if not values:
                cells.append("–")
                continue
            ends = dict.fromkeys((0, len(values) // 2, len(values) - 1))
            cells.append(" · ".join(f"{values[n].value:.3g}" for n in ends))
        lines.append((f"{row.setting.size} {row.setting.row}", *cells))
    if not lines:
        return ""
    note = (
        "The lowest, a middle and the highest layer of each row (the stream also below the first); "
        "every layer with its interval is in layers.csv, and drawn in figures/."
    )
    table = grid(("row", *STATISTICS.values()), lines)
    return f"## Layer by layer\n\n{note}\n\n{table}"


def _grid_tables(panels: Sequence[Panel]) -> str:
    if not panels:
        return ""
    settings = list(dict.fromkeys(place for panel in panels for place in panel.cells))
    head = ["row", "warm-up", "failed", *(f"lr {rate:g}, drop {drop:g}" for rate, drop in settings)]
    lines = []
    for panel in panels:
        texts = []
        for place in settings:
            cell = panel.cells.get(place)
            value = "–" if cell is None or cell.loss is None else f"{cell.loss.value:.3f}"
            texts.append(
                value if cell is None or cell.state == "learned" else f"{value} {cell.state}"
            )
        failed = f"{panel.failed} of {len(panel.cells)}"
        lines.append(
            (panel.row, f"{panel.warmup} steps" if panel.warmup else "none", failed, *texts)
        )
    note = (
        "Held-out loss at each learning rate and dropout. diverged: the loss stopped being finite; "
        f"stuck: it ends less than {MARGIN:g} nats below that of the words' frequencies alone."
    )
    return f"## Who survives what\n\n{note}\n\n{grid(head, lines)}"


def _shown(value: Estimate | None, digits: int, signed: bool = False) -> str:
    if value is None:
        return "–"
    form = f"{'+' if signed else ''}.{digits}f"
    if value.low is None or value.high is None:
        return f"{value.value:{form}} [no interval]"
    return f"{value.value:{form}} [{value.low:{form}}, {value.high:{form}}]"
