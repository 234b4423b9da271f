"""Every file that a command reads, damaged in every way: refused by name, or the same result."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fault_campaign.campaign import Campaign, Count
from fault_campaign.commands import Setting, judged_files, make_setting
from fault_campaign.limits import limited
from fault_campaign.processes import AT_ONCE, race
from fault_campaign.readings import READINGS, Reading, Work

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


WHATEVER_SIZE = ("folder", "missing")
WRITTEN = {".png", ".html", ".md", ".csv", ".lock"}
"""Figures, pages and locks: no command reads them."""


def run(campaign: Campaign) -> Iterator[Count]:
    """Every reading, every file, every damage, in an order drawn; in the tests a few of them."""
    setting = make_setting(campaign.folder / "setting", foreign=campaign.full)
    kept = Count(
        "a damaged file raises an error that names it (exit code 2), or the result is "
        "bit-identical, or a warning names the file and only that file differs"
    )
    typed = Count(
        "a damaged configuration or text file raises an error that names it (exit code 2), or is "
        "read"
    )
    executed = Count("nothing in a damaged file is executed")
    source = campaign.random
    readings = list(READINGS)
    if not campaign.full:
        near = [each for each in READINGS if not each.foreign]
        readings = source.sample([each for each in near if each.judged], 1)
        readings += source.sample([each for each in near if not each.judged], 1)
    trials = [_Trial(setting, each, campaign.folder) for each in readings]
    for cases in _groups(trials, source, campaign.full):
        if not campaign.has_time:
            break
        group = list(enumerate(cases))
        works = [
            trial.work(slot, file, kind, number, source)
            for slot, (trial, file, kind, number) in group
        ]
        for (slot, (trial, file, kind, number)), end in zip(group, race(works), strict=True):
            where = f"{trial.reading.name}: {file} {kind}, {number}"
            named = file.name in end.said or trial.base.name in end.said
            refused = end.code == 2 and end.orderly and named
            same = end.code == 0 and trial.is_kept(slot, number, file if named else None)
            count = kept if trial.reading.judged else typed
            count.check(same or refused, f"{where}: {end.shown}")
            executed.check(not trial.executed(slot), where)
    yield from (kept, typed, executed)


def _groups(
    trials: list[_Trial], source: random.Random, every: bool
) -> Iterator[list[tuple[_Trial, Path, str, int]]]:
    """Cases to be tried at the same time: some of each reading first, then all others."""
    rest = []
    for trial in trials:
        cases = [(trial, *case) for case in trial.cases()]
        source.shuffle(cases)
        yield cases[:AT_ONCE]
        rest += cases[AT_ONCE:]
    source.shuffle(rest)
    for start in range(0, len(rest) if every else 0, AT_ONCE):
        yield rest[start : start + AT_ONCE]


@dataclass(frozen=True)
class _Undamaged:
    """What a work leaves on the folder as it is, and which of its files it opens."""

    files: dict[str, str]
    opened: frozenset[str]


@dataclass(frozen=True)
class _Trial:
    """The works of a reading on a copy of its folder, always at the same place."""

    setting: Setting
    reading: Reading
    folder: Path

    @cached_property
    def base(self) -> Path:
        """The folder undamaged, made once."""
        place = self.folder / "bases" / self.reading.name.replace(" ", "-")
        place.parent.mkdir(exist_ok=True)
        self.reading.make(self.setting, place)
        return place

    def scratch(self, slot: int) -> Path:
        """Holds a copy and the output; of trials at the same time each has its own."""
        return self.folder / "damaged" / str(slot)

    @cached_property
    def undamaged(self) -> list[_Undamaged]:
        """What the works do on the folder as it is; `RuntimeError` where they fail."""
        found = []
        note = self.folder / "opened"
        for number in range(len(self._works(0))):
            (end,) = race([self.work(0, None, "", number, random.Random(0), note)])
            if end.code:
                raise RuntimeError(f"{self.reading.name} as it is, {number}: {end.shown}")
            opened = frozenset(json.loads(note.read_text()))
            found.append(_Undamaged(self.judged(0), opened))
        return found

    def cases(self) -> Iterator[tuple[Path, str, int]]:
        """Every file with every damage and the number of every work that opens the file.

        What no work opens, or only a library that Python does not see, is put before every one.
        """
        found = sorted(x.relative_to(self.base) for x in self.base.rglob("*") if x.is_file())
        read = [
            path
            for path in found
            if (path.suffix not in WRITTEN or self.reading.at_most < 1000) and path.name != ".lock"
        ]
        for file in read[: self.reading.at_most]:
            by = [n for n, each in enumerate(self.undamaged) if str(file) in each.opened]
            for number in by or range(len(self.undamaged)):
                for kind in DAMAGES:
                    if kind != "missing" or not any(map(file.match, self.reading.deletable)):
                        yield file, kind, number

    def work(
        self,
        slot: int,
        file: Path | None,
        kind: str,
        number: int,
        source: random.Random,
        note: Path | None = None,
    ) -> Work:
        """A work on a fresh copy whose `file` is damaged; `note` is told which files it opens."""
        place = self.scratch(slot) / self.base.name
        shutil.rmtree(self.scratch(slot), ignore_errors=True)
        shutil.copytree(self.base, place)
        if file is not None and ((place / file).stat().st_size or kind in WHATEVER_SIZE):
            DAMAGES[kind](place / file, source)
        work = self._works(slot)[number]
        if note is not None:
            work = _noting_files(work, place, note)
        return limited(_inside(work, self.scratch(slot)))

    def _works(self, slot: int) -> list[Work]:
        place = self.scratch(slot) / self.base.name
        return self.reading.works(self.setting, place, self.scratch(slot) / "out")

    def is_kept(self, slot: int, number: int, lost: Path | None) -> bool:
        """Whether the files that are judged have the same bits, but for one that is said lost."""
        if not self.reading.judged:
            return True
        found, wanted = self.judged(slot), self.undamaged[number].files
        own = lost and str(Path(self.base.name) / lost)
        return {k: v for k, v in found.items() if k != own} == {
            k: v for k, v in wanted.items() if k != own
        }

    def judged(self, slot: int) -> dict[str, str]:
        """The files that must have the same bits."""
        return judged_files(self.scratch(slot), self.reading.judged)

    def executed(self, slot: int) -> bool:
        """Whether the payload of a pickle did what it wants."""
        return bool(list(self.scratch(slot).rglob("executed")))


def _inside(work: Work, folder: Path) -> Work:
    """The payload makes a folder in the current directory, which is then below the scratch."""

    def inside() -> int:
        os.chdir(folder)
        return work()

    return inside


def _noting_files(work: Work, place: Path, note: Path) -> Work:
    """Every file below `place` that Python opens, by its place there."""

    def noted() -> int:
        opened: set[str] = set()

        def see(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "open" and isinstance(arguments[0], str | os.PathLike):
                path = Path(os.path.realpath(arguments[0]))
                if path.is_relative_to(place):
                    opened.add(str(path.relative_to(place)))

        sys.addaudithook(see)
        code = work()
        note.write_text(json.dumps(sorted(opened)))
        return code

    return noted
