"""The rotary spectra that a Llama-shaped configuration and a score name in different words.

A spectrum as it was trained, not a method afterwards: `linear` is PI, `llama3` is Llama3.
"""

from __future__ import annotations

from typing import Any

from normattn.errors import InputError
from normattn.score.parts import RopeScaling
from normattn.score.parts.rope_scaling import PI, Llama3

ROPE_TYPES = ("default", "linear", "llama3")
"""Those of transformers that some spectrum here equals at every length."""
ROPE_KEYS = frozenset(
    {
        *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor"),
        *("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    }
)
"""What these kinds are told. Others may do more than turn, such as Ministral 3's temperature."""


def spectrum_of(rope: dict[str, Any], train_length: int) -> RopeScaling | None:
    """What `rope_parameters` say, for a score whose training length is `train_length`.

    Llama3 counts turns within the training length, `llama3` within
    `original_max_position_embeddings`: the ends of its blend are scaled by their ratio. The kind
    must be one of `ROPE_TYPES`.
    """
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return None
    factor = float(rope["factor"])
    if kind == "linear":
        return PI(factor=factor)
    longer = train_length / rope["original_max_position_embeddings"]
    low, high = (longer * rope[f"{end}_freq_factor"] for end in ("low", "high"))
    return Llama3(factor=factor, low=low, high=high)


def rope_parameters(spectrum: RopeScaling | None, base: float, train_length: int) -> dict[str, Any]:
    """The `rope_parameters` of a score's spectrum; `InputError` where they cannot say it."""
    theta = {"rope_theta": base}
    if spectrum is None:
        return {"rope_type": "default", **theta}
    if isinstance(spectrum, PI):
        return {"rope_type": "linear", "factor": spectrum.stretch, **theta}
    if isinstance(spectrum, Llama3):
        ends = {"low_freq_factor": spectrum.low, "high_freq_factor": spectrum.high}
        known = {"factor": spectrum.stretch, "original_max_position_embeddings": train_length}
        return {"rope_type": "llama3", **known, **ends, **theta}
    raise InputError(f"the spectrum {spectrum.name} has no counterpart in Llama, Qwen2 or Qwen3")
