"""Cells as child processes of this one, each in a device slot: a GPU, or a share of the cores."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, ClassVar

from pydantic import Field

from normattn.lab.sweep.launch.child import Child
from normattn.lab.sweep.launch.seam import Job, Launcher, Needs, Outcome, Session

VISIBLE = "CUDA_VISIBLE_DEVICES"


class Local(Launcher):
    """Child processes on this machine.

    `devices` are the GPUs to use, as CUDA_VISIBLE_DEVICES names them (none: all that torch sees,
    where the cells' `device` is auto or cuda). A cell sees one of them alone; more cells than
    devices share them evenly.
    """

    name: ClassVar[str] = "local"
    here: ClassVar[bool] = True

    devices: Annotated[tuple[int | str, ...], Field(min_length=1)] | None = None

    def slots(self, needs: Needs) -> int:
        """A cell on each GPU; on a CPU as many as the cores have threads for."""
        if needs.device.startswith("cuda:"):
            return 1  # All of them on the one that is named.
        return len(self._gpus(needs)) or max(1, cores() // needs.cores)

    @contextmanager
    def session(self, jobs: Sequence[Job], at_once: int, needs: Needs) -> Iterator[Session]:
        """Start children as slots become free."""
        gpus = self._gpus(needs)
        yield _Children(jobs, [gpus[n % len(gpus)] if gpus else None for n in range(at_once)])

    def said(self) -> str:
        """Which devices."""
        named = "" if self.devices is None else f" on GPU {', '.join(map(str, self.devices))}"
        return f"child processes of this machine{named}"

    def _gpus(self, needs: Needs) -> tuple[str, ...]:
        """What each slot's CUDA_VISIBLE_DEVICES is made of; empty where a slot is of cores."""
        if needs.device not in ("auto", "cuda"):
            return ()
        return tuple(map(str, self.devices)) if self.devices is not None else visible_gpus()


def visible_gpus() -> tuple[str, ...]:
    """The GPUs that torch sees here, by the names that CUDA_VISIBLE_DEVICES takes."""
    import torch  # Hosts that only start children do without it.

    if not torch.cuda.is_available():
        return ()
    count = torch.cuda.device_count()
    named = [part.strip() for part in os.environ.get(VISIBLE, "").split(",") if part.strip()]
    return tuple(named[:count]) if named else tuple(str(n) for n in range(count))


def cores() -> int:
    """How many processors this process may use: fewer than there are in a scheduler's share."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _Children(Session):
    """At most one child in each of `slots`, which are GPUs or, without a name, shares of cores."""

    def __init__(self, jobs: Sequence[Job], slots: Sequence[str | None]) -> None:
        self._waiting = list(jobs)
        self._free = list(slots)
        self._running: list[tuple[Child, str | None]] = []
        self._ended: list[Outcome] = []

    def look(self) -> tuple[list[Job], list[Outcome]]:
        """Fill the free slots, and collect who ended."""
        while self._waiting and self._free:
            slot = self._free.pop(0)
            alone = {} if slot is None else {VISIBLE: slot}
            self._running.append((Child(self._waiting.pop(0), alone), slot))
        for child, slot in [pair for pair in self._running if pair[0].done()]:
            self._running.remove((child, slot))
            self._free.append(slot)
            self._ended.append(child.outcome())
        return [child.job for child, _ in self._running], self._ended

    def unfinished(self) -> int:
        """Those waiting and those at work."""
        return len(self._waiting) + len(self._running)

    def stop(self) -> None:
        """Tell every child."""
        for child, _ in self._running:
            child.terminate()

    def stopped(self) -> bool:
        """Whether every child has ended."""
        return all(child.done() for child, _ in self._running)

    def kill(self) -> None:
        """Kill every child."""
        for child, _ in self._running:
            child.kill()
