"""Detect how each layer of a probed model rotates and how far it sees, or say why not.

Position embeddings have one row a token: cos and sin of its P angles, once, or twice (θ₀ … θ₀ … or
θ₀ θ₀ θ₁ θ₁ …), or cos + i·sin as one complex number.

Legend: B batch, H heads, T tokens, D head dimension, P pairs of features that rotate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.hf.model_parts import ModelParts
from normattn.hf.probe import EXACT, KNOWN, ProbedLayer, rotary_buffers
from normattn.score import ScoreSpec
from normattn.score.parts import rope_frequencies
from normattn.score.parts.rope_scaling import PI
from normattn.score.rotary import Rotator

_SCALED_ONCE_MORE = ("linear", "llama3")
Layout = Literal["once", "halves", "pairs", "complex"]
Spectrum = tuple[Tensor, float]
"""Frequencies θ (P,) in float64, and what cos and sin are multiplied with."""


@dataclass(frozen=True)
class EmbeddingTables:
    """How position embeddings are made of frequencies.

    Attributes:
        layout: the order of the P angles of a token.
        frequencies: θ_m, as trained (P,), in float64.
        amplitude: what cos and sin are multiplied with.
    """

    layout: Layout
    frequencies: Float[Tensor, " p"]
    amplitude: float

    def make(self, ids: Int[Tensor, "b t"], spectrum: Spectrum, like: Any) -> Any:
        """The position embeddings of these positions under a spectrum, of the kind of `like`."""
        theta, amplitude = spectrum
        first = like if isinstance(like, Tensor) else like[0]
        # In float32 on the device, as transformers does it.
        angle = ids.to(first.device)[..., None].float() * theta.to(first.device, torch.float32)
        if self.layout == "complex":
            return (torch.polar(torch.ones_like(angle), angle) * amplitude).to(first.dtype)
        angle = _laid_out(angle, self.layout)
        return tuple((x * amplitude).to(first.dtype) for x in (angle.cos(), angle.sin()))


def _laid_out(angle: Tensor, layout: Layout) -> Tensor:
    if layout == "halves":
        return torch.cat((angle, angle), -1)
    return angle.repeat_interleave(2, -1) if layout == "pairs" else angle


def read_tables(value: Any, spectra: Iterable[Spectrum]) -> EmbeddingTables | None:
    """How tables of positions 0 … T − 1 were made, by the spectrum that explains them best."""
    cos, sin = (value.real, value.imag) if isinstance(value, Tensor) else value
    best, off = None, 1e-4 if value[0].dtype in EXACT else 2e-2
    cos, sin = cos[0].double().cpu(), sin[0].double().cpu()
    layouts: Sequence[Layout] = ("once", "halves", "pairs")
    for theta, given in spectra:
        size = given if abs(float(cos[0, 0]) - given) <= 1e-2 * given else float(cos[0, 0])
        places = torch.arange(cos.shape[0], dtype=torch.float64)[:, None]
        for layout in ("complex",) if isinstance(value, Tensor) else layouts:
            angle = _laid_out(places * theta, layout)
            if angle.shape[-1] != cos.shape[-1]:
                continue
            error = torch.stack((angle.cos() * size - cos, angle.sin() * size - sin)).abs().max()
            if float(error) < off:
                best, off = EmbeddingTables(layout, theta, size), float(error)
    return best


def spectra_of(model: nn.Module) -> list[Spectrum]:
    """The spectra that modules of a model hold."""
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
    """How a layer's heads are rotated by the model.

    Attributes:
        frequencies: θ_m of the pairs that rotate, as trained (P,), in float64.
        base: the base that they, or those they were scaled from, are powers of; None if unknown.
        interleaved: whether features 2m and 2m + 1 are a pair, instead of m and m + P.
        amplitude: what the model multiplies cos and sin with.
        head_dim: features of a head.
        start: the first of the 2P features that rotate.
        scaled: the kind of scaling that the frequencies were trained with, if any.
        normed: whether queries and keys are normalised after the rotation.
        gains: what features of queries and of keys are multiplied with so that they rotate evenly:
            norms after the rotation may have a gain.
    """

    frequencies: Float[Tensor, " p"]
    base: float | None
    interleaved: bool
    amplitude: float
    head_dim: int
    start: int = 0
    scaled: str | None = None
    normed: bool = False
    gains: tuple[Float[Tensor, " d"], Float[Tensor, " d"]] | None = None

    def rotated(self, x: Float[Tensor, "b h t d"], side: int) -> Float[Tensor, "b h t d"]:
        """Queries (side 0) or keys (1) at positions 0 … T − 1, in float64."""
        places = torch.arange(x.shape[2], device=x.device)
        turn = self.rotator(self.frequencies, self.amplitude).at(places, torch.float64)
        if self.gains is None:
            return turn(x.double())
        gain = self.gains[side].to(x.device)
        return turn(x.double() * gain) / gain

    def rotator(self, frequencies: Float[Tensor, " p"], amplitude: float) -> Rotator:
        """What rotates the same features of a head by other frequencies."""
        return Rotator(frequencies, self.interleaved, amplitude=amplitude, start=self.start)


def method_frequencies(spec: ScoreSpec, rotation: HeadRotation) -> Float[Tensor, " p"]:
    """θ' of a method that is the same at every length; the model's own where it has none.

    The method's θ'_m/θ_m, of plain frequencies, times those that are there: scaled ones are scaled
    once more, and those that are 0 stay 0.
    """
    if spec.rope_scaling is None:
        return rotation.frequencies
    if isinstance(spec.rope_scaling, PI):
        return rotation.frequencies / spec.rope_scaling.stretch
    assert rotation.base is not None
    size = 2 * rotation.frequencies.numel()
    meant = spec.rope_scaling.inverse_frequencies(size, rotation.base, spec.train_length)
    return rotation.frequencies * (meant / rope_frequencies(size, rotation.base))


def method_gain(spec: ScoreSpec) -> float:
    """What a method multiplies cos and sin with: the square root of its factor of the logits."""
    gain = 1.0 if spec.rope_scaling is None else spec.rope_scaling.gain(spec.train_length)
    return float(gain**0.5)


@dataclass(eq=False)
class Layer(ProbedLayer):
    """What one attention layer was seen to do, and what that means.

    Attributes:
        index: its number.
        rotation: how its heads are rotated; None for one without positions, or with a window.
        made_of: how the model writes its position embeddings.
        keys_of: the layer whose keys it reads, where not its own.
    """

    index: int = 0
    rotation: HeadRotation | None = None
    made_of: EmbeddingTables | None = None
    keys_of: nn.Module | None = None

    @property
    def sliding(self) -> int | None:
        """The window outside of which it sees nothing, or None."""
        return self.call.sliding

    def spectrum(self, spec: ScoreSpec) -> Spectrum:
        """The frequencies that a method gives it, and what cos and sin are multiplied with."""
        assert self.rotation is not None
        assert self.made_of is not None
        theta = method_frequencies(spec, self.rotation)
        return theta.abs(), self.made_of.amplitude * method_gain(spec)

    @property
    def selects(self) -> bool:
        """Whether it selects among the keys that it may see, by an indexer or by its own mask."""
        return self.call.more.get("indices") is not None or self.call.window is None

    @property
    def unsupported(self) -> list[str]:
        """What the layer passes to its attention that normattn does not support."""
        more = self.call.more
        given = {name: x for name, x in more.items() if x is not None and x is not False}
        names = [name for name in given if name not in KNOWN and name != "indices"]
        # As transformers has it: what a call does not say, the layer itself does.
        causal = more.get("is_causal")
        causal = getattr(self.module, "is_causal", True) if causal is None else causal
        return [*names, *(["is_causal=False"] if causal is False else [])]


def detect_layers(parts: ModelParts, probed: Mapping[nn.Module, ProbedLayer]) -> tuple[Layer, ...]:
    """What each layer does. Raises `InputError` for what is not understood."""
    if not probed:
        raise InputError(
            f"{parts.name} uses its own attention code: no layer takes its attention function "
            "from transformers' AttentionInterface, so its rotary positions cannot be changed"
        )
    spectra, read = spectra_of(parts.model), dict[int, EmbeddingTables | None]()

    def made_of(tables: Any) -> EmbeddingTables | None:
        """How tables were made; the layers of a forward share them."""
        if id(tables) not in read:
            read[id(tables)] = read_tables(tables, spectra)
        return read[id(tables)]

    all_probed = list(probed.values())
    return tuple(_layer(parts, n, one, made_of, all_probed) for n, one in enumerate(all_probed))


def has_rotary(model: nn.Module) -> bool:
    """Whether a module holds rotary tables or frequencies, by the names that transformers gives."""
    names = [name for name, _ in (*model.named_modules(), *model.named_buffers())]
    held = any(hasattr(x, "rotary_dim") or hasattr(x, "rotary") for x in model.modules())
    named = any(name.endswith("inv_freq") or "rotary" in name for name in names)
    return named or held or "RoFormer" in type(model).__name__


def _layer(
    parts: ModelParts,
    position: int,
    one: ProbedLayer,
    made_of: Callable[[Any], EmbeddingTables | None],
    all_probed: Sequence[ProbedLayer],
) -> Layer:
    index = getattr(one.module, "layer_idx", None)
    index = index if isinstance(index, int) else position
    who = f"layer {index} of this model ({type(one.module).__name__})"
    call, still = one.call, one.unrotated
    if call.k.shape[2] != call.q.shape[2]:
        raise InputError(
            f"{who} reads {call.k.shape[2]} keys of {call.q.shape[2]} tokens: they are "
            "compressed or come from another layer, so their positions are not known"
        )
    if still is None and call.sliding is None and has_rotary(one.module):
        raise InputError(
            f"{who} computes its rotary positions internally, where they cannot be replaced"
        )
    plain = Layer(**vars(one), index=index)
    if call.sliding is not None or still is None:
        return plain
    if torch.equal(still.q, call.q) and torch.equal(still.k, call.k):
        return plain
    tables = made_of(one.tables)
    if tables is None:
        raise InputError(
            f"{who} gets position embeddings that are not computed from rotary frequencies of "
            "the model, so they cannot be replaced"
        )
    keys = _maker_of_keys(one, all_probed)
    rotation = None if keys is None else _rotation(parts, one, keys, tables)
    if keys is None or rotation is None:
        raise InputError(
            f"{who} does not rotate the first or the last features of its queries and keys as RoPE "
            "does, so its positions cannot be replaced"
        )
    keys_of = None if keys is one else keys.module
    return replace(plain, rotation=rotation, made_of=tables, keys_of=keys_of)


def _maker_of_keys(one: ProbedLayer, all_probed: Sequence[ProbedLayer]) -> ProbedLayer | None:
    """Whose keys a layer reads: its own, or those of the first layer that has the same ones."""

    def rotates_keys(layer: ProbedLayer) -> bool:
        still = layer.unrotated
        return still is not None and not torch.equal(still.k, layer.call.k)

    same = (x for x in all_probed if torch.equal(x.call.k, one.call.k) and rotates_keys(x))
    return one if rotates_keys(one) else next(same, None)


def _rotation(
    parts: ModelParts, one: ProbedLayer, keys: ProbedLayer, tables: EmbeddingTables
) -> HeadRotation | None:
    """How heads are rotated; None where no way gives the queries and keys that were seen.

    Tried: the first features rotate, or the last; pairs apart or side by side; either direction;
    and, where norms with a gain follow the rotation, features that the gain has made uneven.
    """
    assert one.unrotated is not None
    assert one.doubled is not None
    assert keys.unrotated is not None
    theta, d = tables.frequencies, one.unrotated.q.shape[-1]
    size = 2 * theta.numel()
    if size > d or d != keys.unrotated.k.shape[-1]:
        return None
    base, scaled = _base(parts, one.module, theta)
    normed = not _doubles(one.unrotated.q, one.doubled.q)
    amplitude = 1.0 if normed else tables.amplitude
    q, k = (one.unrotated.q, one.call.q), (keys.unrotated.k, keys.call.k)
    for start in sorted({0, d - size}):
        for interleaved in (False, True):
            for turned in (theta, -theta):
                how = HeadRotation(turned, base, interleaved, amplitude, d, start, scaled, normed)
                if normed:
                    how = replace(how, gains=(_gain(how, *q), _gain(how, *k)))
                if _fits(how, *q, side=0) and _fits(how, *k, side=1):
                    return how
    return None


def _fits(how: HeadRotation, still: Tensor, given: Tensor, side: int) -> bool:
    """Whether this rotation gives what was seen, up to the rounding of its type."""
    close = 1e-3 if still.dtype in EXACT else 5e-2
    return bool((how.rotated(still, side) - given).abs().max() <= close * given.abs().max())


def _gain(how: HeadRotation, still: Tensor, given: Tensor) -> Float[Tensor, " d"]:
    """What to multiply features with so that they rotate evenly: g_a/g_b on the second of a pair.

    A gain g after the rotation makes x = g ⊙ y of y, and a' = a·cos − (g_a/g_b)·b·sin of the pair
    (a, b): its ratio by least squares over tokens and heads.
    """

    count = how.frequencies.numel()

    def pair(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x[..., how.start : how.start + 2 * count]
        return (x[..., 0::2], x[..., 1::2]) if how.interleaved else (x[..., :count], x[..., count:])

    angle = torch.arange(still.shape[2], dtype=torch.float64)[:, None] * how.frequencies
    a, b = pair(still.double().cpu())
    to, _ = pair(given.double().cpu())
    known, rest = b * angle.sin(), a * angle.cos() - to
    below = known.square().sum((0, 1, 2))
    ratio = torch.where(below > 0, (known * rest).sum((0, 1, 2)) / below.clamp(min=1e-30), 1.0)
    gain = torch.ones(still.shape[-1], dtype=torch.float64)
    pair(gain)[1].copy_(ratio)
    return gain


def _doubles(plain: Tensor, doubled: Tensor) -> bool:
    """Whether some feature of every token and head doubles with its position embeddings."""
    close = 1e-3 if plain.dtype in EXACT else 2e-2
    off = (doubled - 2 * plain).abs() <= close * plain.abs()
    return bool((off & (plain != 0)).flatten(0, 2).all(0).any())


def _base(parts: ModelParts, module: nn.Module, theta: Tensor) -> tuple[float | None, str | None]:
    """The base of frequencies, and the kind of scaling that they were trained with.

    Plain ones are powers of a base that the configuration names, or 0 from some pair on. Of scaled
    ones only some kinds keep their base: a method then scales what is there.
    """
    own = parts.rope(module)
    named = [own.get("rope_theta"), *(rope.get("rope_theta") for rope in parts.ropes)]
    by_layer: Any = getattr(parts.config, "layer_rope_theta", None)
    named += list(by_layer) if isinstance(by_layer, list | tuple) else []
    count = int((theta != 0).sum())
    for base in dict.fromkeys(float(value) for value in named if value):
        plain = rope_frequencies(2 * theta.numel(), base)
        if torch.allclose(theta[:count], plain[:count], rtol=2e-2, atol=0):
            return base, None
    kind = own.get("rope_type")
    if kind in _SCALED_ONCE_MORE and own.get("rope_theta"):
        return float(own["rope_theta"]), str(kind)
    return None, None if kind is None else str(kind)
