"""Measurements and what they say: the frame, its store, statistics, estimates and contrasts."""

from normattn.lab.stats.bootstrap import Bootstrap
from normattn.lab.stats.decisions import holm, sign_test
from normattn.lab.stats.estimate import Estimate, by_bin, contrast, estimate, of_seeds
from normattn.lab.stats.frame import Identity, fact, identified, joined, sums
from normattn.lab.stats.gather import Sums, gathered, select
from normattn.lab.stats.statistic import Statistic
from normattn.lab.stats.store import MeasurementStore, collected, digest

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
