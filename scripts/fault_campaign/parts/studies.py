"""SIGKILL during a study, of its parent or of every process, repeatedly."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import polars as pl
import psutil

from fault_campaign.campaign import Campaign, Count
from normattn.lab.stats import measurements
from normattn.lab.studies import names

FULL_ONLY = True
CLOCKS = ("step_time", "training_seconds")
"""Statistics of time, which differ in each run."""
LIMIT_SECONDS = 1800.0
FEW = {
    "factors": "preset,no-tiling",
    "keynorm": "Baseline,KNA",
    "mechanism": "Baseline,KNA",
    "qknorm": "Baseline,QKRMSNorm",
    "reading": "KNA",
    "realformer": "PostLN,RealFormer",
}
"""One or two rows of studies that have many similar ones."""
KILLS = 10
"""The number for each study and way; more than 200 in all."""


def run(campaign: Campaign) -> Iterator[Count]:
    """Kill every study's smoke preset until it is done, both ways concurrently."""
    same = Count("a study killed ten times on its way gives the same measurements")
    goes_on = Count("a killed study goes on when it is started again")
    with ThreadPoolExecutor(2) as pool:
        for study in names():
            if not campaign.has_time:
                break
            whole = campaign.folder / f"{study}-whole"
            before = time.monotonic()
            code = _start(study, whole).wait(LIMIT_SECONDS)
            # Starting takes some seconds without progress.
            longest = 6 + 2 * (time.monotonic() - before) / KILLS
            if code != 0:
                same.failed(f"{study} as it is ended with {code}")
                continue
            moments = [
                [campaign.random.uniform(1, longest) for _ in range(KILLS)] for _ in (False, True)
            ]
            places = [campaign.folder / f"{study}-{every}" for every in (False, True)]
            ends = pool.map(_killed_until_done, [study] * 2, places, moments, (False, True))
            for every, (kills, code) in zip((False, True), ends, strict=True):
                whose = "every process" if every else "the parent"
                description = f"{study}, {whose} killed {kills} times: ended with {code}"
                for _ in range(kills):
                    goes_on.check(code == 0, description)
                held = code == 0 and _measured(places[every]) == _measured(whole)
                same.check(held, f"{description}; measurements differ")
    yield same
    yield goes_on


def _killed_until_done(
    study: str, out: Path, moments: Sequence[float], every: bool
) -> tuple[int, int]:
    """The number of kills, and the exit code of the attempt that was not killed."""
    for kills, moment in enumerate(moments):
        process = _start(study, out)
        try:
            return kills, process.wait(moment)
        except subprocess.TimeoutExpired:
            _kill(process, every)
    return len(moments), _start(study, out).wait(LIMIT_SECONDS)


def _measured(out: Path) -> str:
    measured = measurements.read(out / measurements.FILE).filter(~pl.col("statistic").is_in(CLOCKS))
    return hashlib.sha256(repr(measured.rows()).encode()).hexdigest()


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
    """Kill the parent and, with `every`, its children, which have their own process groups."""
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
