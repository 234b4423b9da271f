"""Linear + cross-entropy over 32,768 words against `F.cross_entropy` on the whole matrix."""

from __future__ import annotations

import dataclasses

from normattn.bench.case import Case, Goal, Suite
from normattn.bench.settings import Settings
from normattn.bench.vocabulary import Vocabulary

_TOKENS, _WORDS = 4096, 32768
_TIME, _MEMORY = 0.90, 0.15


def cases(settings: Settings) -> list[Case]:
    """Loss and gradients, in every precision; goals are those of float32."""
    return [_case(precision, settings) for precision in settings.dtypes]


def _case(precision: str, settings: Settings) -> Case:
    tokens, words = (128, 512) if settings.quick else (_TOKENS, _WORDS)
    dtype = settings.dtypes[precision]
    ours = Vocabulary(tokens, words, dtype, device=settings.device)
    claimed = precision == "fp32"
    goals = (
        Goal("chunks", "F.cross_entropy", at_most=_TIME if claimed else None),
        Goal("chunks", "F.cross_entropy", of="memory", at_most=_MEMORY if claimed else None),
    )
    entries = {"chunks": ours, "F.cross_entropy": dataclasses.replace(ours, chunked=False)}
    return Case(f"linear + cross-entropy {precision}, V {words}", entries, goals, dtype)


SUITE = Suite("cross-entropy", "linear + cross-entropy at V = 32k, time and memory", cases)
