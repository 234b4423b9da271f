"""Windows, chunks and documents that hide keys, and layouts: different scores in each layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from normattn.errors import InputError
from normattn.score.parts.base import QUARTER_LENGTH, Part, Parts, Slot, number, register
from normattn.score.parts.qk_norm import Baseline, ScaledVariant
from normattn.score.parts.rope import NoPE, RotaryPosition
from normattn.score.parts.rope_scaling import PI
from normattn.score.parts.scale import LogN, Temperature


@register
class SlidingWindow(Part):
    """Only keys within a window are visible.

    `window` w defaults to L // 4. The n of log-n ignores the window. `stretched` says that the
    model was trained with RoPE scaling in these layers too (gpt-oss).
    """

    slot = Slot.WINDOW
    equation = "j is seen by i where |i−j| < w"
    source = "arXiv 2004.05150, 2310.06825"
    used_by = "Mistral 7B; in some layers Gemma 2, Gemma 3, gpt-oss"
    window: int | None = number(default=None, least=1, fill=QUARTER_LENGTH)
    stretched: bool = False

    def conflict(self, parts: Parts) -> str | None:
        """A windowed layer has no long distances to stretch or remap."""
        for slot in (Slot.ROPE_SCALING, Slot.REMAPPING):
            if slot in parts and not (self.stretched and slot is Slot.ROPE_SCALING):
                why = "no relative position exceeds the window, so there is nothing to extend"
                return self.refusal(parts[slot], why)
        return None


@register
class Chunked(Part):
    """Only keys in the query's own chunk of tokens are visible.

    `size` c defaults to L // 4. i, j and n still count from the start of the text.
    """

    slot = Slot.WINDOW
    equation = "j is seen by i where ⌊i/c⌋ = ⌊j/c⌋"
    source = "transformers: llama4"
    used_by = "Llama 4"
    excludes: ClassVar[Mapping[Slot, str]] = {
        Slot.REMAPPING: "no relative position passes the chunk",
        Slot.DOCUMENTS: "both cut a row into pieces",
    }
    size: int | None = number(default=None, least=1, fill=QUARTER_LENGTH)


@register
class Packed(Part):
    """Documents packed into one row do not see each other.

    i, j and n count from the document's first token. `attention` takes the number of each key's
    document; a document is a run of equal numbers. A model splits at the token `separator`.
    """

    slot = Slot.DOCUMENTS
    equation = "j is seen by i where doc(i) = doc(j)"
    source = "arXiv 2107.02027, 2407.21783"
    separator: int = number(default=0, least=0)


@dataclass(frozen=True)
class Layout(Part):
    """Different scores in different layers of a model.

    `stretchable`: inference-time methods can be used. `uniform`: all layers see the same keys,
    apart from a separate window component. `has_nope_layers`: some layers have no position.
    """

    slot = Slot.LAYOUT
    stretchable: ClassVar[bool] = True
    uniform: ClassVar[bool] = True
    has_nope_layers: ClassVar[bool] = False

    def conflict(self, parts: Parts) -> str | None:
        """Layers without position exclude a bias, which encodes position."""
        if self.has_nope_layers and Slot.BIAS in parts:
            why = f"some layers of {self.name} have no position, and a bias is one"
            return self.refusal(parts[Slot.BIAS], why)
        return super().conflict(parts)

    def layer(self, parts: Parts, layer: int, layers: int, length: int | None) -> Iterable[Part]:
        """The parts of layer `layer` (0-based) of `layers`, from `parts` without this layout."""
        raise InputError(f"{self.name} defines no layers")


def without_position(parts: Parts) -> dict[Slot, Part]:
    """The parts with NoPE, without window and components that need rotary position."""
    remaining: dict[Slot, Part] = {
        slot: part
        for slot, part in parts.items()
        if slot is not Slot.WINDOW and not part.needs_rotary
    }
    remaining[Slot.POSITION] = NoPE()
    return remaining


@register
class HWFA(Layout):
    """Windowed layers with positions, then one full layer without.

    The windowed layers together reach back at most ¾ of the training length, (w − 1)(layers − 1) +
    1 ≤ ¾·L, so the last layer cannot rely on their reach. `window` defaults to the largest that
    satisfies this; a larger one raises an error. No method can be added afterwards.
    """

    equation = "layers 1 … N−1: |i−j| < w; layer N: P = 1, λ ← λ·ln n/ln L"
    source = "kexue.fm/archives/9603"
    needs_rotary = True
    needs_length = True
    stretchable = False
    uniform = False
    has_nope_layers = True
    excludes: ClassVar[Mapping[Slot, str]] = {Slot.WINDOW: "HWFA has its own window"}
    window: int | None = number(default=None, least=1, optional=True)

    def layer(self, parts: Parts, layer: int, layers: int, length: int | None) -> Iterable[Part]:
        """A window in all layers except the last."""
        length = self.required_length(length)
        largest = (3 * length // 4 - 1) // max(layers - 1, 1) + 1
        window = largest if self.window is None else self.window
        if window > largest and layers > 1:
            raise InputError(
                f"HWFA(window={window}) with {layers} layers reaches "
                f"{(window - 1) * (layers - 1) + 1} tokens back, but it must be at most three "
                f"quarters of the training length {length}: window at most {largest}"
            )
        if layer < layers - 1:
            return (*parts.values(), SlidingWindow(window))
        return {**without_position(parts), Slot.LOGN: LogN()}.values()


@register
class NoPEEvery(Layout):
    """One layer in every few has no position, the others have RoPE.

    The layers without position see all keys, even if the others have a window. Methods that change
    rotary positions do not change them. SmolLM3 has every = 4.
    """

    equation = "layers every, 2·every, …: P = 1"
    source = "arXiv 2501.18795; SmolLM3"
    used_by = "SmolLM3"
    needs_rotary = True
    has_nope_layers = True
    every: int = number(default=4, least=2)

    def layer(self, parts: Parts, layer: int, layers: int, length: int | None) -> Iterable[Part]:
        """NoPE where the layer's number, from 1, is a multiple of `every`."""
        return (without_position(parts) if (layer + 1) % self.every == 0 else parts).values()


@register
class IRoPE(Layout):
    """One layer in every few has no position and no norm, but a temperature.

    The other layers have the named components; a chosen `scale` applies to all layers. `beta` β = 0
    does not change the logits; `length` is L₀.
    """

    equation = "layers every, 2·every, …: P = N = 1, λ · (1 + β·ln(1 + ⌊(i+1)/L₀⌋))"
    source = "transformers: llama4"
    used_by = "Llama 4"
    needs_rotary = True
    has_nope_layers = True
    excludes: ClassVar[Mapping[Slot, str]] = {Slot.LOGN: "IRoPE has its own λ(i)"}
    every: int = number(default=4, least=2)
    beta: float = number(default=0.1, least=0)
    length: int = number(default=8192, least=1)

    def layer(self, parts: Parts, layer: int, layers: int, length: int | None) -> Iterable[Part]:
        """Baseline-NoPE with its temperature where the layer's number is a multiple of `every`."""
        if (layer + 1) % self.every:
            return parts.values()
        variant = parts[Slot.VARIANT]
        scale = variant.scale if isinstance(variant, ScaledVariant) else None
        layer_parts = {**without_position(parts), Slot.VARIANT: Baseline(scale=scale)}
        if self.beta:
            layer_parts[Slot.LOGN] = Temperature(self.beta, self.length, shift=1)
        return layer_parts.values()


@register
class FullEvery(Layout):
    """Windowed layers, and one layer in every few that sees all keys.

    `window` w defaults to L // 4. Full layers may have their own rotary `base`, and positions
    divided by `stretch` (Gemma 3: base 10⁶, divided by 8, every sixth layer). RoPE scaling changes
    only the full layers, as inference-time methods should; `stretched` says that the model was
    trained with it in its windowed layers too (gpt-oss).
    """

    equation = "layers every, 2·every, …: all j ≤ i; the others: |i−j| < w"
    source = "arXiv 2408.00118, 2503.19786, 2508.10925"
    used_by = "Gemma 2 and 3, gpt-oss"
    uniform = False
    excludes: ClassVar[Mapping[Slot, str]] = {Slot.WINDOW: "FullEvery has its own window"}
    every: int = number(default=2, least=2)
    window: int | None = number(default=None, least=1, fill=QUARTER_LENGTH)
    base: float | None = number(default=None, above=1, optional=True)
    stretch: float = number(default=1.0, least=1)
    stretched: bool = False

    def conflict(self, parts: Parts) -> str | None:
        """`base` and `stretch` need rotary position, and `stretch` excludes RoPE scaling."""
        if self.stretch != 1 and Slot.ROPE_SCALING in parts:
            why = f"stretch={self.stretch:g} stretches the full layers too"
            return self.refusal(parts[Slot.ROPE_SCALING], why)
        position, changes_rope = parts[Slot.POSITION], self.base is not None or self.stretch != 1
        if changes_rope and not isinstance(position, RotaryPosition):
            return self.refusal(position, "base=… and stretch=… change rotary positions")
        return super().conflict(parts)

    def layer(self, parts: Parts, layer: int, layers: int, length: int | None) -> Iterable[Part]:
        """No window if the layer's number, from 1, is a multiple of `every`; else a window."""
        layer_parts = dict(parts)
        if (layer + 1) % self.every:
            layer_parts.pop(Slot.REMAPPING, None)
            if not self.stretched:
                layer_parts.pop(Slot.ROPE_SCALING, None)
            stretched = Slot.ROPE_SCALING in layer_parts
            layer_parts[Slot.WINDOW] = SlidingWindow(self.required("window"), stretched)
            return layer_parts.values()
        position: Any = layer_parts[Slot.POSITION]
        if self.base is not None:
            layer_parts[Slot.POSITION] = replace(position, base=self.base)
        if self.stretch != 1:
            layer_parts[Slot.ROPE_SCALING] = PI(factor=self.stretch)
        return layer_parts.values()
