"""A plan counts what was trained, by its own settings."""

from __future__ import annotations

import json
from pathlib import Path

from normattn.lab.studies import find
from normattn.lab.sweep.planner import make_plan
from normattn.lab.sweep.run import Request


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
