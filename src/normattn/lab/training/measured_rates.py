"""What this machine's processor does a second: curves measured once, kept in the cache.

In a few seconds, on as many threads as the training takes, on numbers of no model:

- products by their side, in fp32 and bf16, in three forms: of one matrix as a linear layer takes
  them (rows sixteen times the width: its forward and both backward products), of many small ones,
  and in attention (forward and backward), after `SINCE` other bytes were touched;
- memory by the bytes touched in between (`TOUCHED`): two tensors of `NUMBERS` multiplied into a
  third, all of them in one run, or one of them in runs of `RUN` (scattered), or of two types;
- exponentials: those of a silu that a cache holds;
- an operation's own time, Python's part in it: a training of next to nothing.

The middle one of a few rounds counts. On one thread it is that thread's own time (of a core that
others use as well, what is ours), on several the clock; either is longer on a busy machine than on
an idle one. The file, `NORMATTN_CACHE/rates-DIGEST.json`, goes with the machine; whoever
deletes it has all measured again.
"""

from __future__ import annotations

import hashlib
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from normattn.atomic import write_json
from normattn.errors import InputError
from normattn.files import default_cache_dir
from normattn.lab.runs.timing import threads
from normattn.lab.training.config import TrainingConfig
from normattn.lab.training.curve import Curve
from normattn.lab.training.dry_step import dry_step
from normattn.lab.training.measured_step import measured_seconds
from normattn.lab.training.roofline import EXPONENTIALS, FORMS, LAYOUTS, Rates, rate_of
from normattn.lab.training.work import ATEN, Form, Layout
from normattn.structured import read_object
from normattn.terminal import warn

FORMAT = 1
"""Another one, and what is on file is measured again."""
SIZES: Mapping[Form, tuple[int, ...]] = {
    "matrix": (16, 32, 64, 128, 256, 384),
    "batched": (16, 32, 64, 128, 256),
    "attention": (64, 128, 256, 512, 1024),
}
"""Width of a linear layer, of many products, and length of attention."""
TOUCHED = tuple(2**power for power in (18, 19, 20, 21, 22, 23, 24, 26))
"""Bytes touched in between, of which `memory` is a curve; ahead of a product `SINCE`."""
SINCE = 2**24
LEAST_ROUNDS, SECONDS = 3, 0.03
"""Of a measurement: as many rounds as fit into so many seconds."""
NUMBERS, RUN, HEAD = 2**16, 16, 64
_SPREAD, _ENTRIES, _EXPONENTIALS, _JUMPS = 16, 2**18, 2**16, 64
NEXT_TO_NOTHING = {
    "batch_size": 1,
    "model": {"dim": 16, "layers": 2, "heads": 2, "train_length": 16},
    "data": {"corpus": "synthetic:copy?low=3&high=6", "vocab_size": 32},
}
_FILE = TypeAdapter(Rates)

Clock = Callable[[], float]
Point = tuple[float, float]


def rates_here(count: int = 1) -> Rates:
    """This machine's on `count` threads: from the cache, or measured now and kept there.

    Of a damaged file it warns, and measures again; where nothing can be written, nothing is kept.
    """
    with threads(count):
        own = of_machine()
        path = path_for(own)
        rates = _kept(path, own)
        if rates is None:
            warn("measuring this processor's rates, once; some seconds …")
            rates = measured_rates(count)
            with suppress(InputError):
                write_json(path, {"machine": own, "rates": _FILE.dump_python(rates, mode="json")})
        return rates


def of_machine() -> dict[str, Any]:
    """What the rates depend on: the machine, with as many threads as torch has now."""
    features = {name: has for name, has in torch.cpu.get_capabilities().items() if has}
    return {
        "processor": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "features": features,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "rates": FORMAT,
    }


def path_for(own: Mapping[str, Any]) -> Path:
    """Where the rates of such a machine are kept."""
    digest = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()[:12]
    return default_cache_dir() / f"rates-{digest}.json"


def measured_rates(count: int = 1) -> Rates:
    """The same, measured now on the `count` threads that torch has."""
    clock = time.thread_time if count == 1 else time.perf_counter
    curves: dict[str, Curve] = {}
    for half, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        for form, sizes in SIZES.items():
            points = (_PRODUCTS[form](size, dtype, clock) for size in sizes)
            curves[rate_of(form, half)] = Curve.rising(points)
        for layout in LAYOUTS:
            points = ((float(size), _memory(size, layout, dtype, clock)) for size in TOUCHED)
            curves[rate_of(layout, half)] = Curve.falling(points)
        curves[rate_of(EXPONENTIALS, half)] = Curve.level(_exponentials(dtype, clock))
    return Rates(curves, _overhead(count))


def _matrices(width: int, dtype: torch.dtype, clock: Clock) -> Point:
    """Side and FLOP/s of a linear layer of this width: y = x·W, and both gradients."""
    rows = _SPREAD * width
    weight = torch.ones(width, width, dtype=dtype)
    x, g = torch.ones(2, rows, width, dtype=dtype)

    def layer() -> None:
        torch.mm(x, weight)
        torch.mm(g, weight.T)
        torch.mm(x.T, g)

    return _SPREAD ** (1 / 3) * width, 3 * 2.0 * rows * width**2 / _taken(layer, clock)


def _batched(side: int, dtype: torch.dtype, clock: Clock) -> Point:
    """Side and FLOP/s of many square products at once: as they lie, and with one of each turned."""
    many = max(_ENTRIES // side**2, 2)
    a, b = torch.ones(2, many, side, side, dtype=dtype)

    def both() -> None:
        torch.bmm(a, b)
        torch.bmm(a, b.mT)

    return float(side), 2 * 2.0 * many * side**3 / _taken(both, clock)


def _attention(length: int, dtype: torch.dtype, clock: Clock) -> Point:
    """Side of a head and FLOP/s of causal attention, forward and backward."""
    heads = max(_ENTRIES // (length * HEAD), 1)
    q, k, v, g = torch.ones(4, 1, heads, length, HEAD, dtype=dtype)
    flash = ATEN._scaled_dot_product_flash_attention_for_cpu

    def both() -> None:
        out, lse = flash(q, k, v, 0.0, True)
        ATEN._scaled_dot_product_flash_attention_for_cpu_backward(g, q, k, v, out, lse, 0.0, True)

    products = length**2 / 2 * HEAD
    return products ** (1 / 3), 7 * 2 * heads * products / _taken(both, clock)


_PRODUCTS: Mapping[Form, Callable[[int, torch.dtype, Clock], Point]] = {
    "matrix": _matrices,
    "batched": _batched,
    "attention": _attention,
}


def _memory(since: int, layout: Layout, dtype: torch.dtype, clock: Clock) -> float:
    """Bytes a second of x·y → z laid out so, when so many bytes were touched since they were."""
    shape: tuple[int, ...] = (NUMBERS // (RUN * _JUMPS), _JUMPS, RUN)
    x, y, z = torch.ones(3, *shape, dtype=dtype)
    if layout == "scattered":
        x = x.view(_JUMPS, -1, RUN).transpose(0, 1)
    if layout == "mixed":
        y = y.to(torch.float32 if dtype is torch.bfloat16 else torch.bfloat16)
    moved = sum(int(tensor.nbytes) for tensor in (x, y, z))
    return moved / _taken(lambda: torch.mul(x, y, out=z), clock, since)


def _exponentials(dtype: torch.dtype, clock: Clock) -> float:
    x, y = torch.ones(2, _EXPONENTIALS, dtype=dtype)
    return _EXPONENTIALS / _taken(lambda: ATEN.silu.out(x, out=y), clock, 0)


def _overhead(count: int) -> float:
    nothing = TrainingConfig.parse({**NEXT_TO_NOTHING, "device": "cpu", "threads": count})
    clock, processor = measured_seconds(nothing, 30)
    return (processor if count == 1 else clock) / dry_step(nothing).operations


def _taken(work: Callable[[], object], clock: Clock, since: int = SINCE) -> float:
    """The time of a call, the middle one of rounds; before each so many other bytes are touched."""
    others = torch.ones(since // 4)
    work()
    times: list[float] = []
    end = clock() + SECONDS
    while len(times) < LEAST_ROUNDS or clock() < end:
        others.sum()
        before = clock()
        work()
        times.append(clock() - before)
    return max(statistics.median(times), 1e-9)


def _kept(path: Path, own: dict[str, Any]) -> Rates | None:
    """The rates on file; None where there are none, with a warning if the file is damaged."""
    if not path.exists():
        return None
    try:
        stored = read_object(path)
        if stored.get("machine") != json.loads(json.dumps(own)):
            raise InputError(f"{path} is damaged, or was measured on another machine")
        rates = _FILE.validate_python(stored.get("rates"))
        kinds = (*FORMS, *LAYOUTS, EXPONENTIALS)
        if rates.curves.keys() == {rate_of(kind, half) for kind in kinds for half in (False, True)}:
            return rates
        wrong = f"{path} is damaged: expected a curve of every kind of work"
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"])) or "the whole"
        wrong = f"{path} is damaged: {where} is no rate"
    except InputError as error:
        wrong = str(error)
    warn(f"warning: {wrong}; the rates are measured again")
    return None
