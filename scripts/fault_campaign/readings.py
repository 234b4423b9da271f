"""Every folder of files that a command reads, and the work on it that damage may come upon."""

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

    `make` fills the folder; `works` read it, with their output in a second one, `out`, beside it.
    `judged` are patterns, from the folder that holds both, of files that must have the same bits.
    With none, what people write themselves is read: another text is another input, and a work that
    ends well keeps the promise too. `foreign`: it needs the model of transformers. Of many files of
    one kind `at_most` so many are damaged. `deletable` are patterns of files that people may
    delete, to have a result without them: those are not taken away.
    """

    name: str
    make: Callable[[Setting, Path], object]
    works: Callable[[Setting, Path, Path], list[Work]]
    judged: tuple[str, ...] = ()
    foreign: bool = False
    at_most: int = 1000
    deletable: tuple[str, ...] = ()


def answered(call: Callable[[], object]) -> Work:
    """A call of the library that ends as a command would: with a sentence and an exit status."""

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
    """Do it in a process of its own, which may start threads; `RuntimeError` where it fails."""
    (end,) = race([work])
    if end.code:
        raise RuntimeError(end.shown)


def _lines(*lines: list[object]) -> list[Work]:
    return [work_of([str(word) for word in line]) for line in lines]


def _train(setting: Setting, out: Path) -> list[object]:
    return ["train", "--preset", setting.preset, "--score", "KNA", "--out", out]


def _extend(model: object, text: object, out: Path) -> list[object]:
    asked = ["--lengths", "16,32", "--methods", "PI", "--windows", "1", "--no-passkey"]
    return ["extend", model, "--text", text, *asked, "--out", out]


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
    """A run whose end is not on record: it resumes from its last checkpoint."""
    shutil.copytree(setting.run, place)
    (place / "status.json").unlink()


def _alone(file: Callable[[Setting], Path]) -> Callable[[Setting, Path], object]:
    """A folder with one file."""

    def make(setting: Setting, place: Path) -> None:
        place.mkdir(parents=True)
        shutil.copy(file(setting), place / file(setting).name)

    return make


def _documents(name: str) -> Callable[[Setting, Path], object]:
    """The corpus in one file, a document a line or a row."""

    def make(setting: Setting, place: Path) -> None:
        import json

        place.mkdir(parents=True)
        texts = [each.read_text() for each in sorted(setting.text.parent.iterdir())]
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
    """With a cache of its own."""

    def cached() -> int:
        os.environ["NORMATTN_CACHE"] = str(cache)
        return work()

    return cached


def _of_kind(kind: Kind) -> list[Reading]:
    """Corpora, cache, finished and stopped run of trainings that no command line names."""

    def train(corpus: Path, out: Path) -> Work:
        return answered(lambda: kind.train(corpus, out))

    def corpus(setting: Setting) -> Path:
        """The first of its corpora, whole, for runs and caches."""
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
    found = [
        Reading(f"{kind.name} run", run, looked_into, ("out/exported/**/*",)),
        Reading(f"stopped {kind.name} run", stopped,
                lambda s, place, out: [train(corpus(s), place)],
                tuple(f"*/{name}" for name in trained)),
        Reading(f"{kind.name} cache", cache,
                lambda s, place, out: [_cached(train(corpus(s), out / "run"), place)],
                tuple(f"out/run/{name}" for name in trained)),
    ]  # fmt: skip
    for name in kind.corpora:
        found.append(
            Reading(name, lambda s, place, name=name: CORPORA[name](place),  # type: ignore[misc]
                    lambda s, place, out: [train(_inside(place), out / "run")], at_most=6)
        )  # fmt: skip
    return found


def _inside(place: Path) -> Path:
    """What is asked for: the folder, or the one file in it that is a corpus by itself."""
    alone = sorted(place.glob("*.npz")) + sorted(place.glob("*.jsonl"))
    return alone[0] if alone else place


def _sweep(setting: Setting, place: Path) -> None:
    line = ["reproduce", "keynorm", "--preset", setting.preset, "--variants", "Baseline"]
    asked = ["--methods", "as is", "--seeds", "1", "--jobs", "1", "--out", place]
    ended_well(*_lines([*line, *asked]))


def _of_sweep(setting: Setting, place: Path, out: Path) -> list[Work]:
    return [
        *_lines(["report", place, "--out", out / "report"]),
        answered(lambda: _again(setting, place, out)),
    ]


def _again(setting: Setting, place: Path, out: Path) -> None:
    """What `reproduce` does, in this process: each run that is not done, then the page."""
    from normattn.lab.studies import find
    from normattn.lab.sweep.paths import write_if_changed
    from normattn.lab.sweep.run import Request
    from normattn.lab.sweep.runner import _open, is_done, run_child

    study = find("keynorm")
    asked = Request(
        preset=str(setting.preset), variants=("Baseline",), methods=("as is",), seeds=(0,),
        out=place,
    )  # fmt: skip
    sweep = study.resolve(asked)
    with _open(sweep).lock():
        for run in sweep.runs:
            if not is_done(sweep, run):
                paths = sweep.paths(run)
                fields = run.model_dump(mode="json")
                write_if_changed(paths.settings, {"study": study.name, **fields})
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
