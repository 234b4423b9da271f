"""Measurements and what they say: the frame, its store, statistics, estimates and contrasts."""

from normattn.measure.bootstrap import Bootstrap
from normattn.measure.decisions import holm, sign_test
from normattn.measure.estimate import Estimate, by_bin, contrast, estimate, of_seeds
from normattn.measure.frame import Identity, fact, identified, joined, sums
from normattn.measure.gather import Sums, gathered, select
from normattn.measure.statistic import Statistic
from normattn.measure.store import MeasurementStore, collected, digest

__all__ = [
    "Bootstrap",
    "Estimate",
    "Identity",
    "MeasurementStore",
    "Statistic",
    "Sums",
    "by_bin",
    "collected",
    "contrast",
    "digest",
    "estimate",
    "fact",
    "gathered",
    "holm",
    "identified",
    "joined",
    "of_seeds",
    "select",
    "sign_test",
    "sums",
]
