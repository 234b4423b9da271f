"""Decisions about several contrasts: Holm's correction, and exact tests of paired counts."""

from __future__ import annotations

from collections.abc import Sequence


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p values (Holm 1979): p̃_(k) = max_{j ≤ k} min(1, (m − j + 1)·p_(j)).

    Rejecting where p̃ ≤ α keeps the probability of any false rejection in the family below α. The
    answer is in the order of the input.
    """
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def sign_test(only_first: int, only_second: int) -> float:
    """Two-sided exact p of a split at least as uneven, either side being as likely; 1 for 0, 0."""
    # Slow to import, and rarely asked for.
    from scipy import stats

    total = only_first + only_second
    return float(stats.binomtest(only_first, total).pvalue) if total else 1.0
