"""An attention layer of transformers' Llama, extended, against itself with the stock kernel."""

from __future__ import annotations

import torch

from normattn.bench.case import Case, Entry, Goal, Suite
from normattn.bench.extending import OneLayer
from normattn.bench.settings import Settings

# The ratio to the layer as it is, at most: a prefill and a step. A moving spectrum attends block by
# block, for which a prefill claims nothing.
_AT_MOST: dict[str, tuple[float | None, float]] = {
    "ReRoPE-logn+": (1.3, 1.2),
    "LeakyReRoPE(s=4)-logn+": (1.3, 1.2),
    "SelfExtend(group=8)": (1.3, 1.2),
    "YaRN(factor=4)-logn+": (1.1, 1.1),
    "NTK(factor=4)": (1.05, 1.05),
    "DynamicNTK": (None, 1.2),
}


def cases(settings: Settings) -> list[Case]:
    """The longest length in every precision: a prefill, and a decoding step after as many."""
    length = settings.lengths[-1]
    return [
        _case(precision, dtype, length, decoding, settings)
        for precision, dtype in settings.dtypes.items()
        for decoding in (False, True)
    ]


def _case(
    precision: str, dtype: torch.dtype, length: int, decoding: bool, settings: Settings
) -> Case:
    def layer(method: str | None) -> Entry:
        return OneLayer(length, dtype, method, decoding, settings.device)

    entries = {"sdpa": layer(None)} | {method: layer(method) for method in _AT_MOST}
    goals = tuple(
        Goal(method, "sdpa", at_most=limits[decoding]) for method, limits in _AT_MOST.items()
    )
    phase = "a step after" if decoding else "prefill of"
    return Case(f"extended layer {precision}, {phase} {length}", entries, goals, dtype)


SUITE = Suite(
    "extend",
    "a 9 × 64-head layer of transformers' Llama, extended, against itself with sdpa",
    cases,
    ("transformers",),
)
