"""`score_of`: the score of every layer of a transformers model, read off and held against it.

A layer is recorded while the model reads, its normalisation and rotation are fitted to what was
recorded, and `attention` with the score so found must give what the layer's own attention gave.

Legend: B batch, H query heads, G key heads, T tokens, D head dimension.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from normattn.errors import InputError
from normattn.hf.model_parts import model_parts, rope_of
from normattn.hf.plan import HANDLE
from normattn.hf.score_parts import Gating, Masking, gating, masking, position_parts, temperature
from normattn.hf.score_record import (
    Norm,
    Raw,
    RecordedLayer,
    Rotation,
    Shape,
    candidates,
    fit_rotation,
    norms,
    record_layers,
)
from normattn.layers.attention import attention
from normattn.layers.gates import apply_gate
from normattn.score import Score, ScoreSpec
from normattn.score.parts import RotateFirst, Sink, SlidingWindow, SoftCap, Variant
from normattn.score.parts.qk_norm import Baseline
from normattn.score.parts.rope import NoPE

AGREES = 1e-5
"""How far our attention may be from the layer's, as a share of its largest output, in float32."""


@dataclass(frozen=True)
class LayerScore:
    """One attention layer: its score, or what is missing to name it.

    `difference` is how far `attention` with this score was from the layer's own, as a share of the
    largest output; `lacks` names what no component describes, None if all is described;
    `beside` what its mask does outside the score: pass that to `attention` as `attn_mask`.
    """

    layer: int
    spec: ScoreSpec | None
    difference: float | None
    lacks: str | None
    beside: str | None = None

    @property
    def verified(self) -> bool:
        """Whether the score is what the layer computes."""
        return self.spec is not None and self.lacks is None


@dataclass(frozen=True)
class ModelScore:
    """The scores of a model's attention layers, in order, and by how many tokens they were read."""

    model: str
    layers: tuple[LayerScore, ...]
    tokens: int

    @property
    def verified(self) -> bool:
        """Whether every layer's score is what it computes."""
        return all(layer.verified for layer in self.layers)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """A line for each run of layers of which the same is to be said."""

        def described(layer: LayerScore) -> tuple[ScoreSpec | None, str, str | None]:
            lacks = re.sub(r"^layer \d+|\d\.\de[+-]\d+", "", layer.lacks or "")
            return layer.spec, lacks, layer.beside

        for _, group in itertools.groupby(self.layers, described):
            run = list(group)
            first = run[0]
            where = f"layer {first.layer}" + (f"-{run[-1].layer}" if len(run) > 1 else "")
            off = max((layer.difference or 0.0 for layer in run), default=0.0)
            how = first.lacks or f"verified on {self.tokens} tokens, off by {off:.0e}"
            if first.lacks is not None and len(run) > 1:
                how += f"; so in {len(run)} layers"
            how += "" if first.beside is None else f"; {first.beside}"
            yield f"{where}: {first.spec or 'not read'} ({how})"


def score_of(model: Any, tokens: int = 48) -> ModelScore:
    """The score of each attention layer of a transformers model, determined from a recording of it.

    The model runs on `tokens` random tokens. A layer's projections and the inputs of its attention
    function determine normalisation, rotation and scale; the mask determines the window. Numbers
    that so few tokens cannot show (a long window, a step of temperature) are taken from the
    configuration. Then `attention` with that score, on the same projections, is compared with the
    layer's own attention, to 1e-5 of its largest output. A model in half precision runs in float32,
    which doubles its memory for the time. Rotary frequencies that `model.to()` has rounded cannot
    be identified: load the model with `from_pretrained(dtype=…)`. If visible keys, or what is added
    to their scores, depend on the text, `attention` gets the layer's own mask, and `beside` says
    so.

    Raises `InputError` for a model that cannot be recorded at all; for a layer that cannot be
    identified, `lacks` says why.
    """
    parts = model_parts(model)
    if (extension := parts.decoder.__dict__.get(HANDLE)) is not None:
        raise InputError(
            f"this model is extended by {extension.spec.method}, and only an unmodified model "
            "has a score to find: remove() the extension first"
        )
    model, config = parts.model, parts.config
    with torch.no_grad():
        layers = [_read(layer, config) for layer in record_layers(model, tokens)]
    return ModelScore(parts.name, tuple(layers), tokens)


@dataclass(frozen=True)
class _Fit:
    """One way from projections to what attention was given; `first`: the rotation comes first."""

    raw: Raw
    q: Norm
    k: Norm
    rotation: Rotation
    first: bool


def _read(layer: RecordedLayer, config: Any) -> LayerScore:
    keys, count = layer.k.shape[2], layer.q.shape[2]
    name = f"layer {layer.index} ({type(layer.module).__name__})"

    def unread(why: str) -> LayerScore:
        return LayerScore(layer.index, None, None, f"{name}: {why}")

    if keys != count:
        return unread(
            f"reads {keys} keys of {count} tokens, so the positions of its keys are not known"
        )
    fit = next(_fits(layer, config), None)
    if fit is None:
        return unread(
            "its queries and keys are computed, normalised or rotated in a way that no "
            "component describes"
        )
    gate, mask = gating(layer), masking(layer, config)
    spec = _named(layer, config, fit, gate, mask)
    if isinstance(spec, str):
        return unread(spec)
    lacks = "; ".join(filter(None, (mask.lacks, gate.lacks))) or None
    off = _difference(spec, layer, fit, gate, mask)
    if off > AGREES:
        lacks = f"its attention differs from that of {spec} by {off:.1e} of its largest output"
    lacks = None if lacks is None else f"{name}: {lacks}"
    return LayerScore(layer.index, spec, off, lacks, mask.beside)


def _fits(layer: RecordedLayer, config: Any) -> Iterator[_Fit]:
    """Ways that agree with all that was recorded, the plainest first."""
    names = ("eps", "variance_epsilon", "norm_eps", "rms_norm_eps", "layer_norm_eps")
    places = [*layer.module.modules(), config]
    values = [getattr(holder, name, None) for holder in places for name in names]
    eps = list(dict.fromkeys(float(x) for x in values if isinstance(x, float))) or [1e-6]

    def rotation(
        norm: Norm, raw: Tensor, given: Tensor, shape: Shape, first: bool
    ) -> Rotation | None:
        raw, given = raw.double(), given.double()
        if not first:
            return fit_rotation(norm(raw), given, shape)
        if not norm.kind:
            return None
        given = (given - norm.bias[:, None]) / norm.gain[:, None]
        return fit_rotation(norm.plain(raw), given, shape)

    for raw in candidates(layer):
        for shapes in _shapes(layer, config, raw):
            q, k = shapes[0].restored(layer.q), shapes[0].restored(layer.k)
            sides = (list(norms(raw.q, q, eps)), list(norms(raw.k, k, eps)))
            for left, right, first, shape in itertools.product(*sides, (False, True), shapes):
                if left.kind and right.kind:  # one part must express both
                    over = {left.across == "all", right.across == "all"}
                    if (left.kind, left.eps) != (right.kind, right.eps) or len(over) > 1:
                        continue
                one = rotation(left, raw.q, q, shape, first)
                other = None if one is None else rotation(right, raw.k, k, shape, first)
                if one is None or other is None:
                    continue
                if float((one.theta - other.theta).abs().max()) < 1e-4:
                    yield _Fit(raw, left, right, one, first)


def _shapes(layer: RecordedLayer, config: Any, raw: Raw) -> Iterator[list[Shape]]:
    """What may rotate: lists of those that leave features where they are, then of others alone."""
    d, rope = layer.q.shape[-1], rope_of(config, layer.index)
    factors = (rope.get("partial_rotary_factor"), getattr(config, "partial_rotary_factor", None))
    parts = [max(2, int(d * share) // 2 * 2) for share in factors if share]
    first = [(size, 0) for size in dict.fromkeys((*parts, d))]
    last = [(size, d - size) for size in parts if size < d]
    if raw.last is not None:
        first, last = [(raw.last, d - raw.last)], first
    for blocks in filter(None, (first, last)):
        yield [Shape(*block, apart) for block in blocks for apart in (True, False)]
        yield from ([Shape(*block, apart=False, reordered=True)] for block in blocks)


def _named(
    layer: RecordedLayer, config: Any, fit: _Fit, gate: Gating, mask: Masking
) -> ScoreSpec | str:
    """The score, or why there is none."""
    rope, d = rope_of(config, layer.index), layer.q.shape[-1]
    # What the rotation may multiply queries and keys with; nothing where norms hide it: the square
    # root of all that multiplies the product, beyond 1/√d, or what was seen of keys.
    gains: tuple[float, ...] = () if fit.k.kind else (float(fit.k.gain[0, 0]),)
    if gains and not fit.q.kind:
        whole = layer.scaling * d**0.5 * float(fit.q.gain[0, 0]) * gains[0]
        gains = (whole**0.5, *gains) if whole > 0 else gains
    placed = position_parts(fit.rotation, rope, config, d, gains)
    if placed is None:
        return "no component describes its rotary frequencies"
    position, length = placed
    warm = temperature(config, rope, fit.rotation.size, not isinstance(position[0], NoPE))
    if warm is None:
        return "its scale changes with the position in a way that no component describes"
    window = mask.part
    if isinstance(window, SlidingWindow) and len(position) > 1:
        window = replace(window, stretched=True)
    cap, sink = layer.more.get("softcap"), layer.more.get("s_aux")
    placed_alone = ScoreSpec((Baseline(), *position), length)
    parts = (
        _variant(layer, fit, _amplitude(placed_alone)),
        *warm,
        *position,
        RotateFirst() if fit.first else None,
        SoftCap(cap=cap) if cap else None,
        None if sink is None else Sink(),
        gate.part,
        window,
    )
    return ScoreSpec(tuple(part for part in parts if part is not None), length)


def _amplitude(spec: ScoreSpec) -> float:
    """What the rotation multiplies queries and keys with."""
    scaling = spec.rope_scaling
    return 1.0 if scaling is None else float(scaling.gain(spec.train_length) ** 0.5)


def _variant(layer: RecordedLayer, fit: _Fit, amplitude: float) -> Variant:
    """The normalisation and the scale as a part."""
    fields: dict[str, Any] = {}
    scaling, normed = layer.scaling, [norm for norm in (fit.q, fit.k) if norm.kind]
    for norm in (fit.q, fit.k):
        share = 1.0 if norm.kind else float(norm.gain[0, 0]) / amplitude
        scaling *= 1.0 if abs(share - 1) < 1e-5 else share
    if abs(scaling * layer.q.shape[-1] ** 0.5 - 1) > 1e-5:
        fields["scale"] = scaling if scaling == layer.scaling else float(f"{scaling:.7g}")
    if not normed:
        return Baseline(**fields)
    kind = {"rms": "RMSNorm", "layer": "LayerNorm"}[normed[0].kind]
    name = ("Q" if fit.q.kind else "") + ("K" if fit.k.kind else "") + kind
    plain = (float((x.gain - amplitude).abs().max()) < 1e-3 and not x.bias.any() for x in normed)
    across = "each" if any(norm.across == "each" for norm in normed) else normed[0].across
    fields |= {"gain": not all(plain), "across": across, "eps": normed[0].eps}
    return ScoreSpec.parse(name, **fields).variant


def _difference(
    spec: ScoreSpec, layer: RecordedLayer, fit: _Fit, gate: Gating, mask: Masking
) -> float:
    """How far `attention` is from the layer's own, as a share of its largest output."""
    score = Score(spec, layer.q.shape[1], layer.q.shape[-1], layer.k.shape[1]).double()
    for module, norm in ((score.query_norm, fit.q), (score.key_norm, fit.k)):
        for name, value in (("weight", norm.gain), ("bias", norm.bias)):
            own = getattr(module, name, None)
            if own is not None:
                own.copy_((value if own.dim() == 2 else value[0]) / _amplitude(spec))
    if score.sink is not None:
        score.sink.copy_(layer.more["s_aux"])
    q, k, v = (tensor.detach().double().cpu() for tensor in (fit.raw.q, fit.raw.k, layer.v))
    theirs, logits = layer.out.double().cpu(), gate.logits
    if logits is not None:
        logits = logits.double().cpu()
        theirs = apply_gate(spec, theirs.transpose(1, 2), logits).transpose(1, 2)
    ours = attention(q, k, v, score.cpu(), mask.causal, mask.operand, gate=logits)
    return float((ours.transpose(1, 2) - theirs).abs().max() / theirs.abs().max())
