"""A step's time from what it does and what a device can do: a roofline of every operation.

    seconds = Σ over operations of  overhead + max(products/rate, bytes/bandwidth, exps/rate)

Operations run one behind the other, so each is bound by one thing. Of this machine everything is
measured when it is asked for, on numbers of no model: a square product, two tensors multiplied into
a new one at several sizes from 4 MB on, exponentials, and the time that an operation takes in a
training of next to nothing, Python included. A smaller operation moves its bytes no faster: what it
reads was written a few operations ago, and those after that have pushed it out of a core's own
cache. So the share of the peak is that of a plain square product, and nothing is fitted to a model.
Of a GPU rates are published ones and no overhead is known: a bound from below.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from normattn.training.config import TrainingConfig
from normattn.training.counting import Counted, Work
from normattn.training.dry_step import dry_step
from normattn.training.measured_step import measured_seconds, threads

SIZE = 1024
BYTES = tuple(2**n for n in range(22, 28))
_EXPONENTIALS = 2**17
_ROUND = 0.06
NEXT_TO_NOTHING = {
    "batch_size": 1,
    "model": {"dim": 16, "layers": 2, "heads": 2, "train_length": 16},
    "data": {"corpus": "synthetic:copy?low=3&high=6", "vocab_size": 32},
}


@dataclass(frozen=True)
class Rates:
    """Products a second in both types, exponentials a second, seconds of an operation.

    `moved`: (bytes of an operation, bytes a second), sizes rising; between two sizes the rate goes
    by the logarithm of the size, beyond them it is the outer one's.
    """

    fp32: float
    bf16: float
    moved: tuple[tuple[float, float], ...]
    exponentials: float = math.inf
    overhead: float = 0.0

    def bandwidth(self, size: float) -> float:
        """Bytes a second of an operation that reads and writes `size`."""
        below = self.moved[0]
        for point in self.moved:
            if point[0] >= size:
                if point is below:
                    return point[1]
                share = math.log(size / below[0]) / math.log(point[0] / below[0])
                return below[1] + share * (point[1] - below[1])
            below = point
        return below[1]

    def seconds(self, counted: Counted) -> float:
        """A step's time."""
        return sum(times * self._one(work) for work, times in counted.work.items())

    def _one(self, work: Work) -> float:
        products = work.flops / (self.bf16 if work.half else self.fp32)
        moving = work.moved / self.bandwidth(work.moved) if work.moved else 0.0
        return self.overhead + max(products, moving, work.exponentials / self.exponentials)


def rates_here(count: int = 1) -> Rates:
    """What this machine's processor does on `count` threads now; it takes about two seconds.

    In processor seconds over threads: of a core that others use as well, its own share.
    """
    with threads(count):
        x = torch.ones(_EXPONENTIALS)
        y = torch.empty_like(x)
        return Rates(
            _products(torch.float32, count),
            _products(torch.bfloat16, count),
            tuple((float(size), _moved(size, count)) for size in BYTES),
            _EXPONENTIALS / _seconds(lambda: torch.exp(x, out=y), count),
            _overhead(),
        )


def _products(dtype: torch.dtype, count: int) -> float:
    a = torch.ones(SIZE, SIZE, dtype=dtype)
    out = torch.empty_like(a)
    return 2.0 * SIZE**3 / _seconds(lambda: torch.mm(a, a, out=out), count)


def _moved(size: int, count: int) -> float:
    """Two tensors are read and a new one is written, `size` bytes together."""
    a = torch.ones(size // 12)
    b = torch.ones(size // 12)
    return size / _seconds(lambda: a * b, count)


def _overhead() -> float:
    nothing = TrainingConfig.parse({**NEXT_TO_NOTHING, "device": "cpu", "steps": 100})
    return measured_seconds(nothing, 30)[1] / dry_step(nothing).operations


def _seconds(work: Callable[[], object], count: int) -> float:
    """The median of processor time over threads, of as many calls as fit, three at least."""
    work()
    found: list[float] = []
    end = time.perf_counter() + _ROUND
    while len(found) < 3 or time.perf_counter() < end:
        before = time.process_time()
        work()
        found.append((time.process_time() - before) / count)
    return max(statistics.median(found), 1e-9)
