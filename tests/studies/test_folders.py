"""What a user's own files decide: the folder of a study, a study file; and never which code runs.

The study of docs/adding-a-study.md is run as a user runs it.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from normattn.errors import InputError
from normattn.lab.report.view import View
from normattn.lab.stats import Identity, concat, measurements, sums, with_identity
from normattn.lab.studies import find, find_typed, names, summary
from normattn.lab.studies.base import Claim, Eval, Metric, Study, Variant
from normattn.lab.sweep.run import Request
from studies.conftest import FINISHED, run
from studies.test_sweep import result

pytestmark = pytest.mark.usefixtures("runs_here")
RETROFIT = (
    *("--variants", "KNA", "--set", "training.steps=2", "--set", "continued.steps=2"),
    *("--set", "continued.keep=[1,2]", "--set", "continued.warmup_steps=0"),
)
HELPER = """
from pathlib import Path
Path(__file__).with_name("it-ran").write_text("")
"""


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """A copy of a finished study, with a helper.py beside it that leaves a mark where it is run."""
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    (out / "helper.py").write_text(HELPER)
    return out


def _again(study: str, tiny: Path, out: Path) -> bytes:
    words = FINISHED if study == "keynorm" else RETROFIT
    assert run("reproduce", study, "--preset", tiny, *words, "--out", out) == 0
    return (out / "measurements.parquet").read_bytes()


@pytest.mark.parametrize("study", ["keynorm", "retrofit"])
def test_files_of_other_names_do_not_make_up_for_lost_ones(
    study: str, tiny: Path, folder: Path, tmp_path: Path
) -> None:
    out = folder if study == "keynorm" else tmp_path / "retrofit"
    whole = _again(study, tiny, out)
    records = {path: path.read_bytes() for path in out.glob("*/**/*.parquet")}
    lost = sorted(records)[0]
    for place in {path.parent for path in records}:
        copies = [path for path in records if path.parent == place]
        for number, path in enumerate(copies):
            path.with_name(f".other-{number}.parquet").write_bytes(b"")
    lost.rename(lost.with_name(".lost"))
    assert _again(study, tiny, out) == whole
    assert lost.read_bytes() == records[lost]


def test_a_lost_or_damaged_marker_costs_a_look_and_no_digit(tiny: Path, folder: Path) -> None:
    whole = (folder / "measurements.parquet").read_bytes()
    (marker,) = folder.glob("cells/*/*/evaluations/done.json")
    for content in (None, "{"):
        before = marker.read_bytes()
        marker.unlink() if content is None else marker.write_text(content)
        assert _again("keynorm", tiny, folder) == whole
        assert marker.read_bytes() == before
    (log,) = folder.glob("jobs/*/*/log.txt")
    written = log.stat().st_mtime_ns
    assert _again("keynorm", tiny, folder) == whole
    assert log.stat().st_mtime_ns == written  # A finished job is not started again.


def test_what_evaluate_measures_of_a_run_is_not_on_the_page_of_its_study(
    folder: Path, tmp_path: Path
) -> None:
    """Further windows and methods of its protocols, and a protocol that it does not have."""
    before, cell = result(folder), folder / "cells" / "KNA" / "seed0"
    own = {path.name for path in (cell / "evaluations").iterdir()}
    asked = (
        *("evaluate", cell, "--max-windows", 4, "--multiples", "1,2,4"),
        *("--methods", "unmodified,NTK", "--protocols"),
    )
    for protocols in ("train-length,last-segment", "by-position"):
        assert run(*asked, protocols) == 0
    beside = {p: p.stat().st_mtime_ns for p in (cell / "evaluations" / "beside").iterdir()}
    assert len(beside) == 2 * (1 + 3 + 1)
    assert not own & {path.name for path in beside}
    assert run(*asked, "by-position") == 0
    assert {path: path.stat().st_mtime_ns for path in beside} == beside
    assert run("report", folder) == 0
    assert result(folder) == before
    assert run("export", cell, tmp_path / "model") == 0
    page = tmp_path / "page"
    assert run("report", cell, "--out", page) == 0
    found = json.loads((page / "table.json").read_text())["tables"]["table"]
    assert [row["row"] for row in found] == ["KNA", "KNA-NTK"]


# No code from folders


def _job(folder: Path, named: str) -> None:
    for file in folder.glob("jobs/*/*/*.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), "study": named}))


def _kind(folder: Path, named: str) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "kind": named}))
    for jobs in folder.glob("jobs/*/*/cell.json"):
        jobs.unlink()
    shutil.rmtree(folder / "cells", ignore_errors=True)


def _measurements(folder: Path, named: str) -> None:
    for name in ("jobs", "cells"):
        shutil.rmtree(folder / name, ignore_errors=True)
    measured = measurements.read(folder / measurements.FILE)
    measurements.write(
        folder / measurements.FILE, measured.with_columns(pl.lit(named).alias("study"))
    )


@pytest.mark.parametrize("place", [_job, _kind, _measurements])
def test_report_runs_no_file_that_a_folder_names(
    place: Callable[[Path, str], None],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    for spelled in (f"{folder}/helper.py", "helper.py", "../out/helper"):
        place(folder, spelled)
        assert run("report", folder) == 2
        assert not (folder / "it-ran").exists()
        assert "helper" in capsys.readouterr().err


def test_a_run_takes_its_study_from_its_command_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _job(folder, f"{folder}/helper.py")
    assert run("_cell", "--study", "keynorm", next(folder.glob("jobs/*/*"))) == 2
    assert not (folder / "it-ran").exists()
    assert "cell.json" in capsys.readouterr().err


def test_a_run_of_the_folder_runs_no_file_either(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    place = next(folder.glob("cells/*/seed0"))
    for file in place.rglob("*.json"):
        stored = json.loads(file.read_text())
        if isinstance(stored, dict):
            file.write_text(json.dumps({**stored, "study": "helper.py", "kind": "helper.py"}))
    for words in (
        ("evaluate", place),
        ("generate", place, "--prompt", "a"),
        ("export", place, tmp_path / "exported"),
        ("report", place, "--out", tmp_path / "page"),
    ):
        assert run(*words) == 2, words
        assert not (folder / "it-ran").exists(), words


def test_a_file_that_is_typed_is_run(folder: Path) -> None:
    assert run("report", folder, "--study", folder / "helper.py") == 2  # it defines no STUDY
    assert (folder / "it-ran").exists()


FAILING = {
    "raises": ("x = 1\n\n\ndef ask():\n    return {}['lengths']\n\n\nask()\n", 5, "KeyError"),
    "lacks a module": ("import os\nimport no_such_module_here\n", 2, "no_such_module_here"),
    "ends the process": ("import sys\nsys.exit(7)\n", 2, "SystemExit"),
    "is not valid Python": ("x = 1\nSTUDY = Study(\n", 2, "never closed"),
    "fails below": ("import json\njson.loads('{')\n", 2, "JSONDecodeError"),
}


@pytest.mark.parametrize("case", FAILING)
def test_a_study_file_that_fails_is_named_with_its_line(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, line, reason = FAILING[case]
    path = tmp_path / "mine.py"
    path.write_text(text)
    assert run("reproduce", path, "--plan") == 2
    sentence = capsys.readouterr().err.strip().splitlines()[-1]
    for word in (str(path), f"line {line}", reason):
        assert word in sentence


# Studies in files.
PAGE = Path(__file__).parents[2] / "docs" / "adding-a-study.md"


@pytest.fixture
def own_study(tmp_path: Path) -> Path:
    found = re.search(r"<!-- file: my_study.py -->\n```python\n(.*?)```", PAGE.read_text(), re.S)
    assert found is not None
    path = tmp_path / "my_study.py"
    path.write_text(found[1])
    return path


def test_a_study_of_ones_own_is_run_and_reported_again(
    own_study: Path,
    tiny: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(own_study.parent)
    out, alone = tmp_path / "out", tmp_path / "alone"
    methods = ("--methods", "unmodified,YaRN")
    few = ("--set", "training.steps=5", "--seeds", "3", *methods, "--out", out)
    assert run("reproduce", "./my_study.py", "--preset", tiny, *few) == 0, capsys.readouterr()
    table = json.loads((out / "table.json").read_text())
    rows = {row.pop("row"): row for row in table["tables"]["table"]}
    assert [*rows] == ["Baseline", "Baseline-YaRN", "KNA", "KNA-YaRN"]
    assert rows["KNA"]["gap"]["seeds"] == [0, 1, 2]
    # A claim without a method is about the models as trained.
    assert table["claims"][0]["difference"] == rows["KNA"]["gap"]
    assert table["claims"][0]["verdict"] in ("confirmed", "contradicted", "not confirmed")
    text = (out / "table.md").read_text()
    assert text.startswith("# Twice as long\n")
    made_by = "--preset ./tiny.toml --set training.steps=5 --methods unmodified,YaRN --seeds 3`"
    assert made_by in text
    assert (out / "report.html").is_file()
    assert (out / "figures" / "columns.png").is_file()
    (out / "table.md").unlink()
    alone.mkdir()
    for name in ("config.json", "measurements.parquet"):
        shutil.copy(out / name, alone / name)
    for folder in (out, alone):
        assert run("report", folder) == 2
        assert "--study" in capsys.readouterr().err
        assert run("report", folder, "--study", "my_study.py") == 0, capsys.readouterr()
        assert (folder / "table.md").read_text() == text


def test_a_study_imports_from_its_own_folder(
    own_study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (own_study.parent / "of_my_own.py").write_text('QUESTION = "Does my component help?"\n')
    named = own_study.read_text().replace(
        '    question="Do normalised keys let a model handle twice its training length?",',
        "    question=QUESTION,",
    )
    own_study.write_text("from of_my_own import QUESTION\n" + named)
    assert find_typed(str(own_study)).page.question == "Does my component help?"


def test_the_studies_of_the_library_are_found_by_their_files() -> None:
    assert {"continue", "keynorm", "mechanism", "window", "reading"} <= set(names())
    for name in names():
        assert summary(name).endswith(("?", ")", ".")), name
        study = find(name)
        assert study.name == name
        assert study.page.question
        assert study.help


def test_the_command_of_a_page_can_be_typed() -> None:
    asked = {"training.data.corpus": "my texts", "training.steps": 5, "continued.keep": [1, 4]}
    assert find("continue").command({"preset": "laptop", "changed": asked}) == (
        "normattn reproduce continue --preset laptop --set 'training.data.corpus=my texts' "
        "--set training.steps=5 --set 'continued.keep=[1, 4]'"
    )
    again = [{"variants": "KNA,CosA", "seeds": "2"}, {"seeds": "7,"}]
    assert find("keynorm").command({"asked": again}) == (
        "normattn reproduce keynorm --preset laptop --variants KNA,CosA --seeds 2 && "
        "normattn reproduce keynorm --preset laptop --seeds 7,"
    )
    assert find("keynorm").command({"seeds": 1}) == "normattn reproduce keynorm --preset laptop"
    # No settings are known: nobody typed that.
    assert find("keynorm").command({}) == ""
    assert find("extend").command({}) == "normattn extend MODEL"
    read = {"model": "my model", "text": ["a.txt", "b.txt"], "lengths": [64, 128], "windows": 3}
    assert find("extend").command(read) == (
        "normattn extend 'my model' --text a.txt --text b.txt --lengths 64,128 --windows 3"
    )
    looked = {"run": "runs/kna", "text": None, "windows": 8}
    assert find("inspect").command(looked) == "normattn inspect runs/kna --windows 8"


def test_what_is_no_study_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="did you mean keynorm"):
        find("keynrom")
    with pytest.raises(InputError, match=r"nothing\.py does not exist"):
        find_typed(str(tmp_path / "nothing.py"))
    path = tmp_path / "empty.py"
    path.write_text("x = 1\n")
    with pytest.raises(InputError, match="STUDY"):
        find_typed(str(path))


def test_a_variant_changes_settings_of_its_training(tiny: Path) -> None:
    study = Study(
        "wide",
        question="Does width matter?",
        variants=["KNA", Variant("KNA-short", "KNA", {"steps": 3})],
        evals=[Eval(lengths=(1, 2))],
        columns={"at L": Metric("accuracy").at(1)},
    )
    sweep = study.resolve(Request(preset=str(tiny), seeds=(0, 1)))
    steps = {run.name: run.training_config.steps for run in sweep.runs}
    plain = steps["KNA seed 0"]
    assert plain != 3
    assert steps == {
        **{f"KNA seed {seed}": plain for seed in (0, 1)},
        **{f"KNA-short seed {seed}": 3 for seed in (0, 1)},
    }
    scores = {run.training_config.model_dump(mode="json")["model"]["score"] for run in sweep.runs}
    assert len(scores) == 1
    chosen = study.resolve(Request(preset=str(tiny), variants=("KNA-short", "QNA")))
    assert [(run.variant, run.training_config.steps) for run in chosen.runs] == [
        *(("KNA-short", 3), ("QNA", plain))
    ]


@pytest.mark.parametrize(
    "changes",
    [{"evaluation.multiples": [1, 4]}, {"evaluation": {"protocols": ["train_length"]}}],
)
def test_what_an_eval_decides_cannot_be_set(tiny: Path, changes: dict[str, Any]) -> None:
    study = Study("own", "Which?", variants=["KNA"], evals=[Eval(lengths=(1, 2))])
    with pytest.raises(InputError, match=r"evaluation\.\w+: reproduce own does not use"):
        study.resolve(Request(preset=str(tiny), changes=changes))


def test_a_second_eval_is_refused() -> None:
    with pytest.raises(InputError, match="2 evals"):
        Study("two", "Which?", variants=["KNA"], evals=[Eval(lengths=(1,)), Eval(lengths=(2,))])


@pytest.mark.parametrize("known", ["accuracy", "of my own"])
def test_what_a_metric_is_given_is_used(known: str) -> None:
    given: dict[str, Any] = {"title": "", "unit": "s", "digits": 4}
    for name, value in given.items():
        metric = Metric(known, **{name: value})
        rest = [n for n in given if n != name]
        assert getattr(metric, name) == value
        assert [getattr(metric, n) for n in rest] == [getattr(Metric(known), n) for n in rest]


def test_metrics_are_added_and_subtracted() -> None:
    """Three documents of one model at two lengths: sums made by hand."""
    names = ("a", "b", "c")
    measured = concat(
        with_identity(
            Identity("own", row, row, 0, "non_repeated" if n > 4 else "train_length", n, 4),
            [sums("accuracy", names, right, np.full(3, 10))],
        )
        for row, n, right in (
            *(("Baseline", 4, [5, 6, 7]), ("Baseline", 8, [2, 3, 4])),
            *(("KNA", 4, [5, 5, 8]), ("KNA", 8, [4, 6, 8])),
        )
    )
    view, acc = View(measured), Metric("accuracy")
    lost = acc.at(1) - acc.at(2)
    assert view.estimate(lost.at(variant="Baseline")).value == pytest.approx(30)  # type: ignore[union-attr]
    gap = lost.at(variant="Baseline") - lost.at(variant="KNA")
    assert view.estimate(gap).value == pytest.approx(30)  # type: ignore[union-attr]
    assert view.estimate(0.5 * gap).value == pytest.approx(15)  # type: ignore[union-attr]
    assert view.estimate(acc.at(2) - acc.at(2, variant="KNA"), {"row": "KNA"}) is None
    assert view.estimate(acc.at(16, variant="KNA")) is None
    with pytest.raises(InputError, match="itself"):
        Claim("nothing", (acc.at(2) - acc.at(2, variant="Baseline")).at(variant="KNA"))


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        (Metric("acuracy").at(1), "did you mean accuracy"),
        (Metric("accuracy").at(1, variant="KNAA"), "no variant is called 'KNAA'"),
        (Metric("accuracy").at(8), "8 is no length of its Eval, which has 1, 2"),
    ],
)
def test_what_a_study_never_measures_is_refused_at_once(metric: Metric, said: str) -> None:
    """In a column and in a claim, which would vanish from the page without a word."""
    own: dict[str, Any] = {"variants": ["Baseline", "KNA"], "evals": [Eval(lengths=(1, 2))]}
    with pytest.raises(InputError, match=said):
        Study("own", question="?", columns={"x": metric}, **own)
    with pytest.raises(InputError, match=said):
        Study("own", question="?", claims=[Claim("x", metric - Metric("loss").at(2))], **own)
