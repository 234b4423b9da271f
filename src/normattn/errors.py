"""What can go wrong, as types: one clear sentence each, printed without a traceback."""

from __future__ import annotations


class NormattnError(Exception):
    """Base of every error that this library raises on purpose."""


class InputError(NormattnError, ValueError):
    """A value from outside cannot be used; the message says what, where, what was expected."""


class DivergedError(NormattnError):
    """A loss became NaN or infinite.

    `step` is the optimiser step, `where` the module whose output was first not finite, and
    `checkpoint` the last good checkpoint (None when there is none yet).
    """

    def __init__(self, step: int, where: str, checkpoint: str | None) -> None:
        self.step = step
        self.where = where
        self.checkpoint = checkpoint
        kept = f"the last good checkpoint is {checkpoint}" if checkpoint else "no checkpoint exists"
        super().__init__(f"the loss is not finite at step {step}; it began in {where}; {kept}")


class Interrupted(NormattnError):
    """Work was stopped by a signal after its state was saved; the same command goes on."""
