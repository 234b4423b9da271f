"""Which scores the extended table trains: a row for every part that can be trained in."""

from __future__ import annotations

from collections.abc import Mapping

from normattn.score.part import Part
from normattn.score.registry import parts

BASES = ("Baseline", "Baseline-logn", "KNA", "KNA-logn", "CosA", "CosA-logn")
CONTROLS = (
    *("QKLayerNorm", "QKLayerNorm(gain=false)", "QKRMSNorm", "QKRMSNorm(gain=false)"),
    "QKNorm2020",
)
"""Other norms of the score: does their gain undo them?"""

ON_BASELINE = ("position", "bias", "cap", "sink", "visible", "layout")
"""The slots whose parts each get a row on Baseline."""

ORDERED = "QKRMSNorm"
"""What a part of the slot `order` is shown on: it needs a norm, whose gain may matter."""


def trained_in_variants(known: Mapping[str, type[Part]] | None = None) -> tuple[str, ...]:
    """Baseline, KNA and CosA with and without log-n, the controls, and every other trained-in part.

    Each part stands alone with its default parameters, on Baseline (NoPE on KNA too, where the
    source found no extrapolation). `known` are the registered parts, in the order of slots and
    names. Whether a model of some size can be trained with a row is not asked here.
    """
    rows = [*BASES, *CONTROLS]
    for name, part in (parts() if known is None else known).items():
        if part.when != "trained-in" or name == "RoPE":
            continue
        if part.slot.value == "order":
            rows.append(f"{ORDERED}-{name}")
        elif part.slot.value in ON_BASELINE:
            rows.append(f"Baseline-{name}")
            rows += ["KNA-NoPE"] * (name == "NoPE")
    return tuple(rows)
