"""Small frames with known numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from normattn.lab.stats import Identity, sums, with_identity


def identity(row: str = "A", seed: int = 0, **changes: Any) -> Identity:
    fields: dict[str, Any] = {"study": "s", "row": row, "score": row, "seed": seed, "protocol": "p"}
    fields |= {"length": 8, "train_length": 4, "data": "d", **changes}
    return Identity(**fields)


def counted(
    row: str,
    seed: int,
    correct: Any,
    tokens: Any = None,
    statistic: str = "accuracy",
    **changes: Any,
) -> pl.DataFrame:
    units = [f"doc{n}" for n in range(len(correct))]
    of = np.full(len(correct), 10.0) if tokens is None else np.asarray(tokens)
    return with_identity(identity(row, seed, **changes), [sums(statistic, units, correct, of)])
