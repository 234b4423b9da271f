"""A whole training step against x-transformers and transformers' Llama."""

from __future__ import annotations

from normattn.bench.case import Case, Entry, Goal, Suite
from normattn.bench.models import LLAMA, SMALL, X_TRANSFORMERS, ModelSize, TrainingStep
from normattn.bench.settings import Settings

VARIANTS = ("KNA", "CosA", "QKRMSNorm", "Baseline-logn", "KNA-logn", "CosA-logn")
_NO_SLOWER, _VARIANT = 1.0, 1.05


def cases(settings: Settings) -> list[Case]:
    """Every precision: Baseline against the peers, the variants against Baseline."""
    return [_case(precision, settings) for precision in settings.dtypes]


def _case(precision: str, settings: Settings) -> Case:
    size = SMALL if settings.quick else ModelSize()
    half = precision == "bf16"

    def step(family: str, score: str = "Baseline") -> Entry:
        return TrainingStep(family, score, half, size, settings.device)  # type: ignore[arg-type]

    entries = {"Baseline": step("normattn")}
    entries |= {score: step("normattn", score) for score in VARIANTS}
    entries |= {X_TRANSFORMERS: step("x-transformers"), LLAMA: step("transformers")}
    goals = [Goal("Baseline", peer, at_most=_NO_SLOWER) for peer in (X_TRANSFORMERS, LLAMA)]
    goals += [Goal(score, "Baseline", at_most=_VARIANT) for score in VARIANTS]
    goals += [Goal("Baseline", peer, of="memory") for peer in (X_TRANSFORMERS, LLAMA)]
    name = f"training step {precision}, N {size.length}"
    return Case(name, entries, tuple(goals), settings.dtypes[precision])


SUITE = Suite(
    "train-step",
    "a whole training step against x-transformers and transformers' Llama (sdpa)",
    cases,
    ("x-transformers", "transformers"),
)
