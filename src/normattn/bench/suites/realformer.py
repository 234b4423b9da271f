"""Residual scores (RealFormer): a stack of six blocks with them, without, and with stored ones.

All three are the same blocks, forward and backward. A whole training step stands beside that of
x-transformers with `residual_attn=True`, which stores the scores.
"""

from __future__ import annotations

from normattn.bench.case import Case, Entry, Goal, Suite
from normattn.bench.models import SMALL, X_TRANSFORMERS, ModelSize, TrainingStep
from normattn.bench.settings import Settings
from normattn.bench.stacks import StackPass

SCORE = "Baseline-RealFormer"
LENGTHS = (1024, 4096)
# So many rows at a time: as many tokens at every length.
_TOKENS = 4096
_TIME, _MEMORY, _FASTER, _FASTER_THAN_PEER = 1.02, 1.2, 2.5, 2.4


def cases(settings: Settings) -> list[Case]:
    """Causal at both lengths, an encoder at the shorter one, and a training step in float32."""
    lengths = (64,) if settings.quick else LENGTHS
    stacks = [_stack(length, True, settings) for length in lengths]
    return [*stacks, _stack(lengths[0], False, settings), _step(settings)]


def _stack(length: int, causal: bool, settings: Settings) -> Case:
    batch = 1 if settings.quick else max(1, _TOKENS // length)
    layers = 2 if settings.quick else 6

    def entry(score: str, stored: bool = False) -> Entry:
        return StackPass(
            score, length, batch, causal, stored, layers=layers, device=settings.device
        )

    entries = {
        "RealFormer": entry(SCORE),
        "Baseline": entry("Baseline"),
        "stored scores": entry(SCORE, stored=True),
    }
    goals = (
        Goal("RealFormer", "Baseline", at_most=_TIME),
        Goal("RealFormer", "stored scores", at_least=_FASTER),
        Goal("RealFormer", "Baseline", of="memory", at_most=_MEMORY),
        Goal("RealFormer", "stored scores", of="memory"),
    )
    kind = "causal" if causal else "encoder"
    return Case(f"residual scores fp32 f+b, {kind}, {layers} layers, N {length}", entries, goals)


def _step(settings: Settings) -> Case:
    size = SMALL if settings.quick else ModelSize(length=2048, batch=2)
    entries: dict[str, Entry] = {
        "RealFormer": TrainingStep("normattn", SCORE, size=size, device=settings.device),
        X_TRANSFORMERS: TrainingStep(X_TRANSFORMERS, SCORE, size=size, device=settings.device),
    }
    goals = (
        Goal("RealFormer", X_TRANSFORMERS, at_least=_FASTER_THAN_PEER),
        Goal("RealFormer", X_TRANSFORMERS, of="memory"),
    )
    return Case(f"training step fp32, residual scores, N {size.length}", entries, goals)


SUITE = Suite(
    "realformer",
    "a stack with residual scores against the same without and with stored ones",
    cases,
    ("x-transformers",),
)
