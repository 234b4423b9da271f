"""How far an extension's readings are: a bar on a terminal, a line per reading elsewhere."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from normattn.sweep.plan import duration

_QUADRATIC_FROM = 16_384
"""Tokens at which attention takes about as long as all else, in small models."""


def work(length: int) -> float:
    """About how much a window of `length` tokens costs, in tokens of a short one."""
    return length * (1 + length / _QUADRATIC_FROM)


class ReadingProgress:
    """Counts readings by their work, and says what time is left at the speed so far."""

    def __init__(self, total: float) -> None:
        self._console = Console(file=sys.stderr, highlight=False)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %  {task.fields[left]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("reading", total=total, left="")
        self._total, self._done, self._measured = total, 0.0, 0.0
        self._started = time.monotonic()

    def __enter__(self) -> ReadingProgress:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def begin(self, what: str) -> None:
        """Say what is being read."""
        self._progress.update(self._task, description=what)

    def done(self, amount: float, what: str = "") -> None:
        """Some work is done: measured just now where `what` says so, else known before."""
        self._done += amount
        if what:
            self._measured += amount
        left = self._left()
        self._progress.update(self._task, completed=self._done, left=left)
        if what and not self._console.is_terminal:
            self.say(f"{what}: {left or 'done'}")

    def say(self, sentence: str) -> None:
        """A line that stays."""
        self._console.print(sentence, markup=False, soft_wrap=True)

    def _left(self) -> str:
        if not self._measured or self._done >= self._total:
            return ""
        rate = (time.monotonic() - self._started) / self._measured
        return f"about {duration(rate * (self._total - self._done))} left"
