"""Decisions about several contrasts: Holm's correction, and exact tests of paired counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def holm(p_values: Sequence[float], groups: Sequence[int] | None = None) -> list[float]:
    """Adjusted p values (Holm 1979): p̃_(k) = max_{j ≤ k} min(1, t_j·p_(j)), t_j = m − j + 1.

    Rejecting where p̃ ≤ α keeps the probability of any false rejection in the family below α. The
    answer is in the order of the input. `groups` numbers hypotheses of which at most one can be
    true, as "just −m" and "0 or above": then t_j is the number of groups that still have a
    hypothesis (Shaffer 1986), as no more can be true together.
    """
    if groups is None:
        groups = range(len(p_values))
    left = Counter(groups)
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for index in order:
        highest = max(highest, min(1.0, len(left) * p_values[index]))
        adjusted[index] = highest
        left[groups[index]] -= 1
        if not left[groups[index]]:
            del left[groups[index]]
    return adjusted


def sign_test(only_first: int, only_second: int) -> float:
    """Two-sided exact p of a split at least as uneven, either side being as likely; 1 for 0, 0."""
    # Slow to import, and rarely asked for.
    from scipy import stats

    total = only_first + only_second
    return float(stats.binomtest(only_first, total).pvalue) if total else 1.0
