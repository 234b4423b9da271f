"""Statistics: the measurements table and its store, metrics, estimates and contrasts."""

from normattn.lab.stats.arrays import Sums, gathered, select
from normattn.lab.stats.bootstrap import Bootstrap
from normattn.lab.stats.estimate import (
    Estimate,
    contrast,
    estimate,
    estimate_over_seeds,
    holm,
    sign_test,
)
from normattn.lab.stats.measurements import Identity, diverged, fact, identified, joined, sums
from normattn.lab.stats.metrics import LONGEST, SHORTEST, Metric
from normattn.lab.stats.store import MeasurementStore, collected, digest

__all__ = [
    "Bootstrap",
    "Estimate",
    "Identity",
    "LONGEST",
    "MeasurementStore",
    "Metric",
    "SHORTEST",
    "Sums",
    "collected",
    "contrast",
    "digest",
    "diverged",
    "estimate",
    "fact",
    "gathered",
    "holm",
    "identified",
    "joined",
    "estimate_over_seeds",
    "select",
    "sign_test",
    "sums",
]
