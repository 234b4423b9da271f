"""Commands interrupted at random moments, and their uninterrupted output."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fault_campaign.commands import Command, Setting, judged_files, work_of
from fault_campaign.processes import after_seconds, before_event, counting, race


@dataclass(frozen=True)
class Measured:
    """An uninterrupted run of a command: its files, audit events and seconds."""

    command: Command
    files: dict[str, str]
    events: int
    seconds: float


def measure(setting: Setting, command: Command) -> Measured:
    """Run a command undisturbed; raises `RuntimeError` if it fails."""
    out = setting.place(f"whole-{command.name}")
    note = setting.folder / "events"
    work = counting(work_of(command.line(setting, out)), lambda n: _write(note, n))
    before = time.monotonic()
    (end,) = race([work])
    if end.code != 0:
        raise RuntimeError(f"{command.name} {end.shown}")
    files = judged_files(out, command.judged)
    return Measured(command, files, int(note.read_text()), time.monotonic() - before)


@dataclass(frozen=True)
class Trial:
    """A command, interrupted at a moment drawn beforehand."""

    measured: Measured
    out: Path
    moment: str
    work: Callable[[], int]


def draw(
    setting: Setting,
    commands: Sequence[Measured],
    count: int,
    kinds: Sequence[signal.Signals],
    chance: random.Random,
) -> list[Trial]:
    """`count` trials over the commands by their shares, half at an event and half after a time."""
    shares = [measured for measured in commands for _ in range(measured.command.share)]
    trials = []
    for number in range(count):
        measured = shares[number % len(shares)]
        out = setting.place(f"{measured.command.name}-{chance.getrandbits(60):x}")
        work = work_of(measured.command.line(setting, out))
        kind = chance.choice(list(kinds))
        if chance.random() < 0.5:
            at = chance.randint(1, measured.events)
            moment = f"{kind.name} before event {at} of {measured.events}"
            work = before_event(work, at, _sending(kind))
        else:
            seconds = chance.random() * measured.seconds
            moment = f"{kind.name} after {seconds:.3f} s"
            work = after_seconds(work, seconds, kind)
        trials.append(Trial(measured, out, f"{measured.command.name}, {moment}", work))
    return trials


def goes_on(setting: Setting, trial: Trial) -> str | None:
    """Run the command again; return what is wrong, or None. It may refuse a complete output."""
    command = trial.measured.command
    (end,) = race([work_of(command.line(setting, trial.out))])
    files = judged_files(trial.out, command.judged)
    refused = end.code == 2 and end.orderly and "is not empty" in end.said
    shutil.rmtree(trial.out, ignore_errors=True)
    if end.code != 0 and not refused:
        return f"{trial.moment}; again it {end.shown}"
    if command.deterministic and files != trial.measured.files:
        names = {*files.items()} ^ {*trial.measured.files.items()}
        return f"{trial.moment}; again it gave other files: {sorted(names)[:2]}"
    if set(files) != set(trial.measured.files):
        return f"{trial.moment}; again it gave {sorted(set(files) ^ set(trial.measured.files))}"
    return None


def _sending(kind: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), kind)


def _write(note: Path, number: int) -> None:
    note.write_text(str(number))
