"""A plan of a thousand seeds takes no longer than one of a few: settings are checked once a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from normattn.lab.studies import find, names
from normattn.lab.sweep.planner import make_plan
from normattn.lab.sweep.run import Request
from normattn.lab.training import LoopConfig


@pytest.mark.parametrize("study", names())
def test_settings_are_checked_as_often_for_many_seeds_as_for_few(
    study: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[Any] = []
    parse = LoopConfig.parse.__func__  # type: ignore[attr-defined]

    def counting(kind: type[LoopConfig], *given: Any) -> Any:
        checked.append(kind)
        return parse(kind, *given)

    monkeypatch.setattr(LoopConfig, "parse", classmethod(counting))

    def planned(seeds: int) -> tuple[int, int]:
        checked.clear()
        request = Request(preset="smoke", seeds=tuple(range(seeds)), out=tmp_path / "none")
        plan = make_plan(find(study).resolve(request))
        return len(checked), plan.runs

    few, many = planned(2), planned(40)
    assert many[1] > few[1]
    assert many[0] == few[0]


def test_seeds_of_a_row_that_are_trained_count_as_such(tmp_path: Path) -> None:
    sweep = find("keynorm").resolve(
        Request(preset="smoke", seeds=(0, 1, 2), variants=("KNA",), out=tmp_path)
    )
    status = '{"state": "finished", "step": 1, "steps": 1}'
    place = tmp_path / "cells" / "KNA" / "seed1"
    place.mkdir(parents=True)
    (place / "status.json").write_text(status)
    whole = make_plan(
        find("keynorm").resolve(
            Request(preset="smoke", seeds=(0, 1, 2), variants=("KNA",), out=tmp_path / "new")
        )
    )
    plan = make_plan(sweep)
    assert (plan.runs, plan.finished) == (3, 1)
    assert plan.flops < whole.flops
