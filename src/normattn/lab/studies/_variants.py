"""Which scores the extended table trains: a row for every part that can be trained in."""

from __future__ import annotations

from collections.abc import Mapping

from normattn.score.parts import Part, parts

BASES = ("Baseline", "Baseline-logn", "KNA", "KNA-logn", "CosA", "CosA-logn")
WITHOUT_ROWS = ("variant",)
"""The slots whose parts stand in `BASES`; every other trained-in part gets a row on Baseline."""

ORDERED = "QKRMSNorm"
"""What a part of the slot `order` is shown on: it needs a norm, whose gain may matter."""

READ_WITH = ("YaRN", "ReRoPE")
"""The methods that rows other than `BASES` are read with: every method on every row is no table."""


def trained_in_variants(
    layers: int, known: Mapping[str, type[Part]] | None = None
) -> tuple[str, ...]:
    """Baseline, KNA and CosA with and without log-n, and a row for every other trained-in part.

    Other norms of the score are not among them: `reproduce mechanism` compares those. Each part
    stands alone with its default parameters, on Baseline (NoPE on KNA too, where the source found
    no extrapolation); a part that would change none of so few `layers` changes the last one.
    `known` are the registered parts, in the order of slots and names. Whether a model of some size
    can be trained with a row is not asked here.
    """
    rows = list(BASES)
    for name, part in (parts() if known is None else known).items():
        if part.when != "trained-in" or name in ("RoPE", "logn"):
            continue
        if part.slot.value == "order":
            rows.append(f"{ORDERED}-{name}")
        elif part.slot.value not in WITHOUT_ROWS:
            rows.append(f"Baseline-{_reaching(part, layers)}")
            rows += ["KNA-NoPE"] * (name == "NoPE")
    return tuple(rows)


def _reaching(part: type[Part], layers: int) -> str:
    """The part's name, and, where it acts on every so many layers, few enough to reach one."""
    every = getattr(part, "every", 0)
    return f"{part.name}(every={layers})" if every > layers >= 2 else part.name
