"""The times by which kernels are chosen here: the usual ones, and all that were ever needed."""

from __future__ import annotations

import sys

import torch
from rich.console import Console

from normattn.bench.attending import KernelAlone
from normattn.bench.settings import Settings
from normattn.bench.suites.tiles import grid
from normattn.errors import InputError
from normattn.kernels import choose
from normattn.kernels.bucket import LONGEST
from normattn.kernels.calibration import Quicker, Times, calibration, using
from normattn.lab.report.terminal import tell
from normattn.lab.runs.timing import threads


def calibrate(settings: Settings) -> None:
    """Measure what is not known of plain causal attention, and print all times by bucket.

    Raises `InputError` for a GPU, where nothing is chosen by times.
    """
    if settings.on_gpu:
        raise InputError("--calibration is for a CPU: on a GPU no kernel is chosen by its time")
    with threads(settings.threads), using("fastest"):
        with Console(file=sys.stderr).status("measuring kernels"):
            for _, causal in grid(settings):
                if causal.length <= LONGEST:
                    with torch.set_grad_enabled(causal.backward):
                        choose(KernelAlone(causal, "plain").problem())
        table = calibration()
    lines = [_line(name, times) for name, times in sorted(table.seconds.items())]
    width = max(len(line[0]) for line in lines)
    for attention, kernel, ratio in [("attention", "the fastest kernel", "of the next"), *lines]:
        tell(f"{attention:<{width}}  {kernel:<24}  {ratio}")
    tell(f"times of this machine: {table.path} (remove it to have them measured again)")


def _line(name: str, times: Times) -> tuple[str, str, str]:
    """A bucket, its kernel with the time, and the ratio to the next."""
    first = Quicker.of(times)
    kernel = f"{first.kernel}, {1e3 * times[first.kernel]:.3g} ms"
    return name.rpartition(":")[0], kernel, f"{first.ratio:.2f}"
