"""SIGKILL in the middle of a study, of its parent alone or of every process, and at once again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from faults.campaign import Campaign, Count
from faults.commands import judged_files
from normattn.studies import names

FULL_ONLY = True
TABLES = ("table.md", "table.csv")
LIMIT_SECONDS = 1800.0


def run(campaign: Campaign) -> Iterator[Count]:
    """Every study's smoke preset, killed in both ways."""
    same = Count("a study killed anywhere and started again at once gives the same tables")
    chance = campaign.random
    for study in names():
        whole = campaign.folder / f"{study}-whole"
        before = time.monotonic()
        process = _start(study, whole)
        if process.wait(LIMIT_SECONDS) != 0:
            same.failed(f"{study} as it is ended with {process.returncode}")
            continue
        seconds = time.monotonic() - before
        expected = judged_files(whole, TABLES)
        for every in (False, True):
            out = campaign.folder / f"{study}-{every}"
            moment = chance.uniform(0.2, 0.9) * seconds
            killed = _start(study, out)
            time.sleep(moment)
            _kill(killed, every)
            again = _start(study, out)
            code = again.wait(LIMIT_SECONDS)
            found = judged_files(out, TABLES)
            held = code == 0 and found == expected and bool(expected)
            whose = "every process" if every else "the parent"
            same.check(held, f"{study}, {whose} killed after {moment:.0f} s: {code}, {found}")
    yield same


def _start(study: str, out: Path) -> subprocess.Popen[bytes]:
    source = Path(__file__).parents[3] / "src"
    return subprocess.Popen(
        [sys.executable, "-m", "normattn", "reproduce", study, "--preset", "smoke", "--out", out],
        env={**os.environ, "PYTHONPATH": str(source)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _kill(process: subprocess.Popen[bytes], every: bool) -> None:
    """The parent alone, or its children with it (each is in a process group of its own)."""
    try:
        children = psutil.Process(process.pid).children(recursive=True) if every else []
    except psutil.NoSuchProcess:
        children = []
    process.send_signal(signal.SIGKILL)
    for child in children:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()
