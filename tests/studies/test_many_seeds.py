"""A plan of a thousand seeds takes no longer than one of a few: settings are checked once a row."""

from __future__ import annotations

import json
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


def test_what_was_trained_counts_as_such_by_its_own_settings_alone(tmp_path: Path) -> None:
    asked = Request(preset="smoke", seeds=(0, 1, 2), variants=("KNA",), out=tmp_path)
    sweep = find("keynorm").resolve(asked)
    whole = make_plan(sweep)
    place = tmp_path / "cells" / "KNA" / "seed1"
    place.mkdir(parents=True)
    (place / "status.json").write_text('{"state": "finished", "step": 1, "steps": 1}')
    settings = sweep.runs[1].training_config.model_dump(mode="json")
    for changes, finished in (({}, 1), ({"threads": 2}, 1), ({"steps": 1}, 0)):
        stored = {"format": 1, "kind": "causal-lm", "config": {**settings, **changes}}
        (place / "config.json").write_text(json.dumps(stored))
        plan = make_plan(sweep)
        assert (plan.runs, plan.finished) == (3, finished)
        assert (plan.flops < whole.flops) == bool(finished)
