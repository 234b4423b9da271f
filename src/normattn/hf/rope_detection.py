"""Detect how each layer of a probed model rotates its heads, or raise an error that says why not.

Position embeddings have a row for each token: cos and sin of its P angles, once or twice (θ₀ … θ₀ …
or θ₀ θ₀ θ₁ θ₁ …), or cos + i·sin as complex numbers.

Legend: B batch, H heads, T tokens, D head dimension, P pairs of features that rotate.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.hf.model_parts import ModelParts
from normattn.hf.probe import FULL_PRECISION, KNOWN_ARGUMENTS, ProbedLayer, rotary_buffers
from normattn.hf.rotation_fit import RotaryLayout, fit_rotation
from normattn.score import ScoreSpec
from normattn.score.parts import rope_frequencies
from normattn.score.parts.rope_scaling import PI

_SCALABLE_TYPES = ("linear", "llama3")
Layout = Literal["once", "halves", "pairs", "complex"]
Spectrum = tuple[Tensor, float]
"""Frequencies θ (P,) in float64, and the factor of cos and sin."""


@dataclass(frozen=True)
class EmbeddingTables:
    """The format in which a model computes position embeddings from frequencies.

    `layout` is the order of the P angles of a token, `frequencies` are θ_m as trained, in float64,
    and `amplitude` is the factor of cos and sin.
    """

    layout: Layout
    frequencies: Float[Tensor, " p"]
    amplitude: float

    def make(self, ids: Int[Tensor, "b t"], spectrum: Spectrum, like: Any) -> Any:
        """Position embeddings of these positions and spectrum, with the type of `like`."""
        theta, amplitude = spectrum
        first = like if isinstance(like, Tensor) else like[0]
        # In float32 on the device, as in transformers.
        angle = ids.to(first.device)[..., None].float() * theta.to(first.device, torch.float32)
        if self.layout == "complex":
            return (torch.polar(torch.ones_like(angle), angle) * amplitude).to(first.dtype)
        angle = _arrange(angle, self.layout)
        return tuple((x * amplitude).to(first.dtype) for x in (angle.cos(), angle.sin()))


def _arrange(angle: Tensor, layout: Layout) -> Tensor:
    if layout == "halves":
        return torch.cat((angle, angle), -1)
    return angle.repeat_interleave(2, -1) if layout == "pairs" else angle


def read_tables(value: Any, spectra: Iterable[Spectrum]) -> EmbeddingTables | None:
    """The format of tables of positions 0 … T − 1, with the spectrum that fits them best."""
    cos, sin = (value.real, value.imag) if isinstance(value, Tensor) else value
    best, best_error = None, 1e-4 if value[0].dtype in FULL_PRECISION else 2e-2
    cos, sin = cos[0].double().cpu(), sin[0].double().cpu()
    layouts: Sequence[Layout] = ("once", "halves", "pairs")
    measured = float(cos[0, 0])
    for theta, nominal in spectra:
        amplitude = nominal if abs(measured - nominal) <= 1e-2 * nominal else measured
        positions = torch.arange(cos.shape[0], dtype=torch.float64)[:, None]
        for layout in ("complex",) if isinstance(value, Tensor) else layouts:
            angle = _arrange(positions * theta, layout)
            if angle.shape[-1] != cos.shape[-1]:
                continue
            differences = (angle.cos() * amplitude - cos, angle.sin() * amplitude - sin)
            error = float(torch.stack(differences).abs().max())
            if error < best_error:
                best, best_error = EmbeddingTables(layout, theta, amplitude), error
    return best


def spectra_of(model: nn.Module) -> list[Spectrum]:
    """The spectrum of each frequency buffer in a model."""
    return [
        (
            module._buffers[name].detach().double().cpu().flatten(),  # type: ignore[union-attr]
            float(getattr(module, f"{name.removesuffix('inv_freq')}attention_scaling", 1.0)),
        )
        for module in model.modules()
        for name in rotary_buffers(module)
    ]


@dataclass(frozen=True, eq=False)
class HeadRotation:
    """How the model rotates a layer's heads.

    Attributes:
        frequencies: θ_m of the pairs that rotate, as trained (P,), in float64.
        base: the rotary base of the frequencies before any scaling; None if unknown.
        layout: the features that rotate, and how they form pairs.
        amplitude: the model's factor of cos and sin; 1 where a norm follows the rotation.
        head_dim: features of a head.
        scaled: the rope type that the frequencies were trained with, if any.
        gains: where queries and keys are normalised after the rotation, factors of the features of
            queries and of keys that undo the gain of the norm.
    """

    frequencies: Float[Tensor, " p"]
    base: float | None
    layout: RotaryLayout
    amplitude: float
    head_dim: int
    scaled: str | None = None
    gains: tuple[Float[Tensor, " d"], Float[Tensor, " d"]] | None = None

    def rotated(self, x: Float[Tensor, "b h t d"], side: int) -> Float[Tensor, "b h t d"]:
        """Rotate queries (side 0) or keys (1) at positions 0 … T − 1, in float64."""
        angle = torch.arange(x.shape[2], dtype=torch.float64)[:, None] * self.frequencies
        factor = torch.polar(torch.full_like(angle, self.amplitude), angle).to(x.device)
        if self.gains is None:
            return self.layout.rotate(x, factor)
        gain = self.gains[side].to(x.device)
        return self.layout.rotate(x * gain, factor) / gain


def method_frequencies(spec: ScoreSpec, rotation: HeadRotation) -> Float[Tensor, " p"]:
    """θ' of a method that is the same at every length; the model's θ where it scales none.

    The model's frequencies are multiplied by the method's θ'_m/θ_m of unscaled frequencies. So
    those that are scaled already are scaled once more, and those that are 0 stay 0.
    """
    if spec.rope_scaling is None:
        return rotation.frequencies
    if isinstance(spec.rope_scaling, PI):
        return rotation.frequencies / spec.rope_scaling.stretch
    assert rotation.base is not None
    size = 2 * rotation.frequencies.numel()
    scaled = spec.rope_scaling.inverse_frequencies(size, rotation.base, spec.train_length)
    return rotation.frequencies * (scaled / rope_frequencies(size, rotation.base))


def method_gain(spec: ScoreSpec) -> float:
    """A method's factor of cos and sin, the square root of its factor of the logits."""
    gain = 1.0 if spec.rope_scaling is None else spec.rope_scaling.gain(spec.train_length)
    return float(gain**0.5)


@dataclass(eq=False)
class Layer(ProbedLayer):
    """The record of attention layer number `index`, and its detected rotation.

    `rotation` is None without rotary positions and within a window. `table_format` is the format of
    its position embeddings. `key_source` is the layer whose keys it reads, if not its own.
    """

    index: int = 0
    rotation: HeadRotation | None = None
    table_format: EmbeddingTables | None = None
    key_source: nn.Module | None = None

    @property
    def sliding_window(self) -> int | None:
        """Its sliding window in tokens, or None."""
        return self.call.sliding_window

    def spectrum(self, spec: ScoreSpec) -> Spectrum:
        """Its frequencies under a method, and the factor of cos and sin."""
        assert self.rotation is not None
        assert self.table_format is not None
        theta = method_frequencies(spec, self.rotation)
        return theta.abs(), self.table_format.amplitude * method_gain(spec)

    @property
    def selects(self) -> bool:
        """Whether it selects keys by an indexer or by its own mask."""
        return self.call.kwargs.get("indices") is not None or self.call.mask_window is None

    @property
    def unsupported(self) -> list[str]:
        """Arguments that the layer passes to its attention and normattn does not support."""
        kwargs = self.call.kwargs
        used = [name for name, x in kwargs.items() if x is not None and x is not False]
        names = [name for name in used if name not in KNOWN_ARGUMENTS and name != "indices"]
        # As in transformers, the layer's attribute is the default of the argument.
        causal = kwargs.get("is_causal")
        causal = getattr(self.module, "is_causal", True) if causal is None else causal
        return [*names, *(["is_causal=False"] if causal is False else [])]


def detect_layers(parts: ModelParts, probed: Mapping[nn.Module, ProbedLayer]) -> tuple[Layer, ...]:
    """Detect each layer's rotation; raises `InputError` for a layer that is not understood."""
    if not probed:
        raise InputError(
            f"{parts.name} uses its own attention code: no layer takes its attention function "
            "from transformers' AttentionInterface, so its rotary positions cannot be changed"
        )
    spectra, formats = spectra_of(parts.model), dict[int, EmbeddingTables | None]()
    layers = list(probed.values())
    for layer in layers:  # layers share their tables
        rotated = layer.unrotated is not None and layer.call.sliding_window is None
        if rotated and id(layer.tables) not in formats:
            formats[id(layer.tables)] = read_tables(layer.tables, spectra)
    return tuple(
        _detect(parts, position, layer, formats.get(id(layer.tables)), layers)
        for position, layer in enumerate(layers)
    )


def has_rotary_module(model: nn.Module) -> bool:
    """Whether a module has rotary positions, by the names of its parts in transformers."""
    names = [name for name, _ in (*model.named_modules(), *model.named_buffers())]
    has_field = any(hasattr(x, "rotary_dim") or hasattr(x, "rotary") for x in model.modules())
    named = any(name.endswith("inv_freq") or "rotary" in name for name in names)
    return named or has_field or "RoFormer" in type(model).__name__


def _detect(
    parts: ModelParts,
    position: int,
    probed: ProbedLayer,
    tables: EmbeddingTables | None,
    layers: Sequence[ProbedLayer],
) -> Layer:
    index = getattr(probed.module, "layer_idx", None)
    index = index if isinstance(index, int) else position
    name = f"layer {index} of this model ({type(probed.module).__name__})"
    call, unrotated = probed.call, probed.unrotated
    if call.k.shape[2] != call.q.shape[2]:
        raise InputError(
            f"{name} reads {call.k.shape[2]} keys of {call.q.shape[2]} tokens: they are "
            "compressed or come from another layer, so their positions are not known"
        )
    if unrotated is None and call.sliding_window is None and has_rotary_module(probed.module):
        raise InputError(
            f"{name} computes its rotary positions internally, where they cannot be replaced"
        )
    layer = Layer(**vars(probed), index=index)
    if call.sliding_window is not None or unrotated is None:
        return layer
    if torch.equal(unrotated.q, call.q) and torch.equal(unrotated.k, call.k):
        return layer
    if tables is None:
        raise InputError(
            f"{name} gets position embeddings that are not computed from rotary frequencies of "
            "the model, so they cannot be replaced"
        )
    keys = _find_key_source(probed, layers)
    rotation = None if keys is None else _find_rotation(parts, probed, keys, tables)
    if keys is None or rotation is None:
        raise InputError(
            f"{name} does not rotate the first or the last features of its queries and keys as "
            "RoPE does, so its positions cannot be replaced"
        )
    key_source = None if keys is probed else keys.module
    return replace(layer, rotation=rotation, table_format=tables, key_source=key_source)


def _find_key_source(probed: ProbedLayer, layers: Sequence[ProbedLayer]) -> ProbedLayer | None:
    """The layer whose keys this one reads: itself, or the first with equal keys."""

    def rotates_keys(layer: ProbedLayer) -> bool:
        unrotated = layer.unrotated
        return unrotated is not None and not torch.equal(unrotated.k, layer.call.k)

    sources = (x for x in layers if torch.equal(x.call.k, probed.call.k) and rotates_keys(x))
    return probed if rotates_keys(probed) else next(sources, None)


def _find_rotation(
    parts: ModelParts, probed: ProbedLayer, keys: ProbedLayer, tables: EmbeddingTables
) -> HeadRotation | None:
    """The rotation by these tables of the first or the last features; None where none fits."""
    assert probed.unrotated is not None
    assert probed.doubled is not None
    assert keys.unrotated is not None
    theta, d = tables.frequencies, probed.unrotated.q.shape[-1]
    size = 2 * theta.numel()
    if size > d or d != keys.unrotated.k.shape[-1]:
        return None
    normed = not _scales_with_tables(probed.unrotated.q, probed.doubled.q)
    amplitude = 1.0 if normed else tables.amplitude
    tolerance = 1e-3 if probed.call.q.dtype in FULL_PRECISION else 5e-2
    for start, interleaved in itertools.product(sorted({0, d - size}), (False, True)):
        layout = RotaryLayout(size, start, interleaved)
        q = fit_rotation(probed.unrotated.q, probed.call.q, layout, theta, normed, tolerance)
        k = fit_rotation(keys.unrotated.k, keys.call.k, layout, theta, normed, tolerance)
        if q is None or k is None or not torch.equal(q.frequencies, k.frequencies):
            continue
        error = max(float((x.amplitude - amplitude).abs().max()) for x in (q, k))
        if error <= tolerance * amplitude:
            base, scaled = _find_base(parts, probed.module, theta)
            gains = None if q.gain is None or k.gain is None else (q.gain, k.gain)
            return HeadRotation(q.frequencies, base, layout, amplitude, d, scaled, gains)
    return None


def _scales_with_tables(plain: Tensor, doubled: Tensor) -> bool:
    """Whether some feature of every token and head doubles with its position embeddings."""
    tolerance = 1e-3 if plain.dtype in FULL_PRECISION else 2e-2
    doubles = (doubled - 2 * plain).abs() <= tolerance * plain.abs()
    return bool((doubles & (plain != 0)).flatten(0, 2).all(0).any())


def _find_base(
    parts: ModelParts, module: nn.Module, theta: Tensor
) -> tuple[float | None, str | None]:
    """The base of frequencies, and the rope type of their scaling, if any.

    Unscaled frequencies are powers of a base that the configuration names, or 0 from some pair on.
    Scaled ones have a base only for types that a method can scale once more.
    """
    rope = parts.rope(module)
    candidates = [rope.get("rope_theta"), *(other.get("rope_theta") for other in parts.ropes)]
    by_layer: Any = getattr(parts.config, "layer_rope_theta", None)
    candidates += list(by_layer) if isinstance(by_layer, list | tuple) else []
    count = int((theta != 0).sum())
    for base in dict.fromkeys(float(value) for value in candidates if value):
        unscaled = rope_frequencies(2 * theta.numel(), base)
        if torch.allclose(theta[:count], unscaled[:count], rtol=2e-2, atol=0):
            return base, None
    rope_type = rope.get("rope_type")
    if rope_type in _SCALABLE_TYPES and rope.get("rope_theta"):
        return float(rope["rope_theta"]), str(rope_type)
    return None, None if rope_type is None else str(rope_type)
