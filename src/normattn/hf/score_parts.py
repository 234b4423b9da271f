"""Record every attention layer of a model, and fit the parts of its score to the record.

The first token has position 0 and is not rotated: it determines the normalisation and its gain.
Later tokens determine the angle of each pair. The configuration proposes values (base, rope
scaling, lengths beyond the recorded tokens), which must give the measured frequencies.

Legend: B batch, H query heads, G key heads, T tokens, S keys, D head dimension, E value size,
W width, P rotated pairs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from normattn.errors import InputError
from normattn.hf.model_parts import explained, layer_type, rope_type_of
from normattn.hf.probe import AttentionCall, hidden_keys, hide_unselected, run_recorded
from normattn.hf.rotations import TOLERANCE, Rotation, find_base
from normattn.score import ScoreSpec
from normattn.score.parts import Chunked, Gate, Part, RopeScaling, SlidingWindow
from normattn.score.parts.qk_norm import Baseline
from normattn.score.parts.rope import NoPE, PartialRoPE, PRoPE, RoPE, RotaryPosition
from normattn.score.parts.rope_scaling import PI, Llama3, YaRN
from normattn.score.parts.scale import Temperature
from normattn.score.rotary import frequencies

_BATCH = 4
_NO_ROTATION = 1e-7
_ROUNDING = 1e-4
"""How far rounding may move a number between two texts, as a share of the largest."""
HALF_PRECISION = (torch.bfloat16, torch.float16)
Projection = tuple[Tensor, Tensor]
"""Input and output of a linear map inside an attention layer, (B, T, W)."""


@dataclass
class RecordedLayer(AttentionCall):
    """One call of an attention layer, with its projections in the same run."""

    index: int = 0
    projections: list[Projection] = field(default_factory=list)
    shared: list[Projection] = field(default_factory=list)  # of the layer whose keys it reads


def record_layers(model: Any, tokens: int = 48) -> list[RecordedLayer]:
    """Record every attention layer of the model on `tokens` random tokens."""
    vocabulary, name = model.config.get_text_config().vocab_size, type(model).__name__
    generator, low = torch.Generator().manual_seed(0), min(2, vocabulary - 1)
    ids = torch.randint(low, vocabulary, (_BATCH, tokens), generator=generator).to(model.device)
    layers: list[RecordedLayer] = []

    def record(call: AttentionCall) -> None:
        mask, indices = call.mask, call.kwargs.get("indices")
        if mask is not None:
            mask = mask if indices is None else hide_unselected(mask, indices)
            mask = mask[..., : call.k.shape[2]].expand(len(call.q), -1, call.q.shape[2], -1)
        index = int(getattr(call.module, "layer_idx", len(layers)))
        layers.append(RecordedLayer(**{**vars(call), "mask": mask}, index=index))

    unable = "cannot read tokens alone, so its layers cannot be recorded"
    with _in_float32(model), _record_projections(model, tokens) as runs, explained(name, unable):
        run_recorded(model, record, input_ids=ids, use_cache=False)
    if not layers:
        raise InputError(
            f"the layers of {name} do not take their attention function from transformers' "
            "AttentionInterface, so they cannot be recorded"
        )
    # A layer may run several times, and call its attention several times in one run.
    for number, call in enumerate(layers):
        calls = [other for other in layers if other.module is call.module]
        index = next(i for i, other in enumerate(calls) if other is call)
        for module in call.module.modules():
            if outputs := runs.get(module):
                call.projections.append(outputs[index * len(outputs) // len(calls)])
        for earlier in layers[:number]:
            if earlier.k.data_ptr() == call.k.data_ptr():
                call.shared = earlier.projections
    return layers


@contextmanager
def _in_float32(model: nn.Module) -> Iterator[None]:
    """Run the model in float32, as half precision hides the kind of norm; restores it exactly."""
    tensors = (*model.parameters(), *model.buffers())
    half = [(x, x.dtype) for x in tensors if x.dtype in HALF_PRECISION]
    try:
        for x, _ in half:
            x.data = x.data.float()
        yield
    finally:
        for x, dtype in half:
            x.data = x.data.to(dtype)


@contextmanager
def _record_projections(
    model: nn.Module, tokens: int
) -> Iterator[dict[nn.Module, list[Projection]]]:
    """Inputs and outputs of the model's linear layers, call by call."""
    runs: dict[nn.Module, list[Projection]] = {}

    def flatten(x: Any) -> Tensor | None:
        """x as (B, T, W), with heads side by side or one head of latent vectors; else None."""
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() not in (3, 4):
            return None
        if x.dim() == 3 or x.shape[1] == tokens:
            return x.flatten(2)
        return x[:, 0] if x.shape[1] == 1 else None

    def record(module: nn.Module, args: Any, out: Any) -> None:
        before, after = flatten(args[0] if args else None), flatten(out)
        if before is not None and after is not None:
            runs.setdefault(module, []).append((before, after))

    with ExitStack() as hooks:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                hooks.callback(module.register_forward_hook(record).remove)
        yield runs


@dataclass(frozen=True)
class Norm:
    """N(x) = (x − mean)/√(var + eps)·gain + bias, across one head or all; kind "" is x·gain."""

    kind: str
    across: str
    eps: float
    gain: Float[Tensor, "h d"]
    bias: Float[Tensor, "h d"]

    def plain(self, x: Float[Tensor, "b h t d"]) -> Float[Tensor, "b h t d"]:
        """x normalised, without gain and bias."""
        if not self.kind:
            return x
        dims = (1, 3) if self.across == "all" else (3,)
        if self.kind == "layer":
            x = x - x.mean(dims, keepdim=True)
        return x / (x.square().mean(dims, keepdim=True) + self.eps).sqrt()

    def __call__(self, x: Float[Tensor, "b h t d"]) -> Float[Tensor, "b h t d"]:
        """Normalise x."""
        return self.plain(x) * self.gain[:, None] + self.bias[:, None]


def fit_norms(
    raw: Float[Tensor, "b h t d"], rotated: Float[Tensor, "b h t d"], eps: list[float]
) -> Iterator[Norm]:
    """The norms that map `raw` to `rotated` at position 0, the simplest first.

    Gain and bias are fitted by least squares over the batch; across a head, all heads share them.
    """
    raw, first = raw.double(), rotated[:, :, 0].double()
    ones, zeros = torch.ones_like(first[0]), torch.zeros_like(first[0])
    kinds = itertools.product(("rms", "layer"), ("head", "all", "each"), eps)
    for kind, across, epsilon in (("", "head", 0.0), *kinds):
        x = Norm(kind, across, epsilon, ones, zeros).plain(raw)[:, :, 0]
        dims = (0, 1) if across == "head" else (0,)
        mean_x, mean_y = (side.mean(dims, keepdim=True) for side in (x, first))
        if kind != "layer":
            mean_x, mean_y = torch.zeros_like(mean_x), torch.zeros_like(mean_y)
        dx, dy = x - mean_x, first - mean_y
        gain = (dx * dy).sum(dims, keepdim=True)
        gain = gain / dx.square().sum(dims, keepdim=True).clamp(min=1e-30)
        bias = (mean_y - gain * mean_x).mean(0).expand(ones.shape)
        gain = gain.mean(0).expand(ones.shape)
        if not kind and float(gain.amax() - gain.amin()) > TOLERANCE * float(gain.abs().amax()):
            continue
        if float((x * gain + bias - first).abs().max()) <= TOLERANCE * float(first.abs().max()):
            yield Norm(kind, across, epsilon, gain, bias)


class Unrotated(NamedTuple):
    """Queries and keys as projections give them, before norm and rotation."""

    q: Float[Tensor, "b h t d"]
    k: Float[Tensor, "b g t d"]
    shared_size: int | None = None  # the last features of a key that all heads share, if any


def unrotated_candidates(layer: RecordedLayer) -> Iterator[Unrotated]:
    """Pairs of projections that may be queries and keys.

    They are separate or in one projection, also with values and gates. Keys of multi-head latent
    attention (arXiv 2405.04434) come from two: one holds each head's first features, before its
    values, and another the last features, the same for all heads.
    """
    outputs = [output for _, output in layer.projections]
    (_, heads, _, d), groups, e = layer.q.shape, layer.k.shape[1], layer.v.shape[-1]
    # A projection holds queries only, or each head's query before its gate.
    queries = [(x, split_heads(x, d)) for x in outputs if x.shape[-1] == heads * d]
    gated = [x for x in outputs if e and x.shape[-1] == heads * (d + e)]
    queries += [(x, split_heads(x, d + e)[..., :d]) for x in gated]
    key_sources = [*outputs, *(out for _, out in layer.shared)]
    for width in (groups * d, groups * (d + e)):  # keys only, or keys before values
        for (query_source, q), source in itertools.product(queries, key_sources):
            if query_source is not source and source.shape[-1] == width:
                yield Unrotated(q, split_heads(source[..., : groups * d], d))
    for source in outputs:
        if source.shape[-1] == (heads + 2 * groups) * d:
            qkv = split_heads(source, d)
            yield Unrotated(qkv[:, :heads], qkv[:, heads : heads + groups])
            if heads == groups:
                by_head = split_heads(source, 3 * d)
                yield Unrotated(by_head[..., :d], by_head[..., d : 2 * d])
    for source, shared in itertools.permutations(outputs, 2):
        size, remainder = divmod(source.shape[-1], groups)
        shared_size = d + e - size
        if remainder or not 0 < shared_size < d or shared.shape[-1] < shared_size:
            continue
        keys_and_values = split_heads(source, size)
        values = keys_and_values[..., size - e :]
        if values.shape == layer.v.shape and torch.allclose(values, layer.v, 1e-3, 1e-5):
            last = split_heads(shared[..., -shared_size:], shared_size)
            last = last.expand(-1, groups, -1, -1)
            k = torch.cat((keys_and_values[..., : size - e], last), -1)
            for query_source, q in queries:
                if query_source is not source:
                    yield Unrotated(q, k, shared_size)


def split_heads(x: Float[Tensor, "b t w"], size: int) -> Float[Tensor, "b h t d"]:
    """x as heads of this size."""
    return x.reshape(*x.shape[:2], -1, size).transpose(1, 2)


def fit_position(
    rotation: Rotation,
    rope: Mapping[str, Any],
    config: Any,
    head_dim: int,
    gains: tuple[float, ...],
) -> tuple[tuple[Part, ...], int | None] | None:
    """The position and rope scaling with the measured rotation, and their length; None without."""
    measured = rotation.frequencies
    if float(measured.abs().max()) < _NO_ROTATION:
        return (NoPE(),), None
    layout = rotation.layout
    pairs: Any = "interleaved" if layout.interleaved else "half"
    share = rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None)

    def position(base: float) -> RotaryPosition:
        """The rotary position of this base, with the measured layout."""
        if rope_type_of(rope) == "proportional" and share:
            return PRoPE(base=base, layout=pairs, fraction=share)
        if layout.size == head_dim:
            backward = float(measured[0]) < 0
            return RoPE(base=base, layout=pairs, direction="backward" if backward else "forward")
        # The shortest that rotates so many features, of which PartialRoPE takes an even number.
        fraction = math.ceil(round(layout.size / head_dim * 1e4, 6)) / 1e4
        side: Any = "last" if layout.start else "first"
        return PartialRoPE(base=base, layout=pairs, fraction=fraction, side=side)

    configured = _configured_scaling(rope, config, gains)
    for base in filter(None, (rope.get("rope_theta"), find_base(measured.abs()))):
        for scaling, length in (configured, (None, None)):
            parts: tuple[Part, ...] = (position(_round_number(float(base))),)
            parts += () if scaling is None else (scaling,)
            proposed = frequencies(ScoreSpec((Baseline(), *parts), length), head_dim)
            both = pad_sequence([measured, proposed])  # pairs that do not rotate have θ = 0
            error = float((both[:, 0] - both[:, 1]).abs().max()) * (rotation.amplitude.numel() - 1)
            if error < 10 * TOLERANCE:
                return parts, length
    return None


def _configured_scaling(
    rope: Mapping[str, Any], config: Any, gains: tuple[float, ...]
) -> tuple[RopeScaling | None, int | None]:
    """The rope scaling of rope parameters, with a measured sharpness, and its training length."""
    length = rope.get("original_max_position_embeddings")
    length = length or getattr(config, "max_position_embeddings", None)
    rope_type, factor = rope_type_of(rope), _round_number(float(rope.get("factor") or 1.0))
    if rope_type in ("linear", "proportional"):
        return (PI(factor=factor) if factor != 1 else None), None
    if rope_type == "llama3":
        low, high = (_round_number(float(rope[f"{end}_freq_factor"])) for end in ("low", "high"))
        return Llama3(factor=factor, low=low, high=high), length
    if rope_type != "yarn":
        return None, None
    sharpness, mscales = 0.1, (rope.get("mscale"), rope.get("mscale_all_dim"))
    if factor > 1:
        if not gains:  # transformers' factor of cos and sin
            above, below = (0.1 * float(mscale or 0) * math.log(factor) + 1 for mscale in mscales)
            amplitude = above / below if all(mscales) else 0.1 * math.log(factor) + 1
            configured = rope.get("attention_factor")
            gains = (amplitude if configured is None else float(configured),)
        measured = [round((gain - 1) / math.log(factor), 4) for gain in gains]
        common = (0.1, 0.1 * float(mscales[1] or 1.0))
        sharpness = next((value for value in common if round(value, 4) in measured), measured[-1])
    ends = ("beta_fast", "beta_slow")
    yarn = YaRN(
        factor=factor,
        truncate=rope.get("truncate") is not False,
        sharpness=_round_number(sharpness),
        **{name: _round_number(float(rope[name])) for name in ends if rope.get(name)},
    )
    return yarn, length


def _round_number(value: float) -> float:
    """A value above 100 with three digits where that is within 0.1 %; else with ten decimals."""
    rounded = float(f"{value:.3g}")
    close = abs(rounded - value) <= 1e-3 * abs(value) and value > 100
    return rounded if close else round(value, 10)


def fit_temperature(
    config: Any, rope: Mapping[str, Any], amplitude: Float[Tensor, " t"], rotates: bool
) -> tuple[Temperature, ...] | None:
    """The position temperature of a layer, if any; None where none gives its measured amplitude."""
    part, expected = None, torch.ones_like(amplitude)
    if (beta := rope.get("llama_4_scaling_beta")) is not None:
        part = Temperature(beta=beta, length=rope.get("original_max_position_embeddings"))
    elif getattr(config, "attn_temperature_tuning", False) and not rotates:
        part = Temperature(beta=config.attn_scale, length=int(config.floor_scale), shift=1)
    if part is not None:
        expected = part.factor(torch.arange(1, amplitude.numel() + 1, dtype=torch.float64), None)
    error = (amplitude / amplitude[0] - expected / expected[0]).abs().max()
    if float(error) >= 10 * TOLERANCE:
        return None
    return () if part is None else (part,)


class Gating(NamedTuple):
    """The output gate's part and its logits (B, T, …); `lacks` says what is not identified."""

    part: Gate | None = None
    logits: Tensor | None = None
    lacks: str | None = None


def read_gate(layer: RecordedLayer) -> Gating:
    """Identify the gate between attention's output and the last projection."""
    out = layer.out.flatten(2)
    gated_outputs = [x for x, _ in layer.projections if x.shape == out.shape]
    if any(torch.equal(x, out) for x in gated_outputs):
        return Gating()
    (heads, size), d = layer.out.shape[2:], layer.q.shape[-1]
    for gated, (_, projected) in itertools.product(gated_outputs, layer.projections):
        if projected.shape[-1] == heads * (d + size):  # after the queries of each head
            projected = split_heads(projected, d + size)[..., d:].transpose(1, 2).flatten(2)
        if projected.shape[-1] not in (heads * size, heads):
            continue
        width, expected = projected.shape[-1] // heads, gated.double().view_as(layer.out)
        logits = projected.double().reshape(*projected.shape[:2], heads, width)
        per: Any = "feature" if width > 1 or size == 1 else "head"
        for part, factor in (
            (Gate(per=per), logits.sigmoid()),
            (Gate(per=per, act="softplus"), F.softplus(logits)),
        ):
            error = (factor * layer.out - expected).abs().max()
            if float(error) <= TOLERANCE * float(expected.abs().max()):
                return Gating(part, logits.flatten(2))
    lacks = "its output is changed before the last projection in a way that no component describes"
    return Gating(lacks=lacks)


class Masking(NamedTuple):
    """What a mask hides and adds."""

    part: SlidingWindow | Chunked | None = None  # that hides keys
    causal: bool = True  # no query sees a later key
    operand: Tensor | None = None  # the layer's own mask (B, H or 1, T, S), where it does more
    note: str | None = None  # describes the operand
    lacks: str | None = None  # what is not identified


def read_mask(layer: RecordedLayer, config: Any) -> Masking:
    """Identify what the mask hides and adds, by comparing different texts."""
    tokens, mask = layer.q.shape[2], layer.mask
    indexed = layer.kwargs.get("indices") is not None
    few = f"its indexer leaves out none of {tokens} tokens: use more tokens" if indexed else None
    if mask is None:
        return Masking(causal=False, lacks=few)
    hidden = hidden_keys(mask)
    added = mask.masked_fill(hidden, 0.0)
    causal = not bool((~hidden[0, 0]).triu(1).any())
    same = bool((hidden == hidden[:1, :1]).all())  # in every text and head
    part = _hiding_part(layer, config, ~hidden, same) if causal else None
    both = ~hidden & ~hidden[:1]
    change = torch.where(both, added - added[:1], 0.0).abs().max()
    adding_varies = bool(change > _ROUNDING * torch.where(both, added, 0.0).abs().max())
    if not adding_varies and not bool((hidden != hidden[:1]).any()):  # the same in every text
        return Masking(part, causal, lacks=few)
    chosen = "an indexer chooses the keys of each query" if indexed else None
    note = f"{chosen or 'its mask depends on the text'} (attn_mask)"
    return Masking(part, causal, mask.cpu(), note)


def _hiding_part(
    layer: RecordedLayer, config: Any, visible: Bool[Tensor, "b h t t"], same: bool
) -> SlidingWindow | Chunked | None:
    """The part that hides the same keys as a causal mask, in every text if `same`; else None."""
    configured: SlidingWindow | Chunked | None = None
    if layer_type(config, layer.index) == "chunked_attention":
        configured = Chunked(size=config.attention_chunk_size)
    elif layer.sliding_window is not None:
        configured = SlidingWindow(window=layer.sliding_window)
    positions = torch.arange(visible.shape[-1], device=visible.device)
    distance = positions[:, None] - positions
    if not same:
        windowed = isinstance(configured, SlidingWindow) and configured.window
        return configured if windowed and not visible[..., distance >= windowed].any() else None
    shown, causal = visible[0, 0], distance >= 0
    window = int(torch.where(shown, distance, 0).max()) + 1
    if torch.equal(shown, causal):
        return configured
    if torch.equal(shown, causal & (distance < window)):
        return SlidingWindow(window=window)
    if isinstance(configured, Chunked) and configured.size:
        chunk = positions // configured.size
        return configured if torch.equal(shown, causal & (chunk[:, None] == chunk)) else None
    return None
