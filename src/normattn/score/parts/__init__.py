"""The components of scores, by topic, and the base classes of new ones.

A new component is one class in any file: `from normattn.score.parts import Variant, register`.
"""

from normattn.score.norms import Normalisation
from normattn.score.parts.base import Part, Slot, by_length, find, number, one_of, parts, register
from normattn.score.parts.bias import BiasPart, FoX, PairBiasPart
from normattn.score.parts.long_context import ChunkRemapping, PositionRemapping
from normattn.score.parts.masks_and_layouts import Chunked, Layout, Packed, SlidingWindow
from normattn.score.parts.qk_norm import ScaledVariant, SidedNorm, Variant
from normattn.score.parts.residual import ResidualPart
from normattn.score.parts.rope import Position, RotaryPosition, RotateFirst, rope_frequencies
from normattn.score.parts.rope_scaling import FactorScaling, RopeScaling
from normattn.score.parts.scale import LengthScaling
from normattn.score.parts.softmax import (
    Differential,
    DifferentialV2,
    Gate,
    GatePart,
    NormaliserPart,
    Selective,
    Sink,
    SoftCap,
)
from normattn.score.parts.values import XSA, ValuePart, VORoPE

__all__ = [
    "BiasPart",
    "ChunkRemapping",
    "Chunked",
    "Differential",
    "DifferentialV2",
    "FactorScaling",
    "FoX",
    "Gate",
    "GatePart",
    "Layout",
    "LengthScaling",
    "Normalisation",
    "NormaliserPart",
    "Packed",
    "PairBiasPart",
    "Part",
    "Position",
    "PositionRemapping",
    "ResidualPart",
    "RopeScaling",
    "RotaryPosition",
    "RotateFirst",
    "ScaledVariant",
    "Selective",
    "SidedNorm",
    "Sink",
    "SlidingWindow",
    "Slot",
    "SoftCap",
    "VORoPE",
    "ValuePart",
    "Variant",
    "XSA",
    "by_length",
    "find",
    "number",
    "one_of",
    "parts",
    "register",
    "rope_frequencies",
]
