"""The time that kernels take on this machine, measured where it is first needed, kept in a file.

One file for each kind of machine: `NORMATTN_CACHE/kernels-DIGEST.json`. It holds what it was
measured on, and for each bucket of shapes the seconds of every kernel that could take it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from normattn.atomic import write_json
from normattn.errors import InputError, unknown
from normattn.files import default_cache_dir
from normattn.kernels.bucket import Bucket
from normattn.kernels.problem import Problem
from normattn.locks import locked
from normattn.structured import read_object

Way = Literal["fastest", "portable"]
"""How a kernel is chosen: by this machine's times, or as on any other."""
VARIABLE = "NORMATTN_KERNELS"
ROUNDS, LEAST_ROUNDS, SECONDS = 25, 4, 0.1
"""Of a measurement: as many rounds as fit into so many seconds of the slowest kernel."""
_LOCK_SECONDS = 10.0

Clock = Callable[[], float]
Run = Callable[[Problem], torch.Tensor]
Machine = Mapping[str, Any]
Times = Mapping[str, float]


def machine() -> dict[str, Any]:
    """What the times depend on: processor, its libraries and their limits, kernels, threads."""
    features: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    limits = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")
    return {
        "processor": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "features": {name: features[name] for name in sorted(features) if features[name]},
        "limits": {name: os.environ[name] for name in limits if name in os.environ},
        "torch": torch.__version__,
        "kernels": _source(),
        "threads": torch.get_num_threads(),
    }


def path_for(kind: str, own: Machine) -> Path:
    """Where times of this `kind` are kept that were measured on such a machine."""
    digest = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()[:12]
    return default_cache_dir() / f"{kind}-{digest}.json"


@cache
def _source() -> str:
    """12 digits that change with the text of the kernels."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


@dataclass(frozen=True)
class Quicker:
    """The kernel that takes less time, and its time in that of the next."""

    kernel: str
    ratio: float

    @staticmethod
    def of(times: Times) -> Quicker:
        """The first in time; of equal ones the first by place."""
        first, second, *_ = sorted(times, key=lambda name: times[name])
        return Quicker(first, times[first] / max(times[second], 1e-12))

    @property
    def why(self) -> str:
        """The reason in words."""
        return f"it takes {self.ratio:.2f} of the time of the next, as measured on this machine"


@dataclass
class Calibration:
    """The times of kernels on one machine.

    `path` is where they are kept, None for nowhere; `clock` gives seconds. Processes that measure
    at the same time come to one answer: what stands in the file first is what all take.
    """

    machine: Machine
    path: Path | None = None
    clock: Clock = time.perf_counter
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    _known: dict[tuple[Bucket, tuple[str, ...]], Quicker] = field(default_factory=dict, init=False)

    @staticmethod
    def here() -> Calibration:
        """This machine's, with what is on file."""
        own = machine()
        # A thread's own time says nothing of what other processes take; of several there is none.
        clock = time.thread_time if own["threads"] == 1 else time.perf_counter
        made = Calibration(own, path_for("kernels", own), clock)
        made.read()
        return made

    def read(self) -> None:
        """Take over what is on file; of a file that is damaged or another machine's, warn."""
        try:
            self.seconds = self._on_file()
        except InputError as error:
            print(f"warning: {error}; kernels are measured again", file=sys.stderr)

    def _on_file(self) -> dict[str, dict[str, float]]:
        if self.path is None or not self.path.exists():
            return {}
        return _checked(read_object(self.path), self.machine, self.path)

    def quicker(self, bucket: Bucket, rivals: Mapping[str, Run]) -> Quicker:
        """The rival that takes the least time, measured now where that is not known."""
        known = self.known(bucket, tuple(rivals))
        if known is None:
            self._add(_name(bucket, rivals), measured(bucket.problem(), rivals, self.clock))
            known = self.known(bucket, tuple(rivals))
            assert known is not None
        return known

    def known(self, bucket: Bucket, rivals: tuple[str, ...]) -> Quicker | None:
        """The same where it was measured before."""
        asked = bucket, rivals
        if asked not in self._known and (name := _name(bucket, rivals)) in self.seconds:
            self._known[asked] = Quicker.of(self.seconds[name])
        return self._known.get(asked)

    def _add(self, name: str, times: Times) -> None:
        """Keep times, unless another process has meanwhile: then its.

        A cache that cannot be written leaves them to this process alone.
        """
        mine = {**self.seconds, name: dict(times)}
        self.seconds = mine
        if self.path is None:
            return
        with suppress(InputError), locked(self.path.with_suffix(".lock"), _LOCK_SECONDS):
            with suppress(InputError):  # `read` has said what is wrong with the file.
                self.seconds = {**mine, **self._on_file()}
            write_json(self.path, {"machine": self.machine, "seconds": self.seconds})


def _name(bucket: Bucket, rivals: Iterable[str]) -> str:
    return f"{bucket}: {' or '.join(rivals)}"


def measured(problem: Problem, rivals: Mapping[str, Run], clock: Clock) -> Times:
    """The least of interleaved rounds of each rival: what else the machine does only adds."""
    inputs = [x for x in problem.tensors if x is not None and x.requires_grad]

    def step(run: Run) -> float:
        start = clock()
        out = run(problem)
        if inputs:
            torch.autograd.grad(out, inputs, torch.ones_like(out))
        return clock() - start

    with _by_itself(), torch.set_grad_enabled(bool(inputs)):
        for run in rivals.values():
            step(run)
        least = {name: step(run) for name, run in rivals.items()}
        fitting = int(SECONDS / max(*least.values(), 1e-9))
        for _ in range(min(ROUNDS, max(LEAST_ROUNDS, fitting)) - 1):
            least = {name: min(least[name], step(run)) for name, run in rivals.items()}
    return least


@contextmanager
def _by_itself() -> Iterator[None]:
    """Nothing of what goes on around a measurement in it, and nothing of it left behind."""
    unhooked = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with torch.inference_mode(False), torch.autocast("cpu", enabled=False), unhooked:
        yield


def _checked(stored: dict[str, Any], own: Machine, path: Path) -> dict[str, dict[str, float]]:
    """The times in a file. Raises `InputError` for what is no such file, or another machine's."""
    if stored.keys() != {"machine", "seconds"} or not isinstance(stored["seconds"], dict):
        raise InputError(f"{path} is damaged: expected machine and seconds")
    if stored["machine"] != json.loads(json.dumps(own)):
        raise InputError(f"{path} was measured on another machine")
    for bucket, times in stored["seconds"].items():
        if not _are_times(times):
            raise InputError(f"{path} is damaged: {bucket!r} has no times of kernels")
    return stored["seconds"]


def _are_times(times: Any) -> bool:
    """Whether a value is the times of two kernels or more."""
    return (
        isinstance(times, dict)
        and len(times) > 1
        and all(isinstance(duration, float) and duration >= 0 for duration in times.values())
    )


_way: Way | None = None
_given: Calibration | None = None
_here: dict[int, Calibration] = {}


def way() -> Way:
    """How kernels are chosen: as `using` says, else as NORMATTN_KERNELS does, else "fastest".

    Raises `InputError` for another word.
    """
    return _way or _checked_way(os.environ.get(VARIABLE) or "fastest")


def _checked_way(name: str) -> Way:
    ways: tuple[Way, ...] = get_args(Way)
    for known in ways:
        if name == known:
            return known
    raise unknown(VARIABLE, name, ways)


@contextmanager
def using(chosen: Way, times: Calibration | None = None) -> Iterator[None]:
    """Choose kernels so inside, in the whole process; by `times`, if given, from here on down."""
    global _way, _given  # The backward's own threads recompute what must come out the same.
    before = _way, _given
    _way, _given = chosen, times or _given
    try:
        yield
    finally:
        _way, _given = before


def calibration() -> Calibration:
    """The times to choose by: this machine's, with as many threads as torch has now."""
    if _given is not None:
        return _given
    threads = torch.get_num_threads()
    if threads not in _here:
        _here[threads] = Calibration.here()
    return _here[threads]


def calibrated(problem: Problem) -> Bucket | None:
    """The bucket by whose times to choose; None where the portable choice stands.

    Processes that compute together must choose alike, and a compiler cannot measure.
    """
    if torch.compiler.is_compiling() or way() == "portable" or _in_company():
        return None
    return Bucket.of(problem)


def _in_company() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def can_measure(problem: Problem) -> bool:
    """Whether to measure now: not on behalf of tensors without numbers, nor while it is watched."""
    tensors = (x for x in problem.tensors if x is not None)
    plain = all(type(x) in (torch.Tensor, torch.nn.Parameter) for x in tensors)
    return plain and torch._C._len_torch_dispatch_stack() == 0
