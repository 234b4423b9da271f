"""Which scores the extended table trains: a row for every part that can be trained in."""

from __future__ import annotations

from collections.abc import Mapping

from normattn.score.part import Part
from normattn.score.registry import parts

BASES = ("Baseline", "Baseline-logn", "KNA", "KNA-logn", "CosA", "CosA-logn")
ON_BASELINE = ("position", "bias", "cap", "sink", "visible", "layout")
"""The slots whose parts each get a row on Baseline."""

ORDERED = "QKRMSNorm"
"""What a part of the slot `order` is shown on: it needs a norm, whose gain may matter."""

READ_WITH = ("YaRN", "ReRoPE")
"""The methods that rows other than `BASES` are read with: every method on every row is no table."""


def trained_in_variants(known: Mapping[str, type[Part]] | None = None) -> tuple[str, ...]:
    """Baseline, KNA and CosA with and without log-n, and a row for every other trained-in part.

    Other norms of the score are not among them: `reproduce mechanism` compares those. Each part
    stands alone with its default parameters, on Baseline (NoPE on KNA too, where the source found
    no extrapolation). `known` are the registered parts, in the order of slots and names. Whether a
    model of some size can be trained with a row is not asked here.
    """
    rows = list(BASES)
    for name, part in (parts() if known is None else known).items():
        if part.when != "trained-in" or name == "RoPE":
            continue
        if part.slot.value == "order":
            rows.append(f"{ORDERED}-{name}")
        elif part.slot.value in ON_BASELINE:
            rows.append(f"Baseline-{name}")
            rows += ["KNA-NoPE"] * (name == "NoPE")
    return tuple(rows)
