"""The folders of files that commands read, and the commands that read them damaged."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fault_campaign.commands import Setting, work_of
from fault_campaign.kinds import CORPORA, KINDS, Kind
from fault_campaign.processes import race

Work = Callable[[], int]


@dataclass(frozen=True)
class Reading:
    """Works that read a folder, each of whose files is damaged in turn.

    `make` fills the folder; `works` read it and write to `out` next to it. `judged` are patterns,
    from their common parent, of files that must have the same bits; without any, the input is text
    that people write, so a work may also succeed. `foreign`: it needs the transformers model. At
    most `at_most` files are damaged. `deletable` are patterns of files that people may delete.
    """

    name: str
    make: Callable[[Setting, Path], object]
    works: Callable[[Setting, Path, Path], list[Work]]
    judged: tuple[str, ...] = ()
    foreign: bool = False
    at_most: int = 1000
    deletable: tuple[str, ...] = ()


def answered(call: Callable[[], object]) -> Work:
    """A library call that ends as a command does: with a sentence and an exit code."""

    def work() -> int:
        from normattn.cli.failures import exit_code_of

        try:
            call()
        except Exception as error:
            code = exit_code_of(error)
            if code is None:
                raise
            return code
        return 0

    return work


def ended_well(work: Work) -> None:
    """Run `work` in a fork, because it may start threads; raises `RuntimeError` if it fails."""
    (end,) = race([work])
    if end.code:
        raise RuntimeError(end.shown)


def _lines(*lines: list[object]) -> list[Work]:
    return [work_of([str(word) for word in line]) for line in lines]


def _train(setting: Setting, out: Path) -> list[object]:
    return ["train", "--preset", setting.preset, "--score", "KNA", "--out", out]


def _extend(model: object, text: object, out: Path) -> list[object]:
    options = ["--lengths", "16,32", "--methods", "PI", "--windows", "1", "--no-passkey"]
    return ["extend", model, "--text", text, *options, "--out", out]


def _of_run(setting: Setting, run: Path, out: Path) -> list[Work]:
    return _lines(
        ["report", run, "--out", out / "report"],
        ["generate", run, "--prompt", "word1", "--max-new-tokens", "4"],
        ["evaluate", run, "--multiples", "1,2", "--max-windows", "2"],
        ["inspect", run, "--out", out / "inspected"],
        ["export", run, out / "exported"],
    )


def _copy(of: Callable[[Setting], Path]) -> Callable[[Setting, Path], object]:
    return lambda setting, place: shutil.copytree(of(setting), place)


def _stopped(setting: Setting, place: Path) -> None:
    """An unfinished run, which resumes from its last checkpoint."""
    shutil.copytree(setting.run, place)
    (place / "status.json").unlink()


def _alone(file: Callable[[Setting], Path]) -> Callable[[Setting, Path], object]:
    def make(setting: Setting, place: Path) -> None:
        place.mkdir(parents=True)
        shutil.copy(file(setting), place / file(setting).name)

    return make


def _documents(name: str) -> Callable[[Setting, Path], object]:
    """The corpus in one file, with a document in each line or row."""

    def make(setting: Setting, place: Path) -> None:
        import json

        place.mkdir(parents=True)
        texts = [path.read_text() for path in sorted(setting.text.parent.iterdir())]
        if name.endswith(".jsonl"):
            lines = (json.dumps({"text": text}) + "\n" for text in texts)
            (place / name).write_text("".join(lines))
        else:
            import pyarrow
            from pyarrow import parquet

            parquet.write_table(pyarrow.table({"text": texts}), place / name)

    return make


def _gguf(setting: Setting, place: Path) -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    from hf.test_gguf import write

    place.mkdir(parents=True)
    letters = sorted(ByteLevel.alphabet())
    write(place / "tiny.gguf", [*letters, letters[0] + letters[1]])


def _cached(work: Work, cache: Path) -> Work:
    def cached() -> int:
        os.environ["NORMATTN_CACHE"] = str(cache)
        return work()

    return cached


def _of_kind(kind: Kind) -> list[Reading]:
    """Readings of a kind of training: its corpora, cache, finished run and stopped run."""

    def train(corpus: Path, out: Path) -> Work:
        return answered(lambda: kind.train(corpus, out))

    def corpus(setting: Setting) -> Path:
        return CORPORA[kind.corpora[0]](setting.folder / f"{kind.name}-corpus")

    def cache(setting: Setting, place: Path) -> None:
        ended_well(_cached(train(corpus(setting), place.parent / "made"), place))
        shutil.rmtree(place.parent / "made")

    def run(setting: Setting, place: Path) -> None:
        ended_well(train(corpus(setting), place))

    def stopped(setting: Setting, place: Path) -> None:
        run(setting, place)
        (place / "status.json").unlink()

    def looked_into(setting: Setting, place: Path, out: Path) -> list[Work]:
        lines: list[list[object]] = [["inspect", place, "--out", out / "inspected"]]
        return _lines(*lines, *([["export", place, out / "exported"]] if kind.exported else []))

    trained = ("metrics.jsonl", "model/*")
    readings = [
        Reading(f"{kind.name} run", run, looked_into, ("out/exported/**/*",)),
        Reading(f"stopped {kind.name} run", stopped,
                lambda s, place, out: [train(corpus(s), place)],
                tuple(f"*/{name}" for name in trained)),
        Reading(f"{kind.name} cache", cache,
                lambda s, place, out: [_cached(train(corpus(s), out / "run"), place)],
                tuple(f"out/run/{name}" for name in trained)),
    ]  # fmt: skip
    for name in kind.corpora:
        readings.append(
            Reading(name, lambda s, place, name=name: CORPORA[name](place),  # type: ignore[misc]
                    lambda s, place, out: [train(_inside(place), out / "run")], at_most=6)
        )  # fmt: skip
    return readings


def _inside(place: Path) -> Path:
    """The corpus path in a folder: its one corpus file, or the folder itself."""
    files = sorted(place.glob("*.npz")) + sorted(place.glob("*.jsonl"))
    return files[0] if files else place


def _sweep(setting: Setting, place: Path) -> None:
    line = ["reproduce", "keynorm", "--preset", setting.preset, "--variants", "Baseline"]
    options = ["--methods", "as is", "--seeds", "1", "--jobs", "1", "--out", place]
    ended_well(*_lines([*line, *options]))


def _of_sweep(setting: Setting, place: Path, out: Path) -> list[Work]:
    return [
        *_lines(["report", place, "--out", out / "report"]),
        answered(lambda: _again(setting, place, out)),
    ]


def _again(setting: Setting, place: Path, out: Path) -> None:
    """Do what `reproduce` does, in this process: each unfinished run, then the page."""
    from normattn.io import write_json
    from normattn.lab.studies import find
    from normattn.lab.sweep.run import Request
    from normattn.lab.sweep.runner import _open, is_done, run_child

    study = find("keynorm")
    request = Request(
        preset=str(setting.preset), variants=("Baseline",), methods=("as is",), seeds=(0,),
        out=place,
    )  # fmt: skip
    sweep = study.resolve(request)
    with _open(sweep).lock():
        for run in sweep.runs:
            if not is_done(sweep, run):
                paths = sweep.paths(run)
                fields = run.model_dump(mode="json")
                write_json(paths.settings, {"study": study.name, **fields})
                run_child(paths.job, study)
        config = sweep.config.model_dump(mode="json")
        study.report(study.measurements(place), out / "again", config)


READINGS = (
    Reading("run", _copy(lambda s: s.run), _of_run,
            ("out/report/table.*", "out/exported/**/*"), deletable=("evaluations/*",)),
    Reading("stopped run", _stopped, lambda s, run, out: _lines(_train(s, run)),
            ("*/metrics.jsonl", "*/model/*", "*/tokeniser.json")),
    Reading("token cache", _copy(lambda s: s.folder / "cache"),
            lambda s, cache, out: [_cached(_lines(_train(s, out / "run"))[0], cache)],
            ("out/run/metrics.jsonl", "out/run/model/*", "out/run/tokeniser.json")),
    Reading("preset", _alone(lambda s: s.preset),
            lambda s, place, out: _lines(["train", "--preset", place / s.preset.name,
                                          "--out", out])),
    Reading("settings", _alone(lambda s: s.run / "config.json"),
            lambda s, place, out: _lines(["train", place / "config.json", "--out", out])),
    Reading("corpus", _copy(lambda s: s.text.parent),
            lambda s, place, out: _lines([*_train(s, out), "--corpus", place]), at_most=2),
    Reading("documents in JSON lines", _documents("documents.jsonl"),
            lambda s, place, out: _lines([*_train(s, out), "--corpus", place])),
    Reading("documents in Parquet", _documents("documents.parquet"),
            lambda s, place, out: _lines([*_train(s, out), "--corpus", place])),
    *(reading for kind in KINDS for reading in _of_kind(kind)),
    Reading("study", _sweep, _of_sweep, ("out/*/table.*",)),
    Reading("foreign model", _copy(lambda s: s.model),
            lambda s, place, out: _lines(_extend(place, s.text, out)), foreign=True),
    Reading("GGUF model", _gguf,
            lambda s, place, out: _lines(_extend(place / "tiny.gguf", s.text, out)), foreign=True),
    Reading("text", _alone(lambda s: s.text),
            lambda s, place, out: _lines(_extend(s.model, place / s.text.name, out)),
            foreign=True),
    Reading("records of extend",
            lambda s, place: ended_well(*_lines(_extend(s.model, s.text, place))),
            lambda s, place, out: _lines(_extend(s.model, s.text, place),
                                         ["report", place, "--out", out]), foreign=True),
)  # fmt: skip
