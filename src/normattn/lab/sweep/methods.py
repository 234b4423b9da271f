"""Which post-hoc methods a trained score can take, and the rows that a table cannot have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from normattn.errors import InputError
from normattn.score.parts import parts
from normattn.score.spec import ScoreSpec

ALL = "all"
WITH_LOGN = ("NTK", "YaRN", "ReRoPE")
"""The methods that are also read together with post-hoc log-n scaling."""


def post_hoc_methods(spec: ScoreSpec, factor: float = 8.0) -> tuple[str, ...]:
    """Every registered post-hoc method that `spec` can take, as texts for `with_method`.

    Each part stands alone with its default parameters, in the order of slots and names; then come
    `NTK-logn+`, `YaRN-logn+` and `ReRoPE-logn+`. The model as it is is not among them. `factor` is
    what stretching methods stretch by; it only decides whether their parameters are in range.
    """
    return tuple(method for method in candidates() if refusal(spec, method, factor) is None)


def left_out(spec: ScoreSpec, factor: float = 8.0) -> tuple[str, ...]:
    """A sentence for each registered post-hoc method that `spec` cannot take."""
    reasons = ((method, refusal(spec, method, factor)) for method in candidates())
    return tuple(
        f"{spec.name} with {method} is left out: {why}"
        for method, why in reasons
        if why is not None
    )


def refusal(spec: ScoreSpec, method: str, factor: float = 8.0) -> str | None:
    """Why `spec` cannot take `method`; None when it can."""
    try:
        spec.with_method(method).resolve(factor=factor)
    except InputError as error:
        return str(error)
    return None


def candidates() -> tuple[str, ...]:
    """Every registered post-hoc method by itself, then those read with log-n scaling too."""
    alone = [name for name, part in parts().items() if part.when != "trained-in"]
    together = [f"{name}-logn+" for name in WITH_LOGN if name in alone]
    return (*alone, *together)


@dataclass(frozen=True)
class Omission:
    """A score that cannot be trained (no `method`), or not be read with a method, and why."""

    variant: str
    method: str
    reason: str

    @property
    def sentence(self) -> str:
        """The row, and why it is left out."""
        return f"{_row(self.variant, self.method)} is left out: {self.reason}"


def grouped(omissions: Sequence[Omission]) -> list[str]:
    """One sentence for all rows that are left out for one reason, whatever their names."""
    methods: dict[tuple[str, str], list[Omission]] = {}
    for omission in omissions:
        methods.setdefault((omission.variant, _pattern(omission)), []).append(omission)
    groups: dict[tuple[str, tuple[str, ...]], list[Omission]] = {}
    for (_, pattern), group in methods.items():
        alike = tuple(omission.method for omission in group)
        groups.setdefault((pattern, alike), []).append(group[0])
    sentences = []
    for (_, alike), group in groups.items():
        if len(group) == 1 and len(alike) == 1:
            sentences.append(group[0].sentence)
            continue
        row = _row(", ".join(omission.variant for omission in group), ", ".join(alike))
        sentences.append(f"{row} are left out, as {group[0].reason}")
    return sentences


def _row(variant: str, method: str) -> str:
    return f"{variant} with {method}" if method else variant


def _pattern(omission: Omission) -> str:
    """The reason without the names of the row."""
    text = omission.reason
    for name, mask in ((omission.method, "METHOD"), (omission.variant, "VARIANT")):
        text = text.replace(name, mask) if name else text
    # Names print their parts in the order of slots: VARIANT-METHOD may be torn apart.
    words = [word for word in text.split() if "METHOD" not in word or word == "METHOD"]
    return " ".join(words)
