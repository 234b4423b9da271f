"""F1 from summed counts of classes, against numbers made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from normattn.lab.stats.metrics import MICRO_F1, macro_f1


def test_f1_of_counts_by_hand() -> None:
    above, below = np.array([[6.0, 0, 0]]), np.array([[9.0, 2, 0]])
    assert MICRO_F1.value(above, below, above, below) == pytest.approx(100 * 6 / 11)
    # The third label is nowhere: it does not count.
    assert macro_f1(above, below, above, below) == pytest.approx(100 * (6 / 9 + 0) / 2)
    nothing = np.zeros((1, 3))
    assert macro_f1(nothing, nothing, nothing, nothing) == 0


def test_a_label_that_a_resample_misses_keeps_its_f1() -> None:
    whole_above, whole_below = np.array([[6.0, 0, 2]]), np.array([[8.0, 2, 2]])
    above, below = np.array([[8.0, 0, 0]]), np.array([[8.0, 1, 0]])
    # The second label was drawn, the third was not.
    assert macro_f1(above, below, whole_above, whole_below) == pytest.approx(100 * (1 + 0 + 1) / 3)
