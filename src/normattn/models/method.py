"""A post-hoc method on a trained model: applied as a value, undone exactly."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from normattn.score import Score, ScoreSpec


class MethodHandle:
    """A method that is switched on; `.remove()` or leaving the `with` block switches it off.

    Only the active spec of each `Score` changes: no weight, no buffer, no train or eval mode.
    `specs` has one for each of `scores`; `.spec` is the whole model's. Removing twice is harmless.
    """

    def __init__(
        self, scores: Sequence[Score], specs: Sequence[ScoreSpec], spec: ScoreSpec
    ) -> None:
        self.spec = spec
        self._before: list[tuple[Score, ScoreSpec]] = []
        try:
            for score, own in zip(scores, specs, strict=True):
                before = score.spec
                score.use(own)
                self._before.append((score, before))
        except BaseException:
            self.remove()
            raise

    @property
    def active(self) -> bool:
        """Whether the method is still switched on."""
        return bool(self._before)

    def remove(self) -> None:
        """Give every `Score` the spec that it had before."""
        while self._before:
            score, spec = self._before.pop()
            score.use(spec)

    def __enter__(self) -> MethodHandle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()
