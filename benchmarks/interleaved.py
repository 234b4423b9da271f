"""Interleaved timing: every entry once per round, medians over rounds, ratios within one run.

A record holds the machine, the versions and the date, so that a number keeps its provenance.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import multiprocessing
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from normattn.atomic import write_text

Step = Callable[[], None]


@dataclass(frozen=True)
class Timing:
    """Seconds per call: median, smallest and largest round."""

    median: float
    low: float
    high: float


def interleave(entries: Mapping[str, Step], rounds: int, warm: int = 2) -> dict[str, Timing]:
    """Time each entry once per round, after `warm` untimed calls of each."""
    for step in entries.values():
        for _ in range(warm):
            step()
    seconds: dict[str, list[float]] = {name: [] for name in entries}
    order = list(entries)
    for turn in range(rounds):
        # Each round starts elsewhere, so that no entry always follows the same one.
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            start = time.perf_counter()
            entries[name]()
            seconds[name].append(time.perf_counter() - start)
    return {k: Timing(statistics.median(v), min(v), max(v)) for k, v in seconds.items()}


def _peak(make: Callable[[], Step], threads: int, send: Any) -> None:
    torch.set_num_threads(threads)
    step = make()
    before = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")  # The peak counts from here.
    step()
    step()
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    send.send(peak / 1024 - before / 2**20)


def peak_memory(make: Callable[[], Step], threads: int) -> float:
    """MiB by which two calls raise the peak of a fresh process that has already built it all.

    Reads the kernel's own high-water mark (Linux).
    """
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=_peak, args=(make, threads, send))
    child.start()
    child.join()
    return float(receive.recv())


def gemm(dtype: torch.dtype, size: int = 1536) -> tuple[Step, float]:
    """A square matrix product as an entry, and its FLOPs: the machine's practical peak."""
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    out = torch.empty_like(a)

    def step() -> None:
        torch.mm(a, b, out=out)

    return step, 2.0 * size**3


def provenance(packages: tuple[str, ...], threads: int) -> dict[str, Any]:
    """Machine, versions and date of a record."""
    processor = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [x for x in info.read_text().splitlines() if x.startswith("model name")]
        processor = names[0].partition(":")[2].strip() if names else processor
    return {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "processor": processor,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": threads,
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }


def save(path: Path, record: Mapping[str, Any]) -> None:
    """Write the record as JSON; timings become objects."""
    text = json.dumps(record, indent=2, default=asdict) + "\n"
    write_text(path, text)
