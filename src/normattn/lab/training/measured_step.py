"""What a step of a training takes on this machine: its peak of memory and its seconds.

Memory is what torch's allocator for a CPU has given out and not got back, as torch's profiler
records it: workspaces of operations included, what the C library keeps for itself not.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch.profiler import ProfilerActivity, profile

from normattn.lab.runs.timing import threads
from normattn.lab.training.config import TrainingConfig
from normattn.lab.training.distribution import World
from normattn.lab.training.dry_step import DrawnTask
from normattn.lab.training.step import Stepper
from normattn.lab.training.workload import rows_per_share


def measured_peak(config: TrainingConfig, world: World | None = None) -> int:
    """Bytes at the peak of two steps on a CPU, from before the model is made."""
    with (
        threads(config.threads),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen,
    ):
        stepper = _stepper(config, world)
        for step in (1, 2):
            stepper.step(step)
        stepper.close()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def measured_seconds(
    config: TrainingConfig, steps: int, world: World | None = None
) -> tuple[float, float]:
    """The median step's seconds and processor seconds, after two that are not counted."""
    with threads(config.threads):
        stepper = _stepper(config, world)
        times = []
        for step in range(1, steps + 3):
            before = time.perf_counter(), time.process_time()
            stepper.step(step)
            times.append((time.perf_counter() - before[0], time.process_time() - before[1]))
        stepper.close()
    clock, processor = zip(*times[2:], strict=True)
    return statistics.median(clock), statistics.median(processor)


def _stepper(config: TrainingConfig, world: World | None) -> Stepper:
    world = world or World(0, 1, torch.device("cpu"))
    rows = rows_per_share(config.batch_size, world.size * config.accumulate)
    torch.manual_seed(config.seed)
    task = DrawnTask(config, rows)
    return Stepper(task, config, world, lambda: False)
