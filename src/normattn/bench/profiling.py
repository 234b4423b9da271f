"""Where the time of an entry goes, operation by operation."""

from __future__ import annotations

from typing import Any

from torch.profiler import ProfilerActivity, profile

from normattn.bench.case import Entry
from normattn.bench.settings import Settings
from normattn.lab.runs.timing import synchronise

_STEPS, _TOP = 3, 12


def top_operations(entry: Entry, settings: Settings) -> list[dict[str, Any]]:
    """The operations with the most time of their own in a few steps, most first.

    Each is {"operation", "calls" per step, "milliseconds" per step, "share" of all}.
    """
    step = entry.build()
    step()
    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if settings.on_gpu else []
    with profile(activities=activities) as watched:
        for _ in range(_STEPS):
            step()
        synchronise(settings.device)
    name = "self_device_time_total" if settings.on_gpu else "self_cpu_time_total"
    rows = watched.key_averages()
    times = {row.key: float(getattr(row, name)) for row in rows}  # Microseconds.
    counts = {row.key: row.count for row in rows}
    total = sum(times.values()) or 1.0
    ranked = sorted(times, key=lambda key: -times[key])[:_TOP]
    return [
        {
            "operation": key,
            "calls": counts[key] / _STEPS,
            "milliseconds": times[key] / _STEPS / 1e3,
            "share": times[key] / total,
        }
        for key in ranked
    ]
