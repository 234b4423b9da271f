"""The main job's own training step: its operations' share of what products alone would take."""

from __future__ import annotations

from normattn.bench.case import Case, Entry, Goal, Suite
from normattn.bench.settings import Settings
from normattn.bench.training import MODELS, PresetName, PresetStep, Products

# 60 % of the rate of large products: of their time at most so many times.
_AT_MOST = round(1 / 0.6, 2)
_PRODUCTS = "its products alone"


def cases(settings: Settings) -> list[Case]:
    """Every preset in every precision; the goal is one of float32."""
    return [_case(preset, name, settings) for preset in MODELS for name in settings.dtypes]


def _case(preset: PresetName, precision: str, settings: Settings) -> Case:
    batch = 1 if settings.quick else None
    step = PresetStep(preset, precision == "bf16", settings.device, batch)
    entries: dict[str, Entry] = {"step": step, _PRODUCTS: Products(step)}
    limit = _AT_MOST if precision == "fp32" else None
    goal = Goal("step", _PRODUCTS, at_most=limit)
    dtype = settings.dtypes[precision]
    return Case(f"step of preset {preset}, {precision}", entries, (goal,), dtype)


SUITE = Suite(
    "preset-step", "the training step of the presets, against its products at their peak", cases
)
