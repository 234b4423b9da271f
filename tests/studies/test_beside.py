"""What `normattn evaluate` measures of a study's cell is not on the study's page."""

from __future__ import annotations

import json
from pathlib import Path

from studies.conftest import Start
from studies.test_sweep import finish, result


def test_a_cell_evaluated_by_itself(tiny: Path, tmp_path: Path, start: Start) -> None:
    out = tmp_path / "out"
    sweep = ("reproduce", "keynorm", "--preset", tiny, "--set", "training.steps=5", "--out", out)
    made = finish(start(*sweep, "--variants", "KNA", "--methods", "unmodified", cells_here=True))
    assert made[0] == 0, made[1]
    before, cell = result(out), out / "cells" / "KNA" / "seed0"
    own = {path.name for path in (cell / "evaluations").iterdir()}

    # Further windows and methods of the study's protocols, and a protocol that it does not have.
    asked = (
        "evaluate",
        cell,
        "--max-windows",
        4,
        "--multiples",
        "1,2,4",
        "--methods",
        "unmodified,NTK",
    )
    for protocols in ("train-length,last-segment", "by-position"):
        code, said = finish(start(*asked, "--protocols", protocols))
        assert code == 0, said
    again = (*asked, "--protocols", "by-position")
    beside = {p: p.stat().st_mtime_ns for p in (cell / "evaluations" / "beside").iterdir()}
    assert finish(start(*again))[0] == 0
    assert {path: path.stat().st_mtime_ns for path in beside} == beside
    assert len(beside) == 2 * (1 + 3 + 1)
    assert not own & {path.name for path in beside}

    assert finish(start("report", out))[0] == 0
    assert result(out) == before
    assert finish(start("export", cell, tmp_path / "model"))[0] == 0
    page = tmp_path / "page"
    assert finish(start("report", cell, "--out", page))[0] == 0
    found = json.loads((page / "table.json").read_text())["tables"]["table"]
    assert [row["row"] for row in found] == ["KNA", "KNA-NTK"]
