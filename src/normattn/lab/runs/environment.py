"""The environment of a run: versions, threads, processor, memory."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

from normattn.io import read_object, write_json
from normattn.settings import differences

PACKAGES = ("normattn", "torch", "numpy", "tokenizers", "safetensors")


def describe_environment(**extra: Any) -> dict[str, Any]:
    """Return everything that the results of a run may depend on, as JSON values, plus `extra`.

    Keys: python, one version per package, threads (torch's, in this process), cpu (the name),
    cpu_capability (the vector instructions that torch uses), platform.
    """
    versions = dict.fromkeys(PACKAGES, "absent")
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    # Linux keeps the processor's name in /proc/cpuinfo, where `platform` does not look.
    cpu = _value_in(Path("/proc/cpuinfo"), "model name") or platform.processor() or "unknown"
    return {
        "python": platform.python_version(),
        **versions,
        "threads": torch.get_num_threads(),
        "cpu": cpu,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "platform": f"{sys.platform}-{platform.machine()}",
        **extra,
    }


def record_environment(path: Path, current: dict[str, Any], step: int) -> list[str]:
    """Store `current` in the file `path`; return the changes, such as "torch 2.12.0 → 2.13.0".

    The file has `{"started": …, "resumed": [{"step": …, "environment": …}]}`, a resume if changed.
    """
    if step == 0 or not path.exists():
        write_json(path, {"started": current, "resumed": []})
        return []
    stored = read_object(path)
    resumed = stored.setdefault("resumed", [])
    last = resumed[-1]["environment"] if resumed else stored.get("started", {})
    changed = [f"{name} {old} → {new}" for name, old, new in differences(last, current)]
    if changed:
        resumed.append({"step": step, "environment": current})
        write_json(path, stored)
    return changed


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Set torch's number of threads inside, and restore it afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def allocated_memory(device: torch.device) -> int:
    """Return the resident bytes of the process, or what torch has allocated on a GPU."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    return int(psutil.Process().memory_info().rss)


@contextmanager
def record_peak_memory(device: torch.device, baseline: int) -> Iterator[list[int]]:
    """Yield a list that gets the peak bytes above `baseline` at the end; empty if unknown."""
    growth: list[int] = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield growth
        growth.append(max(0, int(torch.cuda.max_memory_allocated(device)) - baseline))
        return
    with contextlib.suppress(OSError):  # Not on Linux.
        Path("/proc/self/clear_refs").write_text("5")
    yield growth
    if kilobytes := _value_in(Path("/proc/self/status"), "VmHWM"):
        growth.append(max(0, 1024 * int(kilobytes.split()[0]) - baseline))


def _value_in(file: Path, name: str) -> str:
    """Return the value after `name:` in a system file; "" if there is none."""
    with contextlib.suppress(OSError):
        for line in file.read_text("utf-8", errors="replace").splitlines():
            if line.startswith(name):
                return line.partition(":")[2].strip()
    return ""


@contextmanager
def keep_pages() -> Iterator[None]:
    """Make glibc keep up to 256 MiB of freed memory inside, and restore its defaults afterwards.

    A training step allocates what the last one freed. If that memory went back to the system, every
    4 KiB page would be a page fault (about 0.7 µs; up to 30,000 in a step of width 128). Does
    nothing if the environment sets the thresholds, or with another C library.
    """
    library = ctypes.CDLL(None)
    glibc = hasattr(library, "mallopt") and hasattr(library, "malloc_trim")
    variables = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"}
    if not glibc or not variables.isdisjoint(os.environ):
        yield
        return
    trim_threshold, mmap_threshold = -1, -3  # Parameters of mallopt.
    # Blocks from 32 MiB on are still mapped separately: glibc's own maximum.
    library.mallopt(mmap_threshold, 1 << 25)
    library.mallopt(trim_threshold, 1 << 28)
    try:
        yield
    finally:
        library.mallopt(mmap_threshold, 1 << 17)
        library.mallopt(trim_threshold, 1 << 17)
        library.malloc_trim(0)
