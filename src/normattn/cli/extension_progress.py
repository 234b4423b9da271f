"""How far an extension's readings are: a bar on a terminal, a line per reading elsewhere."""

from __future__ import annotations

import time

from rich.progress import TextColumn

from normattn.lab.report.terminal import Bar
from normattn.lab.sweep.plan import duration

_QUADRATIC_FROM = 16_384
"""Tokens at which attention takes about as long as all else, in small models."""


def work(length: int) -> float:
    """About how much a window of `length` tokens costs, in tokens of a short one."""
    return length * (1 + length / _QUADRATIC_FROM)


class ReadingProgress(Bar):
    """Counts readings by their work, and says what time is left at the speed so far."""

    def __init__(self, total: float) -> None:
        super().__init__(TextColumn(" {task.fields[left]}"))
        self._task = self.progress.add_task("reading", total=total, left="")
        self._total, self._done, self._measured = total, 0.0, 0.0
        self._started = time.monotonic()

    def begin(self, description: str) -> None:
        """Say what is being read."""
        self.progress.update(self._task, description=description)

    def done(self, amount: float, description: str = "") -> None:
        """Some work is done: measured just now where `description` says so, else known before."""
        self._done += amount
        if description:
            self._measured += amount
        left = self._left()
        self.progress.update(self._task, completed=self._done, left=left)
        if description and not self.console.is_terminal:
            self.say(f"{description}: {left or 'done'}")

    def _left(self) -> str:
        if not self._measured or self._done >= self._total:
            return ""
        rate = (time.monotonic() - self._started) / self._measured
        return f"about {duration(rate * (self._total - self._done))} left"
