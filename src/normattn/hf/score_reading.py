"""`score_of`: the score of every layer of a transformers model, read off and held against it.

A layer is listened to while the model reads, its normalisation and rotation are fitted to what was
heard, and `attention` with the score so found must give what the layer's own attention gave.

Legend: B batch, H query heads, G key heads, T tokens, D head dimension.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.errors import InputError
from normattn.hf.score_fitting import CLOSE, Norm, Turned, bare, norms, turned
from normattn.hf.score_naming import position_words, rope_of, temperature_words, window_words
from normattn.hf.score_recording import Heard, listen
from normattn.layers.attend import attention
from normattn.score import Score, ScoreSpec

AGREES = 1e-5
"""How far our attention may be from the layer's, as a share of its largest output, in float32."""
_HALF = 3e-2


@dataclass(frozen=True)
class LayerScore:
    """One attention layer: its score, or what is missing to name it.

    `difference` is how far `attention` with this score was from the layer's own, as a share of the
    largest output; `lacks` says what the vocabulary has no word for, None where it has all.
    """

    layer: int
    spec: ScoreSpec | None
    difference: float | None
    lacks: str | None

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
        """A line for each run of layers with one score."""
        runs: list[list[LayerScore]] = []
        for layer in self.layers:
            same = runs and (runs[-1][0].spec, runs[-1][0].lacks) == (layer.spec, layer.lacks)
            runs[-1].append(layer) if same else runs.append([layer])
        for run in runs:
            where = f"layer {run[0].layer}" + (f"-{run[-1].layer}" if len(run) > 1 else "")
            name = "not read" if run[0].spec is None else str(run[0].spec)
            off = max((layer.difference or 0.0 for layer in run), default=0.0)
            how = run[0].lacks or f"verified on {self.tokens} tokens, off by {off:.0e}"
            yield f"{where}: {name} ({how})"


def score_of(model: Any, tokens: int = 48) -> ModelScore:
    """The score of each attention layer of a transformers model, read by listening to it.

    The model reads `tokens` random tokens. What a layer's projections give and what reaches its
    attention function tell the normalisation, the rotation and the scale; the mask tells the
    window; numbers that so few tokens cannot show (a long window, a step of temperature) are the
    configuration's. Then `attention` with that score, on the same projections, is compared with
    what the layer's own attention gave: 1e-5 of its largest output in float32.

    Raises `InputError` for a model that cannot be listened to at all; a layer that cannot be read
    says so in its `lacks`.
    """
    try:
        from transformers import PreTrainedModel
    except ImportError:
        raise InputError("reading a model needs transformers: pip install normattn[hf]") from None
    if not isinstance(model, PreTrainedModel):
        raise InputError(
            f"score_of() takes a model of transformers, but this is a {type(model).__name__}"
        )
    config = model.config.get_text_config()
    with torch.no_grad():
        layers = tuple(_read(heard, config) for heard in listen(model, tokens))
    return ModelScore(type(model).__name__, layers, tokens)


@dataclass(frozen=True)
class _Fit:
    """One way from projections to what attention was given."""

    raw_q: Tensor
    raw_k: Tensor
    q: Norm
    k: Norm
    q_turned: Turned
    k_turned: Turned
    first: bool


def _read(heard: Heard, config: Any) -> LayerScore:
    keys, count = heard.k.shape[2], heard.q.shape[2]
    if keys != count:
        why = f"reads {keys} keys of {count} tokens, so where its keys stand is not known"
        return LayerScore(heard.index, None, None, f"{heard.name}: {why}")
    fit = next(_fits(heard, config), None)
    if fit is None:
        return LayerScore(
            heard.index,
            None,
            None,
            f"{heard.name}: no projection of it, normalised and turned in a way that the "
            "vocabulary has, is what reaches its attention",
        )
    gate = _gate(heard)
    text, length, lacks = _named(heard, config, fit, gate)
    if text is None:
        return LayerScore(heard.index, None, None, f"{heard.name}: {lacks}")
    spec = ScoreSpec.parse(text, train_length=length)
    off = _difference(spec, heard, fit, gate.logits)
    wide = heard.q.dtype in (torch.float32, torch.float64)
    if off > (AGREES if wide else _HALF):
        lacks = f"its attention differs from that of {spec} by {off:.1e} of its largest output"
    return LayerScore(heard.index, spec, off, None if lacks is None else f"{heard.name}: {lacks}")


def _fits(heard: Heard, config: Any) -> Iterator[_Fit]:
    """Ways that agree with all that was heard, the plainest first."""
    d, eps = heard.q.shape[-1], _eps(heard, config)
    sizes = tuple(dict.fromkeys((*_shares(heard, config, d), d)))
    for raw_q, raw_k in _raw(heard):
        sides = (list(norms(raw_q, heard.q, eps)), list(norms(raw_k, heard.k, eps)))
        for left, right, first, size, apart in itertools.product(
            *sides, (False, True), sizes, (True, False)
        ):
            one = _one(left, raw_q, heard.q, size, apart, first)
            other = None if one is None else _one(right, raw_k, heard.k, size, apart, first)
            if one is not None and other is not None and _alike(one, other):
                yield _Fit(raw_q, raw_k, left, right, one, other, first)


def _one(
    norm: Norm, raw: Tensor, given: Tensor, size: int, apart: bool, first: bool
) -> Turned | None:
    raw, given = raw.double(), given.double()
    if not first:
        return turned(norm(raw), given, size, apart)
    if not norm.kind:
        return None
    still = bare(raw, norm.kind, norm.across, norm.eps)
    return turned(still, (given - norm.bias[:, None]) / norm.gain[:, None], size, apart)


def _alike(one: Turned, other: Turned) -> bool:
    return bool((one.theta - other.theta).abs().max() < 1e-4)


def _raw(heard: Heard) -> Iterator[tuple[Tensor, Tensor]]:
    """Queries and keys as projections may hold them: apart, joined, side by side, with a gate."""
    heads, groups, d = heard.q.shape[1], heard.k.shape[1], heard.q.shape[-1]
    made = [projection.made for projection in heard.projections]
    for one in made:
        for other in made:
            if one is not other and other.shape[-1] == groups * d:
                if one.shape[-1] == heads * d:
                    yield _heads(one, d), _heads(other, d)
                elif one.shape[-1] == 2 * heads * d:
                    yield _heads(one, 2 * d)[..., :d], _heads(other, d)
        if one.shape[-1] == (heads + 2 * groups) * d:
            parts = _heads(one, d)
            yield parts[:, :heads], parts[:, heads : heads + groups]
            if heads == groups:
                joined = _heads(one, 3 * d)
                yield joined[..., :d], joined[..., d : 2 * d]


def _heads(x: Float[Tensor, "b t w"], size: int) -> Float[Tensor, "b h t d"]:
    return x.reshape(*x.shape[:2], -1, size).transpose(1, 2)


def _eps(heard: Heard, config: Any) -> list[float]:
    """What norms may have, those of the layer itself first."""
    names = ("eps", "variance_epsilon", "norm_eps", "rms_norm_eps", "layer_norm_eps")
    places = [*heard.module.modules(), config]
    values = [getattr(holder, name, None) for holder in places for name in names]
    return list(dict.fromkeys(float(eps) for eps in values if isinstance(eps, float))) or [1e-6]


def _shares(heard: Heard, config: Any, d: int) -> list[int]:
    """How many features may turn by the configuration's words, fewer than all."""
    rope = rope_of(config, heard.index)
    shares = (rope.get("partial_rotary_factor"), getattr(config, "partial_rotary_factor", None))
    return [max(2, int(d * share) // 2 * 2) for share in shares if share]


def _named(
    heard: Heard, config: Any, fit: _Fit, gate: _Gate
) -> tuple[str | None, int | None, str | None]:
    """The score as text, the length it needs, and what is missing in it."""
    rope, d = rope_of(config, heard.index), heard.q.shape[-1]
    bare_gain = float(fit.k.gain[0, 0]) if not fit.k.kind else None
    placed = position_words(fit.q_turned, rope, config, d, bare_gain)
    if placed is None:
        return None, None, "its rotary frequencies are none that the vocabulary has"
    position, length = placed
    warm = temperature_words(config, rope, fit.q_turned.size, position != "NoPE")
    if warm is None:
        return None, None, "its scale changes with the position in a way that no part says"
    window, lacks = "", None
    if _causal(heard):
        window, lacks = window_words(heard.visible[0].cpu(), _window(heard, config))
    if heard.added:
        lacks = f"its mask adds up to {heard.added:.2g} to a score"
    if window.startswith("SlidingWindow") and "(factor" in position:
        window = window.replace(")", ",stretched=true)")
    cap, sink = heard.more.get("softcap"), heard.more.get("s_aux")
    words = (
        _variant(heard, fit, _amplitude(position, length)),
        warm,
        "RotateFirst" if fit.first else "",
        position,
        f"SoftCap(cap={cap})" if cap else "",
        "Sink" if sink is not None else "",
        gate.part,
        window,
    )
    return "-".join(filter(None, words)), length, lacks or gate.lacks


def _amplitude(position: str, length: int | None) -> float:
    """What the rotation multiplies queries and keys with."""
    spectrum = ScoreSpec.parse(f"Baseline-{position}" if position else "Baseline", length).spectrum
    return 1.0 if spectrum is None else float(spectrum.gain(length) ** 0.5)


def _variant(heard: Heard, fit: _Fit, amplitude: float) -> str:
    kinds = {"rms": "RMSNorm", "layer": "LayerNorm"}
    fields = []
    scaling = float(heard.more.get("scaling") or heard.q.shape[-1] ** -0.5)
    if abs(scaling * heard.q.shape[-1] ** 0.5 - 1) > 1e-6:
        fields.append(f"scale={scaling!r}")
    norm = fit.q if fit.q.kind else fit.k
    name = "Baseline"
    if norm.kind:
        sides = ("Q" if fit.q.kind else "") + ("K" if fit.k.kind else "")
        name = f"{sides}{kinds[norm.kind]}"
        plain = all(
            float((fitted.gain - amplitude).abs().max()) < 1e-3 and not fitted.bias.any()
            for fitted in (fit.q, fit.k)
            if fitted.kind
        )
        fields += ["gain=false"] if plain else []
        fields += [f"across={norm.across}"] if norm.across != "head" else []
        fields += [f"eps={norm.eps!r}"] if norm.eps != 1e-6 else []
    return f"{name}({','.join(fields)})" if fields else name


def _window(heard: Heard, config: Any) -> str:
    """What hides keys by the layer's own words or the configuration's."""
    types = getattr(config, "layer_types", None) or ()
    kind = types[heard.index] if heard.index < len(types) else ""
    if kind == "chunked_attention":
        return f"Chunked(size={config.attention_chunk_size})"
    given = heard.more.get("sliding_window")
    if given is None and kind == "sliding_attention":
        given = config.sliding_window
    return "" if given is None else f"SlidingWindow(window={int(given)})"


def _causal(heard: Heard) -> bool:
    return not bool(heard.visible[0].triu(1).any())


@dataclass(frozen=True)
class _Gate:
    """The output gate's part and its logits (B, T, …); what is missing where the output changes."""

    part: str = ""
    logits: Tensor | None = None
    lacks: str | None = None


def _gate(heard: Heard) -> _Gate:
    """What stands between attention's output and the last projection."""
    out = heard.out.flatten(2)
    given = [
        projection.given for projection in heard.projections if projection.given.shape == out.shape
    ]
    if any(torch.equal(candidate, out) for candidate in given):
        return _Gate()
    for candidate, logits in itertools.product(given, _logits(heard)):
        wide = out.shape[-1] // logits.shape[-1]
        off = logits.double().sigmoid().repeat_interleave(wide, -1) * out - candidate
        if float(off.abs().max()) <= CLOSE * float(candidate.abs().max()):
            return _Gate("Gate" if wide == 1 else "Gate(per=head)", logits)
    lacks = "its output is changed before the last projection in a way that no part says"
    return _Gate(lacks=lacks)


def _logits(heard: Heard) -> Iterator[Tensor]:
    """What may gate the output: a projection of its own, or the second half of each head's."""
    heads, size = heard.out.shape[2:]
    for made in (projection.made for projection in heard.projections):
        if made.shape[-1] == 2 * heads * size:
            yield made.reshape(*made.shape[:2], heads, 2 * size)[..., size:].flatten(2)
        elif made.shape[-1] in (heads * size, heads):
            yield made


def _difference(spec: ScoreSpec, heard: Heard, fit: _Fit, logits: Tensor | None) -> float:
    """How far `attention` is from the layer's own, as a share of its largest output."""
    score = Score(spec, heard.q.shape[1], heard.q.shape[-1], heard.k.shape[1]).double()
    amplitude = 1.0 if spec.spectrum is None else spec.spectrum.gain(spec.train_length) ** 0.5
    for module, norm in ((score.query_norm, fit.q), (score.key_norm, fit.k)):
        for name, value in (("weight", norm.gain), ("bias", norm.bias)):
            own = getattr(module, name, None)
            if own is not None:
                shared = value if own.dim() == 2 else value[0]
                own.copy_(shared / amplitude)
    if score.sink is not None:
        score.sink.copy_(heard.more["s_aux"])
    q, k, v = (tensor.detach().double().cpu() for tensor in (fit.raw_q, fit.raw_k, heard.v))
    theirs = heard.out.double().cpu()
    if logits is not None:
        logits = logits.double().cpu()
        wide = theirs[0, 0].numel() // logits.shape[-1]
        theirs = theirs * logits.sigmoid().repeat_interleave(wide, -1).view_as(theirs)
    ours = attention(q, k, v, score.cpu(), causal=_causal(heard), gate=logits)
    return float((ours.transpose(1, 2) - theirs).abs().max() / theirs.abs().max())
