"""Every file that a command reads, damaged in every way: refused by name, or the same result."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from faults.campaign import Campaign, Count
from faults.commands import Setting, judged_files, make_setting, work_of
from faults.limits import limited
from faults.processes import Ended, race

Damage = Callable[[Path, random.Random], object]


def _flip(path: Path, source: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(3):
        content[source.randrange(len(content))] ^= 1 << source.randrange(8)
    path.write_bytes(bytes(content))


def _folder(path: Path, source: random.Random) -> None:
    path.unlink()
    path.mkdir()


class _Payload:
    def __reduce__(self) -> Any:
        return os.mkdir, ("executed",)


def _other_type(path: Path, source: random.Random) -> None:
    try:
        value = json.loads(path.read_text())
        key = source.choice(list(value))
        value[key] = [str(value[key])]
        path.write_text(json.dumps(value))
    except (ValueError, TypeError, AttributeError, IndexError):
        path.write_text("[1]")


DAMAGES: dict[str, Damage] = {
    "cut": lambda path, _: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "emptied": lambda path, _: path.write_bytes(b""),
    "bit-flipped": _flip,
    "deep": lambda path, _: path.write_text("[" * 100_000),
    "long integer": lambda path, _: path.write_text('{"step": ' + "9" * 5000 + "}\n"),
    "wrong type": _other_type,
    "folder": _folder,
    "missing": lambda path, _: path.unlink(),
    "pickle": lambda path, _: path.write_bytes(pickle.dumps(_Payload())),
}


@dataclass(frozen=True)
class Reading:
    """Command lines that read a folder, each of whose files is damaged in turn.

    `make` fills the folder, `lines` are the commands on it, with their output in a second one.
    `judged` are files of the output, or of the folder itself (`inside`), that must have the same
    bits. With none, what people write themselves is read: another text is another input, and a
    command that does its work keeps the promise as well.
    """

    name: str
    make: Callable[[Setting, Path], object]
    lines: Callable[[Setting, Path, Path], list[list[object]]]
    judged: tuple[str, ...] = ()
    inside: bool = False
    foreign: bool = False


MODEL = ("metrics.jsonl", "model/*", "tokeniser.json")


def _train(setting: Setting, out: Path) -> list[object]:
    return ["train", "--preset", setting.preset, "--score", "KNA", "--out", out]


def _of_run(setting: Setting, run: Path, out: Path) -> list[list[object]]:
    return [
        ["report", run, "--out", out / "report"],
        ["generate", run, "--prompt", "word1", "--max-new-tokens", "4"],
        ["evaluate", run, "--multiples", "1,2", "--max-windows", "2"],
        ["inspect", run, "--out", out / "inspected"],
        ["export", run, out / "exported"],
    ]


def _extend(model: object, text: object, out: Path) -> list[object]:
    asked = ["--lengths", "16,32", "--methods", "PI", "--windows", "1", "--no-passkey"]
    return ["extend", model, "--text", text, *asked, "--out", out]


def _stopped(setting: Setting, place: Path) -> None:
    """A run whose end is not on record: it goes on from its last checkpoint."""
    shutil.copytree(setting.run, place)
    (place / "status.json").unlink()


def _with_records(setting: Setting, place: Path) -> None:
    (end,) = race([work_of([str(each) for each in _extend(setting.model, setting.text, place)])])
    if end.code:
        raise RuntimeError(end.shown)


def _alone(file: Callable[[Setting], Path]) -> Callable[[Setting, Path], object]:
    """A folder with one file."""

    def make(setting: Setting, place: Path) -> None:
        place.mkdir(parents=True)
        shutil.copy(file(setting), place / file(setting).name)

    return make


READINGS = (
    Reading("run", lambda s, place: shutil.copytree(s.run, place), _of_run,
            ("report/table.*", "exported/**/*")),
    Reading("stopped run", _stopped, lambda s, run, out: [_train(s, run)], MODEL, inside=True),
    Reading("token cache", lambda s, place: shutil.copytree(s.folder / "cache", place),
            lambda s, cache, out: [_train(s, out / "run")],
            tuple(f"run/{name}" for name in MODEL)),
    Reading("preset", _alone(lambda s: s.preset),
            lambda s, place, out: [["train", "--preset", place / s.preset.name, "--out", out]]),
    Reading("settings", _alone(lambda s: s.run / "config.json"),
            lambda s, place, out: [["train", place / "config.json", "--out", out]]),
    Reading("corpus", lambda s, place: shutil.copytree(s.folder / "corpus", place),
            lambda s, place, out: [[*_train(s, out), "--corpus", place]]),
    Reading("foreign model", lambda s, place: shutil.copytree(s.model, place),
            lambda s, place, out: [_extend(place, s.text, out)], foreign=True),
    Reading("text", _alone(lambda s: s.text),
            lambda s, place, out: [_extend(s.model, place / s.text.name, out)], foreign=True),
    Reading("records of extend", _with_records,
            lambda s, place, out: [_extend(s.model, s.text, place),
                                   ["report", place, "--out", out]], foreign=True),
)  # fmt: skip


WHATEVER_SIZE = ("folder", "missing")


def run(campaign: Campaign) -> Iterator[Count]:
    """Every reading, every file, every damage; in the tests a few drawn from them."""
    setting = make_setting(campaign.folder / "setting", foreign=campaign.full)
    kept = Count("a damaged file is refused by name with exit 2, or the result has the same bits")
    typed = Count("a damaged file that people write is refused by name with exit 2, or is read")
    executed = Count("nothing in a damaged file is executed")
    source = campaign.random
    readings = [each for each in READINGS if campaign.full or not each.foreign]
    trials = [_Trial(setting, each, campaign.folder, campaign.full) for each in readings]
    cases = [(trial, file, kind) for trial in trials for file in trial.files() for kind in DAMAGES]
    for trial, file, kind in cases if campaign.full else source.sample(cases, 8):
        if not campaign.has_time:
            break
        reading, expected = trial.reading, trial.undamaged
        found = trial.of(file, kind, source)
        count = kept if reading.judged else typed
        for number, (end, files) in enumerate(found):
            same = end.code == 0 and (not reading.judged or files == expected[number][1])
            named = file.name in end.said or trial.base.name in end.said
            refused = end.code == 2 and end.orderly and named
            count.check(same or refused, f"{reading.name}: {file} {kind}, {number}: {end.shown}")
        executed.check(not trial.executed(), f"{reading.name}: {file} {kind}")
    yield from (kept, typed, executed)


@dataclass(frozen=True)
class _Trial:
    """The commands of a reading on a copy of its folder, always at the same place."""

    setting: Setting
    reading: Reading
    folder: Path
    every: bool

    @cached_property
    def base(self) -> Path:
        """The folder undamaged, made once."""
        place = self.folder / "bases" / self.reading.name.replace(" ", "-")
        place.parent.mkdir(exist_ok=True)
        self.reading.make(self.setting, place)
        return place

    @cached_property
    def undamaged(self) -> list[tuple[Ended, dict[str, str]]]:
        """What the commands do on the folder as it is; `RuntimeError` where they fail."""
        found = self.of(None, "", random.Random(0))
        for end, _ in found:
            if end.code:
                raise RuntimeError(f"{self.reading.name} as it is {end.shown}")
        return found

    def files(self) -> list[Path]:
        """The files that commands read: no figures, no pages, and no locks."""
        found = sorted(x.relative_to(self.base) for x in self.base.rglob("*") if x.is_file())
        written = {".png", ".html", ".md", ".csv", ".lock"}
        return [path for path in found if path.suffix not in written and path.name != ".lock"]

    def of(
        self, file: Path | None, kind: str, source: random.Random
    ) -> list[tuple[Ended, dict[str, str]]]:
        """How each command ends, and the files it is judged by; each on a fresh copy."""
        scratch = self.folder / "damaged"
        place, out = scratch / self.base.name, scratch / "out"
        lines = self.reading.lines(self.setting, place, out)
        found = []
        for line in lines if self.every else lines[:1]:
            shutil.rmtree(scratch, ignore_errors=True)
            shutil.copytree(self.base, place)
            if file is not None and ((place / file).stat().st_size or kind in WHATEVER_SIZE):
                DAMAGES[kind](place / file, source)
            work = self._in_scratch(work_of([str(word) for word in line]), place)
            (end,) = race([limited(work)])
            judged = judged_files(place if self.reading.inside else out, self.reading.judged)
            found.append((end, judged))
        return found

    def executed(self) -> bool:
        """Whether the payload of a pickle did what it wants."""
        return bool(list((self.folder / "damaged").rglob("executed")))

    def _in_scratch(self, work: Callable[[], int], place: Path) -> Callable[[], int]:
        """The payload makes a folder in the current directory, which is then below the scratch."""

        def inside() -> int:
            os.chdir(place.parent)
            if self.reading.name == "token cache":
                os.environ["NORMATTN_CACHE"] = str(place)
            return work()

        return inside
