"""Memory of this process, or of a GPU: what it holds now, and the most that it held meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

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
