"""A full disk at any write of any command: one sentence, exit code 2, nothing half-written.

A full campaign preloads a library into every process, which lets the n-th write to a file fail with
ENOSPC (this needs a C compiler). The tests use the system's limit on file sizes, which also applies
to libraries in Rust.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fault_campaign.campaign import Campaign, Count
from fault_campaign.commands import COMMANDS, Command, Setting, judged_files, make_setting, work_of
from fault_campaign.processes import Ended, in_groups, race

SCRIPTS = Path(__file__).parents[2]
TRIALS_OF_A_SHARE = 12
_FULL = "a command on a full disk ends with exit code 2 and one sentence, or is done"
_FELT = "where nothing can be written, a command ends with exit code 2"
_HALF = "files left behind on a full disk are complete"


def run(campaign: Campaign) -> Iterator[Count]:
    """Limit file sizes; in a full campaign also let writes fail."""
    said, whole, felt = Count(_FULL), Count(_HALF), Count(_FELT)
    setting = make_setting(campaign.folder / "setting", foreign=campaign.full)
    names = {"train", "extend", "export", "report"} if campaign.full else {"train"}
    for command in (each for each in COMMANDS if each.name in names):
        if not campaign.has_time:
            break
        ends = _by_size(setting, command, campaign.full, said, whole)
        felt.check(ends[0].code == 2, f"{command.name}: {ends[0].shown}")
    if campaign.full and campaign.has_time:
        _by_preload(campaign, setting, said, whole)
    yield from (said, whole, felt)


def _by_size(
    setting: Setting, command: Command, every: bool, said: Count, whole: Count
) -> list[Ended]:
    """Limit file sizes to 0, and to one byte less than each file of a complete output."""
    good = setting.place(f"good-{command.name}")
    race([work_of(command.line(setting, good))])
    expected = judged_files(good, command.judged)
    sizes = sorted({path.stat().st_size for path in good.rglob("*") if path.is_file()})
    limits = [0, *(size - 1 for size in sizes if size > 1)]
    limits = limits if every else limits[:: max(1, len(limits) // 3)]
    limits = limits[:: max(1, len(limits) // (8 * command.share))]
    outs = [setting.place(f"{command.name}-limit-{limit}") for limit in limits]
    works = [
        _limited(limit, work_of(command.line(setting, out)))
        for limit, out in zip(limits, outs, strict=True)
    ]
    ends = list(in_groups(works))
    for limit, out, end in zip(limits, outs, ends, strict=True):
        where = f"{command.name}, files up to {limit} bytes"
        judge(command, out, expected, end, where, said, whole)
    return ends


def judge(
    command: Command,
    out: Path,
    expected: dict[str, str],
    end: Ended,
    where: str,
    said: Count,
    whole: Count,
) -> None:
    """Check for one sentence, and that existing output files are complete."""
    held = end.code == 0 or (end.code == 2 and end.orderly)
    said.check(held, f"{where}: {end.shown}")
    if not command.deterministic:
        return
    found = judged_files(out, command.judged)
    grown = {name for name in found if name.endswith(".jsonl")}  # appended line by line
    wrong = [name for name in found.keys() - grown if found[name] != expected.get(name)]
    whole.check(not wrong, f"{where}: {wrong}")


def _limited(size: int, work: Callable[[], int]) -> Callable[[], int]:
    def limited() -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        return work()

    return limited


def _by_preload(campaign: Campaign, setting: Setting, said: Count, whole: Count) -> None:
    """Run `_preloaded` in a new process, because a library is preloaded when a program starts."""
    library = campaign.folder / "full_disk.so"
    source = SCRIPTS / "fault_campaign" / "full_disk.c"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True
    )
    record, left = campaign.folder / "preloaded.json", campaign.until - time.monotonic()
    program = [sys.executable, "-m", "fault_campaign.parts.disk"]
    subprocess.run(
        [*program, str(setting.folder), str(library), str(record), str(left)],
        check=True,
        cwd=SCRIPTS,
        env={
            **os.environ,
            "LD_PRELOAD": str(library),
            "PYTHONPATH": os.pathsep.join([str(SCRIPTS.parent / "src"), str(SCRIPTS)]),
        },
    )
    for name, trials, failures in json.loads(record.read_text()):
        count = said if name == _FULL else whole
        count.trials += trials
        count.failures += failures


def _preloaded(setting: Setting, library: Path, record: Path, seconds: float) -> None:
    """Let each write of each command fail once, up to the command's share of trials."""
    disk = ctypes.CDLL(str(library))
    disk.faults_writes.restype = ctypes.c_long
    said, whole = Count(_FULL), Count(_HALF)
    until = time.monotonic() + seconds
    for command in COMMANDS:
        if command.name in ("generate", "tokenise"):
            continue
        good = setting.place(f"preloaded-{command.name}")
        note = setting.folder / "writes"
        race([_noting(disk, note, work_of(command.line(setting, good)))])
        writes, expected = int(note.read_text()), judged_files(good, command.judged)
        step = max(1, writes // (TRIALS_OF_A_SHARE * command.share))
        numbers = range(1, writes + 1, step)
        outs = [setting.place(f"{command.name}-write-{number}") for number in numbers]
        works = [
            _failing(disk, number, work_of(command.line(setting, out)))
            for number, out in zip(numbers, outs, strict=True)
        ]
        for number, out, end in zip(numbers, outs, in_groups(works), strict=True):
            where = f"{command.name}, full at write {number} of {writes}"
            judge(command, out, expected, end, where, said, whole)
            if time.monotonic() > until:
                break
    counts = [(each.promise, each.trials, each.failures) for each in (said, whole)]
    record.write_text(json.dumps(counts))


def _noting(disk: ctypes.CDLL, note: Path, work: Callable[[], int]) -> Callable[[], int]:
    def noted() -> int:
        disk.faults_disk_full_at(0)
        code = work()
        writes = disk.faults_writes()
        note.write_text(str(writes))
        return code

    return noted


def _failing(disk: ctypes.CDLL, number: int, work: Callable[[], int]) -> Callable[[], int]:
    def failing() -> int:
        disk.faults_disk_full_at(number)
        return work()

    return failing


if __name__ == "__main__":
    place, library, record = map(Path, sys.argv[1:4])
    _preloaded(Setting(place, place), library, record, float(sys.argv[4]))
