"""The changes of a setting that the study `factors` tries, one at a time or joined by "+"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from normattn.errors import InputError
from normattn.lab.sweep.config import merged, value_at
from normattn.models.config import without_foreign

AS_PRESET, ENGLISH = "preset", "english"
# Half of the pairs of a rotation of base 130 finish a turn within 64 tokens, a quarter of base
# 10,000, whatever the size of the head; in the source's setting (512 tokens) half do.
TURNING = "RoPE(base=130)"


@dataclass(frozen=True)
class Change:
    """One change: `settings` by dotted name, `times` as products of the preset's own numbers.

    `position` is written behind the score's name. A setting of None falls back to its default.
    """

    words: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    times: Mapping[str, float] = field(default_factory=dict)
    position: str = ""

    def applied(self, training: Mapping[str, Any]) -> dict[str, Any]:
        """The preset's training settings with this change; unchanged if it has that block."""
        for name in self.times:
            if value_at(training, name) is None:
                raise InputError(f"{self.words}: {name} has no value here that could be multiplied")
        scaled = {name: self._scaled(training, name) for name in self.times}
        changed = {**self.settings, **scaled}
        if changed.get("model.block") == training["model"].get("block", "mha"):
            return dict(training)
        kept = {**training, "model": without_foreign(training["model"], changed.get("model.block"))}
        if "optimiser" in changed:  # Another one has settings of its own.
            kept.pop("optimiser", None)
        return merged(kept, changed)

    def _scaled(self, training: Mapping[str, Any], name: str) -> Any:
        """A number of the preset times its factor; of steps the whole number below."""
        value, factor = value_at(training, name), self.times[name]
        product = value * factor
        if isinstance(value, int) and name != "steps" and not float(product).is_integer():
            raise InputError(
                f"{self.words}: {name} is {value} here, and {factor:g} of it is no whole number; "
                f"set training.{name} to a multiple of {1 / factor:g}"
            )
        return type(value)(product)


def _longer(times: int) -> Mapping[str, float]:
    """A longer training length with as many tokens in a step."""
    return {"model.train_length": float(times), "batch_size": 1 / times}


# Tiger's rate is relative to the size of each parameter (kexue 9512); not searched for in this
# setting, so that row says what this rate does, not what Tiger can do.
TIGER = {"optimiser": {"name": "tiger", "lr": 5e-3}}
HEADS = "model.heads"
CHANGES: Mapping[str, Change] = {
    AS_PRESET: Change("the unchanged preset"),
    "base-130": Change("RoPE with base 130", position=TURNING),
    "length-2x": Change("twice the training length", times=_longer(2)),
    "length-4x": Change("four times the training length", times=_longer(4)),
    "no-tiling": Change("no repeated text", {"data.tiled_fraction": 0.0}),
    "steps-third": Change("a third of the steps", times={"steps": 1 / 3}),
    "steps-half": Change("half of the steps", times={"steps": 0.5}),
    "steps-4x": Change("four times the steps", times={"steps": 4.0}),
    "one-head": Change("one head", {HEADS: 1}),
    "heads-2x": Change("heads twice as large, base 130", times={HEADS: 1 / 2}, position=TURNING),
    "heads-4x": Change("heads 4 times as large, base 130", times={HEADS: 1 / 4}, position=TURNING),
    "deepnorm": Change("DeepNorm", {"model.placement": "DeepNorm"}),
    "preln": Change("PreLN", {"model.placement": "PreLN"}),
    "tiger": Change("Tiger at 5e-3, not searched for", TIGER),
    "gau": Change("gated attention units", {"model.block": "gau"}),
    "separate-qk": Change(
        "linear W_q and W_k in place of γ", {"model.separate_qk": True, "model.gamma_std": None}
    ),
    "third-rope": Change("a third of the pairs turn", position="PRoPE(fraction=0.33)"),
    "mha": Change("multi-head attention and SwiGLU", {"model.block": "mha", HEADS: 4}),
    "layers-6": Change("6 layers", {"model.layers": 6}),
    "layers-12": Change("12 layers", {"model.layers": 12}),
    ENGLISH: Change("English text"),
}
