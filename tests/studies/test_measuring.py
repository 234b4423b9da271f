"""What the evaluation stage counts as read."""

from __future__ import annotations

from typing import Any

import pytest

from normattn.lab.studies.language import read_lengths, set_lengths
from normattn.lab.studies.preset import PROTOCOLS, EvaluationSettings


@pytest.mark.parametrize(
    ("changes", "lengths"),
    [
        ({}, [1, 1, 2, 4, 8, 8]),
        ({"protocols": (*PROTOCOLS, "by_position")}, [1, 1, 2, 4, 8, 8]),
        ({"protocols": ("last_segment",)}, [1, 2, 4, 8]),
        ({"protocols": ("non_repeated", "repeated")}, [8, 8]),
        ({"multiples": (1,)}, [1, 1]),
    ],
)
def test_windows_in_common_are_counted_once(changes: dict[str, Any], lengths: list[int]) -> None:
    settings = EvaluationSettings(**changes)
    assert sorted(read_lengths(settings)) == lengths
    assert set(read_lengths(settings)) == set(set_lengths(settings))
