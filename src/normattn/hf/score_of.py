"""`score_of`: identify the score of every layer of a transformers model, and verify it.

Layers are recorded while the model runs, and normalisation and rotation are fitted to the record.
`attention` with the score must then give the output of the layer's own attention.

Legend: B batch, H query heads, G key heads, T tokens, D head dimension.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normattn.errors import InputError
from normattn.hf.model_parts import model_parts, rope_of
from normattn.hf.plan import HANDLE
from normattn.hf.rotations import RotaryLayout, Rotation, fit_rotation, method_gain
from normattn.hf.score_parts import (
    Gating,
    Masking,
    Norm,
    RecordedLayer,
    Unrotated,
    fit_norms,
    fit_position,
    fit_temperature,
    read_gate,
    read_mask,
    record_layers,
    unrotated_candidates,
)
from normattn.layers.attention import attention
from normattn.layers.gates import apply_gate
from normattn.score import Score, ScoreSpec
from normattn.score.parts import RotateFirst, Sink, SlidingWindow, SoftCap, Variant
from normattn.score.parts.qk_norm import Baseline
from normattn.score.parts.rope import NoPE

TOLERANCE = 1e-5
"""The tolerance of `attention`'s output, as a share of the layer's largest output, in float32."""


@dataclass(frozen=True)
class LayerScore:
    """One attention layer: its score, or why it was not identified.

    `difference` is the error of `attention` with this score, as a share of the largest output.
    `lacks` describes what no component does, None if nothing. `mask_note` describes what its mask
    does in addition to the score; pass that mask to `attention` as `attn_mask`.
    """

    layer: int
    spec: ScoreSpec | None
    difference: float | None
    lacks: str | None
    mask_note: str | None = None

    @property
    def verified(self) -> bool:
        """Whether the layer computes this score."""
        return self.spec is not None and self.lacks is None


@dataclass(frozen=True)
class ModelScore:
    """The scores of a model's attention layers, in order, and the number of recorded tokens."""

    model: str
    layers: tuple[LayerScore, ...]
    tokens: int

    @property
    def verified(self) -> bool:
        """Whether the score of every layer is verified."""
        return all(layer.verified for layer in self.layers)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """A line for each range of layers with the same score."""

        def without_numbers(layer: LayerScore) -> tuple[ScoreSpec | None, str, str | None]:
            lacks = re.sub(r"^layer \d+|\d\.\de[+-]\d+", "", layer.lacks or "")
            return layer.spec, lacks, layer.mask_note

        for _, group in itertools.groupby(self.layers, without_numbers):
            layers = list(group)
            first = layers[0]
            name = f"layer {first.layer}" + (f"-{layers[-1].layer}" if len(layers) > 1 else "")
            difference = max(layer.difference or 0.0 for layer in layers)
            note = first.lacks or f"verified on {self.tokens} tokens, off by {difference:.0e}"
            if first.lacks is not None and len(layers) > 1:
                note += f"; so in {len(layers)} layers"
            note += "" if first.mask_note is None else f"; {first.mask_note}"
            yield f"{name}: {first.spec or 'not read'} ({note})"


def score_of(model: Any, tokens: int = 48) -> ModelScore:
    """The score of each attention layer of a transformers model, determined from a recording of it.

    The model runs on `tokens` random tokens. A layer's projections and the inputs of its attention
    function determine normalisation, rotation and scale; the mask determines the window. Values
    that so few tokens cannot show (a long window, a temperature) come from the configuration. Then
    `attention` with that score, on the same projections, is compared with the layer's own, to 1e-5
    of its largest output.

    A model in half precision runs in float32, which doubles its memory meanwhile. Frequencies that
    `model.to()` has rounded cannot be identified: load the model with `from_pretrained(dtype=…)`.
    If the mask depends on the text, `attention` gets the layer's own mask, and `mask_note` says so.

    Raises `InputError` for a model that cannot be recorded at all; for a layer that cannot be
    identified, `lacks` says why.
    """
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 2:
        raise InputError(f"tokens must be a whole number of at least 2, but it is {tokens!r}")
    parts = model_parts(model)
    if (extension := parts.decoder.__dict__.get(HANDLE)) is not None:
        raise InputError(
            f"this model is extended by {extension.spec.method}, and only an unmodified model "
            "has a score to find: remove() the extension first"
        )
    model, config = parts.model, parts.config
    with torch.no_grad(), torch.device("cpu"):
        layers = [_read_layer(layer, config) for layer in record_layers(model, tokens)]
    return ModelScore(parts.name, tuple(layers), tokens)


class _Fit(NamedTuple):
    """Norms and rotation that map projections to attention's q and k."""

    unrotated: Unrotated
    q: Norm
    k: Norm
    rotation: Rotation
    rotates_first: bool


def _read_layer(layer: RecordedLayer, config: Any) -> LayerScore:
    keys, count = layer.k.shape[2], layer.q.shape[2]
    name = f"layer {layer.index} ({type(layer.module).__name__})"

    def unread(why: str) -> LayerScore:
        return LayerScore(layer.index, None, None, f"{name}: {why}")

    if keys != count:
        return unread(
            f"reads {keys} keys of {count} tokens, so the positions of its keys are not known"
        )
    fit = _find_fit(layer, config)
    if fit is None:
        return unread(
            "its queries and keys are computed, normalised or rotated in a way that no "
            "component describes"
        )
    gate, mask = read_gate(layer), read_mask(layer, config)
    spec = _build_spec(layer, config, fit, gate, mask)
    if isinstance(spec, str):
        return unread(spec)
    lacks: str | None = "; ".join(filter(None, (mask.lacks, gate.lacks)))
    error = _difference(spec, layer, fit, gate, mask)
    if error > TOLERANCE:
        lacks = f"its attention differs from that of {spec} by {error:.1e} of its largest output"
    lacks = f"{name}: {lacks}" if lacks else None
    return LayerScore(layer.index, spec, error, lacks, mask.note)


def _find_fit(layer: RecordedLayer, config: Any) -> _Fit | None:
    """The simplest fit of projections to q and k; None where there is none."""
    names = ("eps", "variance_epsilon", "norm_eps", "rms_norm_eps", "layer_norm_eps")
    owners = [*layer.module.modules(), config]
    values = [getattr(owner, name, None) for owner in owners for name in names]
    eps = list(dict.fromkeys(float(x) for x in values if isinstance(x, float))) or [1e-6]
    for unrotated in unrotated_candidates(layer):
        for layout in _rotary_layouts(layer, config, unrotated):
            q, k = layout.restored(layer.q), layout.restored(layer.k)
            norms = fit_norms(unrotated.q, q, eps), fit_norms(unrotated.k, k, eps)
            for q_norm, k_norm, first in itertools.product(*norms, (False, True)):
                one, other = ((x.kind, x.eps, x.across == "all") for x in (q_norm, k_norm))
                if q_norm.kind and k_norm.kind and one != other:
                    continue  # one part must express both
                rotation, of_keys = (
                    _fit_normed_rotation(norm, x, rotated, layout, first)
                    for norm, x, rotated in ((q_norm, unrotated.q, q), (k_norm, unrotated.k, k))
                )
                if rotation is None or of_keys is None:
                    continue
                if float((rotation.frequencies - of_keys.frequencies).abs().max()) < 1e-4:
                    return _Fit(unrotated, q_norm, k_norm, rotation, first)
    return None


def _fit_normed_rotation(
    norm: Norm, x: Tensor, rotated: Tensor, layout: RotaryLayout, rotates_first: bool
) -> Rotation | None:
    """The rotation after a norm or, with `rotates_first`, before it."""
    x, rotated = x.double(), rotated.double()
    if not rotates_first:
        return fit_rotation(norm(x), rotated, layout)
    if not norm.kind:
        return None
    return fit_rotation(norm.plain(x), (rotated - norm.bias[:, None]) / norm.gain[:, None], layout)


def _rotary_layouts(
    layer: RecordedLayer, config: Any, unrotated: Unrotated
) -> Iterator[RotaryLayout]:
    """Possible layouts: of the first features before the last, not reordered ones before others."""
    d, rope = layer.q.shape[-1], rope_of(config, layer.index)
    shares = (rope.get("partial_rotary_factor"), getattr(config, "partial_rotary_factor", None))
    sizes = [max(2, int(d * x) // 2 * 2) for x in shares if isinstance(x, float) and 0 < x <= 1]
    first = [(size, 0) for size in dict.fromkeys((*sizes, d))]
    last = [(size, d - size) for size in sizes if size < d]
    if unrotated.shared_size is not None:
        first, last = [(unrotated.shared_size, d - unrotated.shared_size)], first
    for blocks, reordered in itertools.product((first, last), (False, True)):
        for size, start in blocks:
            if not reordered:
                yield RotaryLayout(size, start)
            yield RotaryLayout(size, start, interleaved=True, reordered=reordered)


def _build_spec(
    layer: RecordedLayer, config: Any, fit: _Fit, gate: Gating, mask: Masking
) -> ScoreSpec | str:
    """The score, or a sentence that says why there is none."""
    rope, d = rope_of(config, layer.index), layer.q.shape[-1]
    # Possible factors of q and k in the rotation (unknown after norms): the square root of all
    # factors of q · k beyond 1/√d, or the factor of k.
    gains: tuple[float, ...] = () if fit.k.kind else (float(fit.k.gain[0, 0]),)
    if gains and not fit.q.kind:
        product = layer.scaling * d**0.5 * float(fit.q.gain[0, 0]) * gains[0]
        gains = (product**0.5, *gains) if product > 0 else gains
    positioned = fit_position(fit.rotation, rope, config, d, gains)
    if positioned is None:
        return "no component describes its rotary frequencies"
    position, length = positioned
    rotates = not isinstance(position[0], NoPE)
    temperature = fit_temperature(config, rope, fit.rotation.amplitude, rotates)
    if temperature is None:
        return "its scale changes with the position in a way that no component describes"
    window = mask.part
    if isinstance(window, SlidingWindow) and len(position) > 1:
        window = replace(window, stretched=True)
    cap, sink = layer.kwargs.get("softcap"), layer.kwargs.get("s_aux")
    amplitude = method_gain(ScoreSpec((Baseline(), *position), length)) ** 0.5
    parts = (
        _fit_variant(layer, fit, amplitude),
        *temperature,
        *position,
        RotateFirst() if fit.rotates_first else None,
        SoftCap(cap=cap) if cap else None,
        None if sink is None else Sink(),
        gate.part,
        window,
    )
    return ScoreSpec(tuple(part for part in parts if part is not None), length)


def _fit_variant(layer: RecordedLayer, fit: _Fit, amplitude: float) -> Variant:
    fields: dict[str, Any] = {}
    scale, norms = layer.scaling, [norm for norm in (fit.q, fit.k) if norm.kind]
    for norm in (fit.q, fit.k):
        factor = 1.0 if norm.kind else float(norm.gain[0, 0]) / amplitude
        scale *= 1.0 if abs(factor - 1) < 1e-5 else factor
    if abs(scale * layer.q.shape[-1] ** 0.5 - 1) > 1e-5:
        fields["scale"] = scale if scale == layer.scaling else float(f"{scale:.7g}")
    if not norms:
        return Baseline(**fields)
    kind = {"rms": "RMSNorm", "layer": "LayerNorm"}[norms[0].kind]
    name = ("Q" if fit.q.kind else "") + ("K" if fit.k.kind else "") + kind
    gains = (float((x.gain - amplitude).abs().max()) >= 1e-3 or x.bias.any() for x in norms)
    across = "each" if any(norm.across == "each" for norm in norms) else norms[0].across
    fields |= {"gain": any(gains), "across": across, "eps": norms[0].eps}
    return ScoreSpec.parse(name, **fields).variant


def _difference(
    spec: ScoreSpec, layer: RecordedLayer, fit: _Fit, gate: Gating, mask: Masking
) -> float:
    """The error of `attention` with this score, as a share of the layer's largest output."""
    gain = method_gain(spec) ** 0.5
    score = Score(spec, layer.q.shape[1], layer.q.shape[-1], layer.k.shape[1]).double()
    for module, norm in ((score.query_norm, fit.q), (score.key_norm, fit.k)):
        for name, value in (("weight", norm.gain), ("bias", norm.bias)):
            parameter = getattr(module, name, None)
            if parameter is not None:
                value = value if parameter.dim() == 2 else value[0]
                parameter.copy_(value / gain)
    if score.sink is not None:
        score.sink.copy_(layer.kwargs["s_aux"])
    tensors = (fit.unrotated.q, fit.unrotated.k, layer.v)
    q, k, v = (tensor.detach().double().cpu() for tensor in tensors)
    expected, logits = layer.out.double().cpu(), gate.logits
    if logits is not None:
        logits = logits.double().cpu()
        expected = apply_gate(spec, expected.transpose(1, 2), logits).transpose(1, 2)
    out = attention(q, k, v, score.cpu(), mask.causal, mask.operand, gate=logits)
    return float((out.transpose(1, 2) - expected).abs().max() / expected.abs().max())
