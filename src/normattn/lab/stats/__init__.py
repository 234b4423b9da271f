"""Statistics: the measurements table and its store, metrics, estimates and contrasts."""

from normattn.lab.stats.arrays import Sums, select, select_sums
from normattn.lab.stats.estimates import (
    Estimate,
    contrast,
    estimate,
    estimate_over_seeds,
    holm,
    sign_test,
)
from normattn.lab.stats.measurements import Identity, concat, diverged, scalar, sums, with_identity
from normattn.lab.stats.metrics import LONGEST, SHORTEST, Metric
from normattn.lab.stats.store import MeasurementStore, digest, read_measurements

__all__ = [
    "Estimate",
    "Identity",
    "LONGEST",
    "MeasurementStore",
    "Metric",
    "SHORTEST",
    "Sums",
    "concat",
    "contrast",
    "digest",
    "diverged",
    "estimate",
    "estimate_over_seeds",
    "holm",
    "read_measurements",
    "scalar",
    "select",
    "select_sums",
    "sign_test",
    "sums",
    "with_identity",
]
