"""A step's time from what it does and what a device can do: a roofline of every operation.

    seconds = Σ over operations of  overhead + products/rate + bytes/bandwidth + exps/rate

Operations run one behind the other. Of a GPU the three hide each other (their largest counts),
rates are published ones and no overhead is known: a bound from below. Of this machine's processor
they add up, since one core waits for what it reads, and all four are measured when asked for, on
numbers of no model: a square product, two tensors multiplied into a third out of more bytes than
caches hold (what a step's operation reads was mostly written long before), exponentials, and the
time that an operation takes in a training of next to nothing, Python included. So the share of the
peak is that of a plain square product, and no rate is fitted to a model; that the parts add up, and
by which bandwidth, was chosen beside eight measured settings (docs/planning.md).
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from normattn.runs.timing import threads
from normattn.training.config import TrainingConfig
from normattn.training.counting import Counted, Work
from normattn.training.dry_step import dry_step
from normattn.training.measured_step import measured_seconds

SIZE = 1024
MOVED, POOL = 2**22, 2**26
_EXPONENTIALS = 2**17
_ROUND = 0.06
NEXT_TO_NOTHING = {
    "batch_size": 1,
    "model": {"dim": 16, "layers": 2, "heads": 2, "train_length": 16},
    "data": {"corpus": "synthetic:copy?low=3&high=6", "vocab_size": 32},
}


@dataclass(frozen=True)
class Rates:
    """Products, bytes and exponentials a second, and seconds of an operation beside them.

    `hidden`: whether an operation's products, bytes and exponentials hide each other.
    """

    fp32: float
    bf16: float
    bandwidth: float
    exponentials: float = math.inf
    overhead: float = 0.0
    hidden: bool = True

    def seconds(self, counted: Counted) -> float:
        """A step's time."""
        return sum((times * self._one(work) for work, times in counted.work.items()), 0.0)

    def _one(self, work: Work) -> float:
        parts = (
            work.flops / (self.bf16 if work.half else self.fp32),
            work.moved / self.bandwidth,
            work.exponentials / self.exponentials,
        )
        return self.overhead + (max(parts) if self.hidden else sum(parts))


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
            _moved(count),
            _EXPONENTIALS / _seconds(lambda: torch.exp(x, out=y), count),
            _overhead(),
            hidden=False,
        )


def _products(dtype: torch.dtype, count: int) -> float:
    a = torch.ones(SIZE, SIZE, dtype=dtype)
    out = torch.empty_like(a)
    return 2.0 * SIZE**3 / _seconds(lambda: torch.mm(a, a, out=out), count)


def _moved(count: int) -> float:
    """Two tensors are read and a third one is written, none of them touched for long."""
    many = 3 * POOL // MOVED
    pool = [torch.ones(MOVED // 12) for _ in range(many)]
    turn = itertools.cycle(range(0, many, 3))

    def multiply() -> None:
        at = next(turn)
        torch.mul(pool[at], pool[at + 1], out=pool[at + 2])

    return MOVED / _seconds(multiply, count)


def _overhead() -> float:
    nothing = TrainingConfig.parse({**NEXT_TO_NOTHING, "device": "cpu", "steps": 100})
    return measured_seconds(nothing, 30)[1] / dry_step(nothing).operations


def _seconds(work: Callable[[], object], count: int) -> float:
    """The median of processor time over threads, of as many calls as fit, three at least."""
    work()
    times: list[float] = []
    end = time.perf_counter() + _ROUND
    while len(times) < 3 or time.perf_counter() < end:
        before = time.process_time()
        work()
        times.append((time.process_time() - before) / count)
    return max(statistics.median(times), 1e-9)
