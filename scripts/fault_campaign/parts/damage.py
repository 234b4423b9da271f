"""Every file that a command reads, damaged in every way: an error names it, or nothing changes."""

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
"""Suffixes of files that no command reads: figures, pages and locks."""


def run(campaign: Campaign) -> Iterator[Count]:
    """Every reading, file and damage in random order; in the tests only a few."""
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
        local = [each for each in READINGS if not each.foreign]
        readings = source.sample([each for each in local if each.judged], 1)
        readings += source.sample([each for each in local if not each.judged], 1)
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
    """Cases to run concurrently: some of each reading first, then all others."""
    remaining = []
    for trial in trials:
        cases = [(trial, *case) for case in trial.cases()]
        source.shuffle(cases)
        yield cases[:AT_ONCE]
        remaining += cases[AT_ONCE:]
    source.shuffle(remaining)
    for start in range(0, len(remaining) if every else 0, AT_ONCE):
        yield remaining[start : start + AT_ONCE]


@dataclass(frozen=True)
class _Undamaged:
    """The output of a work on the undamaged folder, and the files that it opens."""

    files: dict[str, str]
    opened: frozenset[str]


@dataclass(frozen=True)
class _Trial:
    """The works of a reading on a copy of its folder."""

    setting: Setting
    reading: Reading
    folder: Path

    @cached_property
    def base(self) -> Path:
        place = self.folder / "bases" / self.reading.name.replace(" ", "-")
        place.parent.mkdir(exist_ok=True)
        self.reading.make(self.setting, place)
        return place

    def scratch(self, slot: int) -> Path:
        """The folder of a copy and its output; concurrent trials have different slots."""
        return self.folder / "damaged" / str(slot)

    @cached_property
    def undamaged(self) -> list[_Undamaged]:
        """Results of the works on the undamaged folder; raises `RuntimeError` if one fails."""
        results = []
        note = self.folder / "opened"
        for number in range(len(self._works(0))):
            (end,) = race([self.work(0, None, "", number, random.Random(0), note)])
            if end.code:
                raise RuntimeError(f"{self.reading.name} as it is, {number}: {end.shown}")
            opened = frozenset(json.loads(note.read_text()))
            results.append(_Undamaged(self.judged(0), opened))
        return results

    def cases(self) -> Iterator[tuple[Path, str, int]]:
        """Each file and damage, with the works that open it, or with all if no open is seen."""
        paths = sorted(x.relative_to(self.base) for x in self.base.rglob("*") if x.is_file())
        damageable = [
            path
            for path in paths
            if (path.suffix not in WRITTEN or self.reading.at_most < 1000) and path.name != ".lock"
        ]
        for file in damageable[: self.reading.at_most]:
            numbers = [n for n, each in enumerate(self.undamaged) if str(file) in each.opened]
            for number in numbers or range(len(self.undamaged)):
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
        """A work on a fresh copy with a damaged `file`; `note` gets the files that it opens."""
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
        if not self.reading.judged:
            return True
        found, expected = self.judged(slot), self.undamaged[number].files
        excluded = lost and str(Path(self.base.name) / lost)
        return {k: v for k, v in found.items() if k != excluded} == {
            k: v for k, v in expected.items() if k != excluded
        }

    def judged(self, slot: int) -> dict[str, str]:
        return judged_files(self.scratch(slot), self.reading.judged)

    def executed(self, slot: int) -> bool:
        return bool(list(self.scratch(slot).rglob("executed")))


def _inside(work: Work, folder: Path) -> Work:
    """Run `work` in `folder`, where a pickle's payload would make a folder."""

    def inside() -> int:
        os.chdir(folder)
        return work()

    return inside


def _noting_files(work: Work, place: Path, note: Path) -> Work:
    """`work`, which writes the files below `place` that Python opens to `note`."""

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
