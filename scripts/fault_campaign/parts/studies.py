"""SIGKILL in the middle of a study, of its parent alone or of every process, and at once again."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import polars as pl
import psutil

from fault_campaign.campaign import Campaign, Count
from normattn.lab.stats import measurements
from normattn.lab.studies import names

FULL_ONLY = True
CLOCKS = ("step_time", "training_seconds")
"""What is measured of time is another each time."""
LIMIT_SECONDS = 1800.0
FEW = {
    "factors": "preset,no-tiling",
    "keynorm": "Baseline,KNA",
    "mechanism": "Baseline,KNA",
    "qknorm": "Baseline,QKRMSNorm",
    "reading": "KNA",
    "realformer": "PostLN,RealFormer",
}
"""One or two rows of the studies that have many: each row goes the same way."""


def run(campaign: Campaign) -> Iterator[Count]:
    """Every study's smoke preset, killed in both ways at the same time."""
    same = Count("a study killed anywhere and started again at once gives the same measurements")
    with ThreadPoolExecutor(2) as pool:
        for study in names():
            if not campaign.has_time:
                break
            whole = campaign.folder / f"{study}-whole"
            before = time.monotonic()
            code = _start(study, whole).wait(LIMIT_SECONDS)
            seconds = time.monotonic() - before
            if code != 0:
                same.failed(f"{study} as it is ended with {code}")
                continue
            expected = _measured(whole)
            moments = [campaign.random.uniform(0.2, 0.9) * seconds for _ in (False, True)]
            places = [campaign.folder / f"{study}-{every}" for every in (False, True)]
            ends = pool.map(_killed_and_again, [study] * 2, places, moments, (False, True))
            for moment, every, (code, found) in zip(moments, (False, True), ends, strict=True):
                held = code == 0 and found == expected
                whose = "every process" if every else "the parent"
                same.check(held, f"{study}, {whose} killed after {moment:.0f} s: {code}, {found}")
    yield same


def _killed_and_again(study: str, out: Path, moment: float, every: bool) -> tuple[int, str]:
    """Exit status of the second attempt, and what it measured."""
    killed = _start(study, out)
    time.sleep(moment)
    _kill(killed, every)
    code = _start(study, out).wait(LIMIT_SECONDS)
    return code, _measured(out) if code == 0 else ""


def _measured(out: Path) -> str:
    """A digest of the page's frame, of which every number of its tables is made."""
    found = measurements.read(out / measurements.FILE).filter(~pl.col("statistic").is_in(CLOCKS))
    return hashlib.sha256(repr(found.rows()).encode()).hexdigest()


def _start(study: str, out: Path) -> subprocess.Popen[bytes]:
    source = Path(__file__).parents[3] / "src"
    few = ["--variants", FEW[study]] if study in FEW else []
    line = ["reproduce", study, "--preset", "smoke", "--jobs", "1", *few, "--out", str(out)]
    return subprocess.Popen(
        [sys.executable, "-m", "normattn", *line],
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
