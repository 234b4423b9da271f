"""Every file that a command reads, damaged in every way: refused by name, or the same result."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from faults.campaign import Campaign, Count
from faults.commands import judged_files, make_setting, work_of
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


def run(campaign: Campaign) -> Iterator[Count]:
    """Generation, evaluation and reports of a run, each of whose files is damaged in turn."""
    setting = make_setting(campaign.folder / "setting", foreign=False)
    kept = Count("a damaged file is refused by name with exit 2, or the result has the same bits")
    executed = Count("nothing in a damaged file is executed")
    files = sorted(path for path in setting.run.rglob("*") if path.is_file())
    files = [path for path in files if "figures" not in path.parts and path.name != ".lock"]
    cases = [(file, kind) for file in files for kind in DAMAGES]
    source = campaign.random
    if not campaign.full:
        cases = source.sample(cases, 5)
    scratch = campaign.folder / "damaged"
    _, expected = _results(setting.run, scratch, campaign.full)
    for file, kind in cases:
        place = scratch / "run"
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.copytree(setting.run, place)
        target = place / file.relative_to(setting.run)
        if target.stat().st_size or kind in ("folder", "missing"):
            DAMAGES[kind](target, source)
        ends, found = _results(place, scratch, campaign.full)
        for number, end in enumerate(ends):
            same = end.code == 0 and found[number] == expected[number]
            refused = end.code == 2 and bool(end.sentences) and "Traceback" not in end.said
            held = same or (refused and target.parent.name in end.said)
            kept.check(held, f"{file.relative_to(setting.run)} {kind}, {number}: {end.shown}")
        executed.check(not list(campaign.folder.rglob("executed")), f"{file.name} {kind}")
    yield kept
    yield executed


def _results(run: Path, scratch: Path, full: bool) -> tuple[list[Ended], list[dict[str, str]]]:
    """How commands end on a run, and what they leave."""
    scratch.mkdir(parents=True, exist_ok=True)
    report, record = scratch / "report", scratch / "said"
    lines = [
        ["report", str(run), "--out", str(report)],
        ["generate", str(run), "--prompt", "word1", "--max-new-tokens", "4"],
        ["export", str(run), str(record)],
    ]
    # Exporting reads the same files and costs as much as all the rest.
    ends = race([limited(work_of(line)) for line in (lines if full else lines[:2])])
    return ends, [judged_files(report, ("table.*",)), {}, judged_files(record, ("**/*",))]
