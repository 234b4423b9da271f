"""The figures of the mechanism study."""

from __future__ import annotations

import numpy as np
import polars as pl

from normattn.kernels.cosines import BINS
from normattn.lab.report.figure import (
    Density,
    DensityRow,
    Figure,
    Grid,
    IntervalColumn,
    Intervals,
)
from normattn.lab.report.view import View
from normattn.lab.studies.mechanism import unseen
from normattn.lab.studies.mechanism.measured import QUANTILES, cosine_columns, lengths, rows, where


def figures(view: View) -> list[Figure]:
    """Norms against attention, cosines at both lengths, and their quantiles."""
    near, far = lengths(view)
    scores = rows(view)
    ranges = Intervals(
        "cosine_ranges",
        "Quantiles of cos(q, k) by length of the text, mean over heads",
        tuple(f"{row.label}, {length:,}" for row in scores for length in (near, far)),
        tuple(
            IntervalColumn(
                f"{share:.1%}",
                tuple(c.cell(view, row).estimate for row in scores for c in at_both),
            )
            for share, *at_both in zip(
                QUANTILES,
                cosine_columns(view, "near", near),
                cosine_columns(view, "far", far),
                strict=True,
            )
        ),
    )
    lines = []
    for row in scores:
        heights = []
        for length in (near, far):
            sums = view.sums("cosine", {**row.where, **where(view, length=length)})
            if sums is not None:
                counts = sums.numerator.sum((0, 1)).reshape(-1, BINS).sum(0)
                heights.append(tuple(float(v) for v in counts / counts.sum()))
        lines.append(DensityRow(row.label, -1.0, 1.0, tuple(heights), (f"{near:,}", f"{far:,}")))
    title = f"Cosines at {near:,} and at {far:,} tokens, all heads"
    cosines = Density("cosines", title, tuple(lines), "cos(q, k)")
    return [_densities(view), ranges, cosines, *unseen.figures(view)]


def _densities(view: View) -> Figure:
    """The share of keys by their norm, and the mean attention that keys of that norm receive."""
    labels, values, texts, edges = [], [], [], []
    for row in rows(view):
        chosen = view.frame.filter(row=row.where["row"], statistic="density")
        table = (
            chosen.group_by("bin")
            .agg(
                ((pl.col("factor.received") * pl.col("sum")).sum() / pl.col("sum").sum()).alias(
                    "mean"
                ),
                pl.col("sum").sum(),
            )
            .sort("bin")
        )
        edges = table["bin"].to_list()
        total = float(table["sum"].sum()) or 1.0
        labels.append(row.label)
        line = [m if n / total > 1e-4 else None for m, n in table.select("mean", "sum").rows()]
        values.append(tuple(None if v is None or not np.isfinite(v) else v for v in line))
        texts.append(("",) * len(line))
    return Grid(
        "key_norms_and_attention",
        "Attention received (log2 over uniform) by the key's norm",
        tuple(labels),
        tuple(f"{2**edge:.2f}" for edge in edges),
        tuple(values),
        tuple(texts),
        x_title="‖k‖ over the text's mean",
        scale_title="mean log2 of attention received over uniform",
    )
