"""What is measured, as data: entries timed together, and goals for their ratios."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import torch

from normattn.bench.settings import Settings
from normattn.lab.runs.timing import Step

# "memory" is the peak of a step that ran before; "first memory" that of the first one, which also
# compiles and keeps what libraries compile and keep for its shapes.
Quantity = Literal["time", "memory", "first memory"]

# A goal counts as met within this share of it.
TOLERANCE = 0.05


@dataclass(frozen=True)
class Work:
    """What an entry must do at least: operations of products, bytes moved, exponentials."""

    flops: float
    bytes: float
    exps: float = 0.0


@runtime_checkable
class Entry(Protocol):
    """One thing that can be run: a frozen value, so that a fresh process can be given it."""

    def build(self) -> Step:
        """Make its tensors or its model, and return the step that is timed."""
        ...

    def work(self) -> Work:
        """The least work of one step, whatever way it is done."""
        ...

    def small(self) -> Entry:
        """The same at a size that takes no memory: loads what is loaded on first use."""
        ...


@dataclass(frozen=True)
class Goal:
    """The ratio of two entries, ours / peer, and what it should be.

    `at_most` bounds time or memory against the peer; `at_least` says how many times faster or
    smaller ours should be. With neither the ratio is reported and claims nothing.
    """

    ours: str
    peer: str
    of: Quantity = "time"
    at_most: float | None = None
    at_least: float | None = None

    @property
    def limit(self) -> float | None:
        """The goal as a ratio ours / peer."""
        return 1 / self.at_least if self.at_least is not None else self.at_most

    def met(self, ratio: float) -> bool | None:
        """Whether `ratio` is within 5 % of the goal; None where nothing is claimed."""
        return None if self.limit is None else ratio <= self.limit * (1 + TOLERANCE)

    def __str__(self) -> str:
        if self.at_least is not None:
            return f"≥ {self.at_least:g} × {'faster' if self.of == 'time' else 'less'}"
        return "–" if self.at_most is None else f"≤ {self.at_most:g}"


@dataclass(frozen=True)
class Case:
    """One interleaved run: named entries, and the goals that compare them."""

    name: str
    entries: Mapping[str, Entry]
    goals: tuple[Goal, ...]
    dtype: torch.dtype = field(default=torch.float32)

    def __post_init__(self) -> None:
        named = {name for goal in self.goals for name in (goal.ours, goal.peer)}
        if not self.goals or not named <= set(self.entries):
            raise ValueError(f"the goals of {self.name} do not fit its entries")

    @property
    def timed(self) -> dict[str, Entry]:
        """The entries whose time a goal asks for."""
        return self.asked("time")

    @property
    def digest(self) -> str:
        """12 digits that change when anything about the case does."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:12]

    def asked(self, of: Quantity) -> dict[str, Entry]:
        """The entries of which a goal asks for this quantity."""
        names = {name for goal in self.goals if goal.of == of for name in (goal.ours, goal.peer)}
        return {name: entry for name, entry in self.entries.items() if name in names}


@dataclass(frozen=True)
class Suite:
    """Cases that belong together; `packages` are the peers that must be installed."""

    name: str
    summary: str
    cases: Callable[[Settings], list[Case]]
    packages: tuple[str, ...] = ()
