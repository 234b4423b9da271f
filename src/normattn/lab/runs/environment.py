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
    return {
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "threads": torch.get_num_threads(),
        "cpu": _cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "platform": f"{sys.platform}-{platform.machine()}",
        **extra,
    }


def record_environment(path: Path, current: dict[str, Any], step: int) -> list[str]:
    """Store `current` in the file `path`; return the differences from the last one stored.

    The file holds `{"started": …, "resumed": [{"step": …, "environment": …}]}`; a resume is added
    only where something changed. A damaged file is begun anew, with a warning, because a run's
    results do not depend on it. Each difference reads "torch 2.12.0 → 2.13.0".
    """
    if step == 0 or not path.exists():
        write_json(path, {"started": current, "resumed": []})
        return []
    stored = _stored(path)
    last = stored["resumed"][-1]["environment"] if stored["resumed"] else stored["started"]
    changed = [
        f"{key} {last.get(key, 'unknown')} → {current.get(key, 'unknown')}"
        for key in [*current, *(key for key in last if key not in current)]
        if last and last.get(key) != current.get(key)
    ]
    if changed or not last:
        resumed = [*stored["resumed"], {"step": step, "environment": current}]
        write_json(path, {**stored, "resumed": resumed})
    return changed


def _stored(path: Path) -> dict[str, Any]:
    """What is on record; where that is damaged, a record that begins anew, and a warning."""
    try:
        stored = read_object(path)
        begun, resumed = stored["started"], stored["resumed"]
        whole = isinstance(begun, dict) and isinstance(resumed, list)
        if whole and all(isinstance(record["environment"], dict) for record in resumed):
            return stored
        problem = f"{path} is damaged: expected started and resumed"
    except (LookupError, TypeError):
        problem = f"{path} is damaged: expected started and resumed"
    except InputError as error:
        problem = str(error)
    warn(f"warning: {problem}; what the run ran on before is lost")
    return {"started": {}, "resumed": []}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _cpu_name() -> str:
    """The processor's name; Linux keeps it in /proc/cpuinfo, where `platform` does not look."""
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8", errors="replace")
    except OSError:
        return platform.processor() or "unknown"
    names = (line.partition(":")[2] for line in text.splitlines() if line.startswith("model name"))
    return next(names, "").strip() or platform.processor() or "unknown"


# glibc's mallopt: what larger blocks are mapped one by one, and how much freed memory is kept.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_MAPPED, _KEPT, _DEFAULT = 1 << 25, 1 << 28, 1 << 17
_ASKED = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
_RESET, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


def resident(device: torch.device) -> int | None:
    """Bytes that the process holds (on a GPU: that torch holds there); None where untold."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    return _status("VmRSS")


@contextmanager
def peak(device: torch.device, held: int | None) -> Iterator[list[int]]:
    """A list that holds, afterwards, the most bytes beyond `held`; empty where untold."""
    growth: list[int] = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):  # Another system than Linux.
            _RESET.write_text("5")
    yield growth
    if device.type == "cuda":
        most: int | None = int(torch.cuda.max_memory_allocated(device))
    else:
        most = _status("VmHWM")
    if most is not None and held is not None:
        growth.append(max(0, most - held))


def _status(name: str) -> int | None:
    with contextlib.suppress(OSError, StopIteration):
        lines = _STATUS.read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))
    return None


@contextmanager
def keep_pages() -> Iterator[None]:
    """Inside, glibc keeps up to 256 MiB of what is freed at the end of its heap.

    Afterwards the thresholds are glibc's first ones again, and what was kept goes back. (It then no
    longer adapts them by itself, for which it has no call.)

    A training step frees what the next one takes again. Given back in between, every page of 4 KiB
    comes as a fault (some 0.7 µs, and up to 30,000 in a step of width 128). Blocks from 32 MiB on
    are still mapped alone, which is the most that glibc comes to by itself. Nothing is done where
    the environment sets the thresholds, and where there is another C library.
    """
    library = ctypes.CDLL(None)
    glibc = hasattr(library, "mallopt") and hasattr(library, "malloc_trim")
    if not glibc or any(name in os.environ for name in _ASKED):
        yield
        return
    library.mallopt(_MMAP_THRESHOLD, _MAPPED)
    library.mallopt(_TRIM_THRESHOLD, _KEPT)
    try:
        yield
    finally:
        library.mallopt(_MMAP_THRESHOLD, _DEFAULT)
        library.mallopt(_TRIM_THRESHOLD, _DEFAULT)
        library.malloc_trim(0)
