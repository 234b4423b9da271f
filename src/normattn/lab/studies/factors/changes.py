"""The changes of a setting, each a value: what it is called, what it sets, what it multiplies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from normattn.errors import unknown
from normattn.lab.sweep.settings import merged
from normattn.models.config import without_foreign

AS_PRESET, ENGLISH = "preset", "english"


@dataclass(frozen=True)
class Change:
    """One change of the setting: `settings` by dotted name, products of the preset's own numbers
    (`times`), and the base of the rotation.
    """

    words: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    times: Mapping[str, float] = field(default_factory=dict)
    base: int | None = None

    def applied(self, training: Mapping[str, Any]) -> dict[str, Any]:
        """The preset's training settings with this change; as they are if it has that block."""
        scaled = {
            name: type(value := _value(training, name))(value * factor)
            for name, factor in self.times.items()
        }
        changed = {**self.settings, **scaled}
        if changed.get("model.block") == training["model"].get("block", "mha"):
            return dict(training)
        kept = {**training, "model": without_foreign(training["model"], changed.get("model.block"))}
        if "optimiser" in changed:  # Another one has settings of its own.
            del kept["optimiser"]
        return merged(kept, changed)


def _value(settings: Mapping[str, Any], name: str) -> Any:
    value: Any = settings
    for part in name.split("."):
        value = value[part]
    return value


def _longer(times: int) -> Mapping[str, float]:
    """A longer training length with as many tokens in a step."""
    return {"model.train_length": float(times), "batch_size": 1 / times}


# Half of the pairs of a rotation of base 130 finish a turn within 64 tokens, a quarter of base
# 10,000, whatever the size of the head; in the source's setting (512 tokens) half do.
TURNING = 130
# Relative to the size of each parameter (kexue 9512); not searched for in this setting, so a row
# with Tiger says what this rate does, not what Tiger can do.
TIGER = 5e-3
CHANGES: Mapping[str, Change] = {
    AS_PRESET: Change("the preset as it is"),
    "base-130": Change("RoPE with base 130", base=TURNING),
    "length-2x": Change("twice the training length", times=_longer(2)),
    "length-4x": Change("four times the training length", times=_longer(4)),
    "no-tiling": Change("no tiled text", {"data.tiled_fraction": 0.0}),
    "steps-third": Change("a third of the steps", times={"steps": 1 / 3}),
    "steps-half": Change("half of the steps", times={"steps": 0.5}),
    "steps-4x": Change("four times the steps", times={"steps": 4.0}),
    "one-head": Change("one head", {"model.heads": 1}),
    "heads-2x": Change(
        "heads twice as large, base 130", times={"model.heads": 1 / 2}, base=TURNING
    ),
    "heads-4x": Change(
        "heads 4 times as large, base 130", times={"model.heads": 1 / 4}, base=TURNING
    ),
    "deepnorm": Change("DeepNorm", {"model.placement": "DeepNorm"}),
    "preln": Change("PreLN", {"model.placement": "PreLN"}),
    "tiger": Change(
        "Tiger at 5e-3, not searched for", {"optimiser": {"name": "tiger", "lr": TIGER}}
    ),
    "gau": Change("gated attention units", {"model.block": "gau"}),
    "mha": Change("multi-head attention and SwiGLU", {"model.block": "mha", "model.heads": 4}),
    "layers-6": Change("6 layers", {"model.layers": 6}),
    "layers-12": Change("12 layers", {"model.layers": 12}),
    ENGLISH: Change("English text"),
}


def parts(change: str) -> list[Change]:
    """The single changes that a name joins; `InputError` names the nearest known one."""
    for name in change.split("+"):
        if name not in CHANGES:
            raise unknown("change", name, CHANGES, ", and several of them joined by +")
    return [CHANGES[name] for name in change.split("+")]


def words(change: str) -> str:
    """A change as the page calls it."""
    return " + ".join(part.words for part in parts(change))
