"""A stage is done when each of its own evaluations is there; other files count for nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from normattn.cli.app import main
from normattn.lab.sweep.launchers import Local
from studies import here
from undrawn import undraw

FEW = {
    "keynorm": ("--variants", "KNA", "--methods", "unmodified,YaRN"),
    "retrofit": (
        *("--variants", "KNA", "--set", "continued.steps=2", "--set", "continued.keep=[1,2]"),
        *("--set", "continued.warmup_steps=0"),
    ),
}


@pytest.fixture(autouse=True)
def _cells_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Local, "session", here.session)
    undraw(monkeypatch)


def _reproduce(study: str, tiny: Path, out: Path) -> bytes:
    few = ("--set", "training.steps=2", *FEW[study])
    with pytest.raises(SystemExit) as ended:
        main(["reproduce", study, "--preset", str(tiny), *few, "--out", str(out)])
    assert ended.value.code == 0
    return (out / "measurements.parquet").read_bytes()


@pytest.mark.parametrize("study", FEW)
def test_files_of_other_names_do_not_make_up_for_lost_ones(
    study: str, tiny: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    whole = _reproduce(study, tiny, out)
    records = {
        path: path.read_bytes() for path in out.rglob("*.parquet") if path.parent.name != "out"
    }
    lost = sorted(records)[0]
    for folder in {path.parent for path in records}:
        copies = [path for path in records if path.parent == folder]
        for number, path in enumerate(copies):
            path.with_name(f".other-{number}.parquet").write_bytes(b"")
    lost.rename(lost.with_name(".lost"))
    assert _reproduce(study, tiny, out) == whole
    assert lost.read_bytes() == records[lost]


def test_a_lost_or_damaged_marker_costs_a_look_and_no_digit(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    whole = _reproduce("keynorm", tiny, out)
    (marker,) = out.glob("cells/*/*/evaluations/done.json")
    for content in (None, "{"):
        before = marker.read_bytes()
        marker.unlink() if content is None else marker.write_text(content)
        assert _reproduce("keynorm", tiny, out) == whole
        assert marker.read_bytes() == before


def test_empty_files_alone_are_no_evaluations(tiny: Path, tmp_path: Path) -> None:
    from normattn.lab.studies import find
    from normattn.lab.sweep.run import Request

    asked = Request(
        str(tiny),
        variants=("KNA",),
        methods=("unmodified", "YaRN"),
        seeds=(0,),
        out=tmp_path / "out",
    )
    sweep = find("keynorm").resolve(asked)
    reading = sweep.stages(sweep.runs[0])[-1]
    folder = tmp_path / "out" / "cells" / "KNA" / "seed0" / "evaluations"
    folder.mkdir(parents=True)
    for number in range(100):
        (folder / f"{number:032}.parquet").write_bytes(b"")
    assert not reading.is_done()
