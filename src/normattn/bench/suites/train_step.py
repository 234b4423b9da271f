"""A whole training step against x-transformers and transformers' Llama."""

from __future__ import annotations

from normattn.bench.case import Case, Entry, Goal, Suite
from normattn.bench.models import LLAMA, SMALL, X_TRANSFORMERS, Family, ModelSize, TrainingStep
from normattn.bench.settings import Settings

VARIANTS = ("KNA", "CosA", "QKRMSNorm", "Baseline-logn", "KNA-logn", "CosA-logn")
_NO_SLOWER, _VARIANT, _ALIBI_FASTER = 1.0, 1.05, 1.35


def cases(settings: Settings) -> list[Case]:
    """Every precision: rotary positions at 512 tokens, ALiBi at 2048."""
    return [
        make(precision, settings) for make in (_rotary, _alibi) for precision in settings.dtypes
    ]


def _rotary(precision: str, settings: Settings) -> Case:
    size = SMALL if settings.quick else ModelSize()
    half = precision == "bf16"

    def step(family: Family, score: str = "Baseline") -> Entry:
        return TrainingStep(family, score, half, size, settings.device)

    entries = {score: step("normattn", score) for score in ("Baseline", *VARIANTS)}
    entries |= {X_TRANSFORMERS: step(X_TRANSFORMERS), LLAMA: step(LLAMA)}
    goals = [Goal("Baseline", peer, at_most=_NO_SLOWER) for peer in (X_TRANSFORMERS, LLAMA)]
    goals += [Goal(score, "Baseline", at_most=_VARIANT) for score in VARIANTS]
    goals += [Goal("Baseline", peer, of="memory") for peer in (X_TRANSFORMERS, LLAMA)]
    name = f"training step {precision}, N {size.length}"
    return Case(name, entries, tuple(goals), settings.dtypes[precision])


def _alibi(precision: str, settings: Settings) -> Case:
    """As many tokens in fewer, longer rows."""
    size = SMALL if settings.quick else ModelSize(length=2048, batch=2)
    half, score = precision == "bf16", "Baseline-ALiBi"
    entries: dict[str, Entry] = {
        "ALiBi": TrainingStep("normattn", score, half, size, settings.device),
        X_TRANSFORMERS: TrainingStep(X_TRANSFORMERS, score, half, size, settings.device),
    }
    goals = (
        Goal("ALiBi", X_TRANSFORMERS, at_least=_ALIBI_FASTER),
        Goal("ALiBi", X_TRANSFORMERS, of="memory"),
    )
    name = f"training step {precision}, ALiBi, N {size.length}"
    return Case(name, entries, goals, settings.dtypes[precision])


SUITE = Suite(
    "train-step",
    "a whole training step against x-transformers and transformers' Llama (sdpa)",
    cases,
    ("x-transformers", "transformers"),
)
