"""The evaluation of the main job's presets, token for token against their training."""

from __future__ import annotations

from dataclasses import replace

from normattn.bench.case import Case, Entry, Goal, Suite
from normattn.bench.scoring import Scoring, Training
from normattn.bench.settings import Settings
from normattn.bench.training import MODELS, PresetName

METHODS = {"as is": "", "YaRN": "YaRN", "ReRoPE": "ReRoPE"}
_AT_MOST = 0.4
_TRAINING = "training on as many tokens"


def cases(settings: Settings) -> list[Case]:
    """Every preset in every precision, as it is and under a method of either kind."""
    return [_case(preset, name, settings) for preset in MODELS for name in settings.dtypes]


def _case(preset: PresetName, precision: str, settings: Settings) -> Case:
    whole = Scoring(preset, precision == "bf16", device=settings.device)
    plain = whole.small() if settings.quick else whole
    entries: dict[str, Entry] = {
        f"scoring, {name}": replace(plain, method=method) for name, method in METHODS.items()
    }
    goals = tuple(Goal(name, _TRAINING, at_most=_AT_MOST) for name in entries)
    entries[_TRAINING] = Training(plain)
    name = f"scoring with preset {preset}, {precision}"
    return Case(name, entries, goals, settings.dtypes[precision])


SUITE = Suite(
    "scoring", "evaluation by the presets' protocols, token for token against their training", cases
)
