"""What a run runs on: versions, threads, processor, and the memory that it takes."""

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

from normattn.errors import InputError
from normattn.io import read_object, write_json
from normattn.terminal import warn

PACKAGES = ("normattn", "torch", "numpy", "tokenizers", "safetensors")


def describe_environment(**extra: Any) -> dict[str, Any]:
    """Everything that the digits of a run may depend on, as JSON values; `extra` is added.

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
    """Store `current` in the file `path`; return the differences from the last one stored.

    The file holds `{"started": …, "resumed": [{"step": …, "environment": …}]}`; a resume is added
    only where something changed. A damaged file is begun again, with a warning, because a run's
    results do not depend on it. Each difference reads "torch 2.12.0 → 2.13.0".
    """
    if step == 0 or not path.exists():
        write_json(path, {"started": current, "resumed": []})
        return []
    try:
        stored = read_object(path)
        last = [stored["started"], *(each["environment"] for each in stored["resumed"])][-1]
        changed = [
            f"{key} {last.get(key, 'unknown')} → {current.get(key, 'unknown')}"
            for key in dict.fromkeys([*current, *last])
            if last and last.get(key) != current.get(key)
        ]
    except (LookupError, TypeError, AttributeError, InputError):
        warn(f"warning: {path} is damaged; what the run ran on before is lost")
        stored, last, changed = {"started": {}, "resumed": []}, {}, []
    if changed or not last:
        resumed = [*stored["resumed"], {"step": step, "environment": current}]
        write_json(path, {**stored, "resumed": resumed})
    return changed


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute on `count` threads of torch inside, and on as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def resident(device: torch.device) -> int:
    """Bytes that the process holds; on a GPU, that torch holds there."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    return int(psutil.Process().memory_info().rss)


@contextmanager
def peak(device: torch.device, held: int) -> Iterator[list[int]]:
    """A list that holds, afterwards, the most bytes beyond `held`; empty where unknown."""
    growth: list[int] = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield growth
        growth.append(max(0, int(torch.cuda.max_memory_allocated(device)) - held))
        return
    with contextlib.suppress(OSError):  # Another system than Linux.
        Path("/proc/self/clear_refs").write_text("5")
    yield growth
    if kilobytes := _value_in(Path("/proc/self/status"), "VmHWM"):
        growth.append(max(0, 1024 * int(kilobytes.split()[0]) - held))


def _value_in(file: Path, name: str) -> str:
    """The value after `name:` in a file of the system's; "" where there is no such line."""
    with contextlib.suppress(OSError):
        for line in file.read_text("utf-8", errors="replace").splitlines():
            if line.startswith(name):
                return line.partition(":")[2].strip()
    return ""


# glibc's mallopt: what larger blocks are mapped one by one, and how much freed memory is kept.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_MAPPED, _KEPT, _DEFAULT = 1 << 25, 1 << 28, 1 << 17
_SET_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


@contextmanager
def keep_pages() -> Iterator[None]:
    """Inside, glibc keeps up to 256 MiB of what is freed at the end of its heap.

    A training step frees what the next one takes again. Given back in between, every page of 4 KiB
    comes as a fault (some 0.7 µs, and up to 30,000 in a step of width 128). Nothing is done where
    the environment sets the thresholds, and where there is another C library. Afterwards the
    thresholds are glibc's first ones again, and what was kept goes back.
    """
    library = ctypes.CDLL(None)
    glibc = hasattr(library, "mallopt") and hasattr(library, "malloc_trim")
    if not glibc or any(name in os.environ for name in _SET_BY_USER):
        yield
        return
    # Blocks from 32 MiB on are still mapped alone, the most that glibc comes to by itself.
    library.mallopt(_MMAP_THRESHOLD, _MAPPED)
    library.mallopt(_TRIM_THRESHOLD, _KEPT)
    try:
        yield
    finally:
        library.mallopt(_MMAP_THRESHOLD, _DEFAULT)
        library.mallopt(_TRIM_THRESHOLD, _DEFAULT)
        library.malloc_trim(0)
