"""What files decide: the folder of a study, a study file; and never which code runs."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from data.helpers import write_json
from normattn.errors import InputError
from normattn.lab.report.view import View
from normattn.lab.stats import Identity, concat, measurements, sums, with_identity
from normattn.lab.studies import COMMAND_STUDIES, find, find_typed
from normattn.lab.studies.base import Claim, Eval, Metric, Study, Variant
from normattn.lab.sweep.collect import refuse_changed_text
from normattn.lab.sweep.run import Request, canonical_json
from studies.conftest import FINISHED, Command, run
from studies.test_sweep import result, rows
from thorough import few

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
def folder(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a finished study, to work in, with a helper.py that leaves a mark if it is run."""
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    (out / "helper.py").write_text(HELPER)
    monkeypatch.chdir(out)
    return out


def _again(study: str, tiny: Path, out: Path) -> bytes:
    words = FINISHED if study == "keynorm" else RETROFIT
    assert run("reproduce", study, "--preset", tiny, *words, "--out", out) == 0
    return (out / "measurements.parquet").read_bytes()


@pytest.mark.parametrize("study", ["keynorm", "retrofit"])
def test_lost_files_are_made_again(study: str, tiny: Path, folder: Path, tmp_path: Path) -> None:
    out = folder if study == "keynorm" else tmp_path / "retrofit"
    whole = _again(study, tiny, out)
    records = {path: path.read_bytes() for path in out.glob("*/**/*.parquet")}
    lost = sorted(records)[0]
    for number, path in enumerate(records):
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


def test_what_evaluate_measures_is_not_on_the_page_of_a_study(folder: Path, tmp_path: Path) -> None:
    """Further windows and methods of its protocols, and a protocol that it does not have."""
    before, cell = result(folder), folder / "cells" / "KNA" / "seed0"
    own = {path.name for path in (cell / "evaluations").iterdir()}
    asked = ("evaluate", cell, "--max-windows=4", "--multiples=1,2,4", "--methods=unmodified,NTK")
    for protocols in ("train-length,last-segment", "by-position"):
        assert run(*asked, "--protocols", protocols) == 0
    beside = {p: p.stat().st_mtime_ns for p in (cell / "evaluations" / "beside").iterdir()}
    assert len(beside) == 2 * (1 + 3 + 1)
    assert not own & {path.name for path in beside}
    assert run(*asked, "--protocols", "by-position") == 0
    assert {path: path.stat().st_mtime_ns for path in beside} == beside
    assert run("report", folder) == 0
    assert result(folder) == before
    assert run("export", cell, tmp_path / "model") == 0
    page = tmp_path / "page"
    assert run("report", cell, "--out", page) == 0
    assert [row["row"] for row in rows(page)] == ["KNA", "KNA-NTK"]


# No code from folders
def _named(files: Iterable[Path], **names: str) -> None:
    for file in files:
        stored = json.loads(file.read_text())
        if isinstance(stored, dict):
            file.write_text(json.dumps({**stored, **names}))


def _job(folder: Path, named: str) -> None:
    _named(folder.glob("jobs/*/*/*.json"), study=named)


def _kind(folder: Path, named: str) -> None:
    _named([folder / "config.json"], kind=named)
    for jobs in folder.glob("jobs/*/*/cell.json"):
        jobs.unlink()
    shutil.rmtree(folder / "cells", ignore_errors=True)


def _measurements(folder: Path, named: str) -> None:
    for name in ("jobs", "cells"):
        shutil.rmtree(folder / name, ignore_errors=True)
    file = folder / measurements.FILE
    measurements.write(file, measurements.read(file).with_columns(pl.lit(named).alias("study")))


@pytest.mark.parametrize("place", [_job, _kind, _measurements])
def test_report_runs_no_file_that_a_folder_names(
    place: Callable[[Path, str], None], folder: Path, command: Command
) -> None:
    for spelled in (f"{folder}/helper.py", "helper.py", "../out/helper"):
        place(folder, spelled)
        assert "helper" in command("report", folder).last
        assert not (folder / "it-ran").exists()


def test_a_run_runs_no_file(folder: Path, tmp_path: Path, command: Command) -> None:
    """It takes its study from its command line."""
    _job(folder, f"{folder}/helper.py")
    job, place = next(folder.glob("jobs/*/*")), next(folder.glob("cells/*/seed0"))
    assert "cell.json" in command("_cell", "--study", "keynorm", job).last
    _named(place.rglob("*.json"), study="helper.py", kind="helper.py")
    for words in (
        ("evaluate", place),
        ("generate", place, "--prompt", "a"),
        ("export", place, tmp_path / "exported"),
        ("report", place, "--out", tmp_path / "page"),
    ):
        assert command(*words).code == 2, words
        assert not (folder / "it-ran").exists(), words
    (job / "cell.json").write_text("{}")
    assert command("_cell", "--study", "keynorm", job).last.endswith("names no study")
    for other in (folder / "jobs", Path("/jobs/seed0")):
        assert "is no directory of a run" in command("_cell", "--study", "keynorm", other).last


def test_a_file_that_is_typed_is_run(folder: Path, command: Command) -> None:
    assert (
        "STUDY" in command("report", folder, "--study", folder / "helper.py").last
    )  # It has none.
    assert (folder / "it-ran").exists()


FAILING = {
    "raises": ("x = 1\n\n\ndef ask():\n    return {}['lengths']\n\n\nask()\n", 5, "KeyError"),
    "lacks a module": ("import os\nimport no_such_module_here\n", 2, "no_such_module_here"),
    "ends the process": ("import sys\nsys.exit(7)\n", 2, "SystemExit"),
    "is not valid Python": ("x = 1\nSTUDY = Study(\n", 2, "never closed"),
    "fails below": ("import json\njson.loads('{')\n", 2, "JSONDecodeError"),
}


@pytest.mark.parametrize("case", FAILING)
def test_a_study_file_that_fails_is_named(case: str, tmp_path: Path, command: Command) -> None:
    text, line, reason = FAILING[case]
    path = tmp_path / "mine.py"
    path.write_text(text)
    sentence = command("reproduce", path, "--plan").last
    assert all(word in sentence for word in (str(path), f"line {line}", reason))


# Studies in files.
PAGE = Path(__file__).parents[2] / "docs" / "adding-a-study.md"


@pytest.fixture
def own_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    found = re.search(r"<!-- file: my_study.py -->\n```python\n(.*?)```", PAGE.read_text(), re.S)
    assert found is not None
    path = tmp_path / "my_study.py"
    path.write_text(found[1])
    return path


def test_a_study_of_ones_own_is_run_and_reported_again(
    own_study: Path, tiny: Path, tmp_path: Path, command: Command
) -> None:
    out, alone = tmp_path / "out", tmp_path / "alone"
    methods = ("--methods", "unmodified,YaRN")
    few = ("--set", "training.steps=5", "--seeds", "3", *methods, "--out", out)
    command.done("reproduce", "./my_study.py", "--preset", tiny, *few)
    table = json.loads((out / "table.json").read_text())
    found = {row["row"]: row for row in table["tables"]["table"]}
    assert [*found] == ["Baseline", "Baseline-YaRN", "KNA", "KNA-YaRN"]
    assert found["KNA"]["gap"]["seeds"] == [0, 1, 2]
    # A claim without a method is about the models as trained.
    assert table["claims"][0]["difference"] == found["KNA"]["gap"]
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
        assert "--study" in command("report", folder).last
        command.done("report", folder, "--study", "my_study.py")
        assert (folder / "table.md").read_text() == text


def test_a_study_imports_beside_it(own_study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (own_study.parent / "of_my_own.py").write_text('QUESTION = "Does my component help?"\n')
    named, count = re.subn(r"question=.*,", "question=QUESTION,", own_study.read_text())
    assert count == 1
    own_study.write_text("from of_my_own import QUESTION\n" + named)
    assert find_typed(str(own_study)).page.question == "Does my component help?"


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
    with pytest.raises(InputError, match="2 evals"):
        Study("two", "Which?", variants=["KNA"], evals=[Eval(lengths=(1,)), Eval(lengths=(2,))])


def test_a_variant_changes_settings_of_its_training(tiny: Path) -> None:
    study = Study(
        "wide",
        question="Does width matter?",
        variants=["KNA", Variant("KNA-short", "KNA", {"steps": 3})],
        evals=[Eval(lengths=(1, 2))],
        columns={"at L": Metric("accuracy").at(1)},
    )
    sweep = study.resolve(Request(preset=str(tiny), seeds=(0, 1)))
    configs = {run.name: run.training_config for run in sweep.runs}
    steps = {"KNA seed 0": 400, "KNA seed 1": 400, "KNA-short seed 0": 3, "KNA-short seed 1": 3}
    assert {name: config.steps for name, config in configs.items()} == steps
    assert len({str(config.model.score) for config in configs.values()}) == 1
    chosen = study.resolve(Request(preset=str(tiny), variants=("KNA-short", "QNA")))
    assert [(run.variant, run.training_config.steps) for run in chosen.runs] == [
        *(("KNA-short", 3), ("QNA", 400))
    ]


@pytest.mark.parametrize(
    "changes",
    [{"evaluation.multiples": [1, 4]}, {"evaluation": {"protocols": ["train_length"]}}],
)
def test_what_an_eval_decides_cannot_be_set(tiny: Path, changes: dict[str, Any]) -> None:
    study = Study("own", "Which?", variants=["KNA"], evals=[Eval(lengths=(1, 2))])
    with pytest.raises(InputError, match=r"evaluation\.\w+: reproduce own does not use"):
        study.resolve(Request(preset=str(tiny), changes=changes))


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
    measured = concat(
        with_identity(
            Identity("own", row, row, 0, "non_repeated" if n > 4 else "train_length", n, 4),
            [sums("accuracy", [*"abc"], right, np.full(3, 10))],
        )
        for row, n, right in (
            *(("Baseline", 4, [5, 6, 7]), ("Baseline", 8, [2, 3, 4])),
            *(("KNA", 4, [5, 5, 8]), ("KNA", 8, [4, 6, 8])),
        )
    )
    view, acc = View(measured), Metric("accuracy")
    lost = acc.at(1) - acc.at(2)
    gap = lost.at(variant="Baseline") - lost.at(variant="KNA")
    for metric, value in ((lost.at(variant="Baseline"), 30), (gap, 30), (0.5 * gap, 15)):
        found = view.estimate(metric)
        assert found is not None
        assert found.value == pytest.approx(value)
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


# Pages of published folders, changed, half trained or put together: a page or one sentence.
RESULTS = Path(__file__).parents[2] / "results"
TEXT, NORMS = RESULTS / "retrofit-base", RESULTS / "rmsnorm-laptop"


def _copy(place: Path, folder: Path) -> pl.DataFrame:
    folder.mkdir()
    for name in ("config.json", measurements.FILE):
        shutil.copy(place / name, folder)
    return measurements.read(folder / measurements.FILE)


def assert_reported_or_refused(folder: Path, command: Command) -> None:
    said = command("report", folder, "--out", folder / "again")
    assert said.last if said.code else (folder / "again" / "table.json").is_file()


CHANGES = {
    **{n: pl.lit("§ another").alias(n) for n in ("row", "protocol", "statistic", "method")},
    "training length": pl.lit(0, dtype=pl.Int64).alias("train_length"),
    "nothing counted": pl.lit(0.0).alias("of"),
    "tiny": pl.lit(5e-324).alias("sum"),
}


@pytest.mark.parametrize(
    "change", few(CHANGES, ("row", "training length", "nothing counted").__contains__)
)
def test_odd_measurements(change: str, tmp_path: Path, command: Command) -> None:
    folder = tmp_path / "changed"
    measured = _copy(TEXT, folder).with_columns(CHANGES[change])
    names = [column for column in measured.columns if column not in ("sum", "of")]
    measurements.write(
        folder / measurements.FILE, measured.unique(names, keep="first", maintain_order=True)
    )
    assert_reported_or_refused(folder, command)


@pytest.mark.parametrize(
    ("setting", "value"), [("changed", [1, 2]), ("asked", {"a": 1}), ("preset", [])]
)
def test_odd_settings(setting: str, value: object, tmp_path: Path, command: Command) -> None:
    folder = tmp_path / "changed"
    _copy(TEXT, folder)
    stored = json.loads((folder / "config.json").read_text())
    stored["config"][setting] = value
    (folder / "config.json").write_text(json.dumps(stored))
    assert_reported_or_refused(folder, command)


def test_a_bug_of_the_library_is_no_fault_of_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: object, **named: object) -> None:
        raise NameError("name 'nobody' is not defined")

    monkeypatch.setattr("normattn.lab.studies.base.context", broken)
    with pytest.raises(NameError, match="nobody"):
        run("report", TEXT)


def _trained() -> list[Path]:
    folders = sorted(file.parent for file in RESULTS.glob("*/" + measurements.FILE))
    kinds = {f: json.loads((f / "config.json").read_text())["kind"] for f in folders}
    return [folder for folder in folders if kinds[folder] not in COMMAND_STUDIES]


@pytest.mark.parametrize(
    "folder", few(_trained(), (TEXT, NORMS).__contains__), ids=lambda folder: folder.name
)
def test_what_is_training_still_stands_in_no_way(folder: Path, tmp_path: Path) -> None:
    """Loss curves are there before anything is measured, of one row or of all."""
    measured = measurements.read(folder / measurements.FILE)
    config = json.loads((folder / "config.json").read_text())["config"]
    training = pl.col("protocol") == "training"
    second = training | (pl.col("row") == measured["row"].unique(maintain_order=True)[-1])
    for name, kept in (("one", second), ("all", training)):
        said = ""
        try:
            find(measured["study"][0]).report(measured.filter(kept), tmp_path / name, config)
        except InputError as error:
            said = str(error)
        assert "nothing to report" in said or (tmp_path / name / "table.md").read_text()


def test_a_page_takes_its_sources_along(tmp_path: Path, command: Command) -> None:
    place, out = tmp_path / "place", tmp_path / "out"
    _copy(NORMS, place)
    (place / "corpus.json").write_text('{"fingerprints": ["7"], "sources": {"text": "1.0"}}')
    command.done("report", place, "--out", out)
    for name in ("config.json", "corpus.json"):
        assert json.loads((out / name).read_bytes()) == json.loads((place / name).read_bytes())
    assert (out / measurements.FILE).read_bytes() == (NORMS / measurements.FILE).read_bytes()
    stored = json.loads((out / "config.json").read_bytes())
    stored["config"]["preset"] = "mine"
    (out / "config.json").write_text(json.dumps(stored))
    assert "other settings" in command("report", place, "--out", out).last
    (place / "corpus.json").write_text('{"fingerprints": [7]}')
    assert "corpus.json" in command("report", place, "--out", tmp_path / "again").last


def test_several_folders_have_no_page(tmp_path: Path, command: Command) -> None:
    said = command("report", NORMS, RESULTS / "extend-smollm2", "--out", tmp_path / "out")
    assert "rmsnorm-laptop" in said.last
    assert not (tmp_path / "out").exists()


def test_trainings_on_a_text_that_changed_stand_on_no_page_together(tmp_path: Path) -> None:
    def trained(name: str, fingerprint: str, corpus: str = "texts") -> Path:
        config = {"config": {"data": {"corpus": corpus}, "seed": len(name)}}
        write_json(tmp_path / name / "config.json", config)
        record = {"fingerprint": fingerprint, "sources": {}}
        write_json(tmp_path / name / "corpus.json", record)
        return tmp_path / name

    runs = [trained("a", "7"), trained("bb", "7"), trained("other", "8", corpus="english")]
    now = {canonical_json({"corpus": "texts"}): "7"}
    refuse_changed_text([*runs, tmp_path / "missing"], now)
    with pytest.raises(InputError, match=r"the corpus now and what .*/other was trained on"):
        refuse_changed_text(runs, {canonical_json({"corpus": "english"}): "9"})
    with pytest.raises(InputError, match=r"/a and what .*/late was trained on differ"):
        refuse_changed_text([*runs, trained("late", "9")])
