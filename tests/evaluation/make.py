"""Evaluation sets and scorers whose outcome can be counted by hand, and frames as arrays."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
import torch
from jaxtyping import Float, Int
from torch import Tensor

from normattn.kernels.cross_entropy import TokenScores
from normattn.lab.data.windows import EvaluationSet
from normattn.lab.evaluation.scorer import TokenScorer
from normattn.lab.stats import Identity

VOCABULARY = 16
SURE = 4.0  # logit of the predicted token; the others have 0


def successor_logits(ids: Int[Tensor, "b t"]) -> Float[Tensor, "b t v"]:
    """Logits of a model that always expects the number after the one it has just read."""
    following = torch.nn.functional.one_hot((ids + 1) % VOCABULARY, VOCABULARY)
    return SURE * following.float()


def successors(ids: Int[Tensor, "b t1"]) -> TokenScores:
    logits, targets = successor_logits(ids[:, :-1]).double(), ids[:, 1:]
    loss = torch.nn.functional.cross_entropy(logits.mT, targets, reduction="none")
    return TokenScores(loss, logits.argmax(-1) == targets)


def right_loss() -> float:
    return float(np.log(np.exp(SURE) + VOCABULARY - 1) - SURE)


def counting(*, broken_at: int = 0) -> np.ndarray:
    """A window 0, 1, 2 … of 8 tokens to score whose token `broken_at` (if any) is another."""
    window = np.arange(9) % VOCABULARY
    if broken_at:
        window[broken_at:] = (window[broken_at:] + 5) % VOCABULARY
    return window


def make_set(
    windows: Sequence[np.ndarray],
    *,
    protocol: str = "non_repeated",
    train_length: int = 8,
    documents: Sequence[str] | None = None,
    segments: Sequence[int] | None = None,
    start: int = 0,
) -> EvaluationSet:
    rows = np.asarray(windows, dtype=np.int64)
    return EvaluationSet(
        protocol,
        rows.shape[1] - 1,
        train_length,
        rows,
        list(documents or (f"d{i}" for i in range(len(rows)))),
        None if segments is None else np.asarray(segments, dtype=np.int64),
        start,
    )


def info(**changes: Any) -> Identity:
    fields: dict[str, Any] = {"study": "", "row": "KNA", "seed": 0, "score": "KNA@8"}
    return Identity(**(fields | {"weights": "w", "settings": "fp32"} | changes))


def table(measured: pl.DataFrame, statistic: str, column: str = "sum") -> np.ndarray:
    """One statistic's `column`, (units, bins), both ascending; every unit has every bin once."""
    rows = measured.filter(pl.col("statistic") == statistic).sort("unit", "bin")
    shape = (rows["unit"].n_unique(), rows["bin"].n_unique())
    assert rows.height == shape[0] * shape[1] > 0
    return rows[column].to_numpy().reshape(shape)


def edges_of(measured: pl.DataFrame) -> tuple[int, ...]:
    """The edges of the bins, which leave no gap and are those of every statistic."""
    for _, rows in measured.group_by("statistic"):
        assert set(rows.select("bin", "bin_end").rows()) == set(
            measured.select("bin", "bin_end").rows()
        )
    bins = sorted(set(measured.select("bin", "bin_end").rows()))
    assert all(a[1] == b[0] for a, b in itertools.pairwise(bins))
    return (*(int(start) for start, _ in bins), int(bins[-1][1]))


def one(measured: pl.DataFrame, column: str) -> Any:
    [value] = measured[column].unique().to_list()
    return value


class Counter:
    """A scorer that remembers the shapes it was asked for."""

    def __init__(self, scorer: TokenScorer | None = None) -> None:
        self.scorer = scorer or successors
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, ids: Tensor) -> TokenScores:
        self.shapes.append(tuple(ids.shape))
        return self.scorer(ids)
