"""Record every attention layer of a model, and fit what leads from its projections to q and k.

Nothing is asked of a layer alone: the model's own forward brings it its input, mask and positions,
so that any family whose layers take their attention function from transformers can be read. The
first token has position 0, where nothing rotates: there the normalisation and its gain are read
off. Each later token then tells by which angle its pairs of features were rotated.

Legend: B batch, H query heads, G key heads, T tokens, D head dimension, E value size, W width,
P rotated pairs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.hf.model_parts import explained
from normattn.hf.probe import AttentionCall, hide_unselected, run_recorded

_BATCH = 4
HALF = (torch.bfloat16, torch.float16)
Projection = tuple[Tensor, Tensor]
"""Input and output of a linear map inside an attention layer, (B, T, W)."""


@dataclass
class RecordedLayer(AttentionCall):
    """One call of an attention layer, and its projections in the same run.

    q and k are normalised and rotated already, and `mask` (B, H or 1, T, S) hides what an indexer
    does not select. `shared` are the projections of the layer whose keys this one reads too.
    """

    index: int = 0
    projections: list[Projection] = field(default_factory=list)
    shared: list[Projection] = field(default_factory=list)

    @property
    def scaling(self) -> float:
        """λ as the attention function was given it."""
        return float(self.more.get("scaling") or self.q.shape[-1] ** -0.5)


def record_layers(model: Any, tokens: int = 48) -> list[RecordedLayer]:
    """What every attention layer of the model does with `tokens` random tokens.

    Raises `InputError` for a model that cannot read them, or whose layers do not take their
    attention function from transformers' AttentionInterface.
    """
    vocabulary, name = model.config.get_text_config().vocab_size, type(model).__name__
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, vocabulary, (_BATCH, tokens), generator=generator).to(model.device)
    layers: list[RecordedLayer] = []
    parts = frozenset(model.modules())

    def see(call: AttentionCall) -> None:
        if call.module not in parts:
            return
        mask, indices = call.mask, call.more.get("indices")
        if mask is not None:
            mask = mask if indices is None else hide_unselected(mask, indices)
            mask = mask[..., : call.k.shape[2]].expand(len(call.q), -1, call.q.shape[2], -1)
        index = int(getattr(call.module, "layer_idx", len(layers)))
        layers.append(RecordedLayer(**{**vars(call), "mask": mask}, index=index))

    unable = "cannot read tokens alone, so its layers cannot be recorded"
    with _in_float32(model), _projections(model, tokens) as made, explained(name, unable):
        run_recorded(model, see, input_ids=ids, use_cache=False)
    if not layers:
        raise InputError(
            f"the layers of {name} do not take their attention function from transformers' "
            "AttentionInterface, so they cannot be recorded"
        )
    # A layer may run several times, and call its attention several times a run.
    for number, call in enumerate(layers):
        calls = [other for other in layers if other.module is call.module]
        turn = next(at for at, other in enumerate(calls) if other is call)
        for part in call.module.modules():
            if runs := made.get(part):
                call.projections.append(runs[turn * len(runs) // len(calls)])
        for earlier in layers[:number]:
            if earlier.k.data_ptr() == call.k.data_ptr():
                call.shared = earlier.projections
    return layers


@contextmanager
def _in_float32(model: nn.Module) -> Iterator[None]:
    """Half precision tells no normalisation from another: the whole computes in float32 meanwhile.

    Every number of half precision comes back as it was.
    """
    held = [(x, x.dtype) for x in (*model.parameters(), *model.buffers()) if x.dtype in HALF]
    try:
        for x, _ in held:
            x.data = x.data.float()
        yield
    finally:
        for x, dtype in held:
            x.data = x.data.to(dtype)


@contextmanager
def _projections(model: nn.Module, tokens: int) -> Iterator[dict[nn.Module, list[Projection]]]:
    """What goes into the model's linear maps and comes out, call by call."""
    made: dict[nn.Module, list[Projection]] = {}

    def row(x: Any) -> Tensor | None:
        """x as (B, T, W): heads side by side, or one head of latent vectors; None for others."""
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() not in (3, 4):
            return None
        if x.dim() == 4 and x.shape[1] != tokens:
            return x[:, 0] if x.shape[1] == 1 else None
        return x.flatten(2)

    def keep(module: nn.Module, given: Any, out: Any) -> None:
        before, after = row(given[0] if given else None), row(out)
        if before is not None and after is not None:
            made.setdefault(module, []).append((before, after))

    with ExitStack() as hooks:
        for part in model.modules():
            if isinstance(part, nn.Linear):
                hooks.callback(part.register_forward_hook(keep).remove)
        yield made


CLOSE = 2e-4
"""How far a fit may miss, as a share of the largest number, in float32."""


@dataclass(frozen=True)
class Norm:
    """N(x) = (x − mean)/√(var + eps)·gain + bias, of one head or all; kind "" is x·gain."""

    kind: str
    across: str
    eps: float
    gain: Float[Tensor, "h d"]
    bias: Float[Tensor, "h d"]

    def plain(self, x: Float[Tensor, "b h t d"]) -> Float[Tensor, "b h t d"]:
        """x normalised without a gain."""
        if not self.kind:
            return x
        dims = (1, 3) if self.across == "all" else (3,)
        if self.kind == "layer":
            x = x - x.mean(dims, keepdim=True)
        return x / (x.square().mean(dims, keepdim=True) + self.eps).sqrt()

    def __call__(self, x: Float[Tensor, "b h t d"]) -> Float[Tensor, "b h t d"]:
        """The normalised x."""
        return self.plain(x) * self.gain[:, None] + self.bias[:, None]


def norms(
    raw: Float[Tensor, "b h t d"], given: Float[Tensor, "b h t d"], eps: list[float]
) -> Iterator[Norm]:
    """The normalisations that make `given` of `raw` at position 0, the plainest first.

    Gain and bias are those of least squares over the batch; across a head, all heads have one.
    """
    raw, first = raw.double(), given[:, :, 0].double()
    one, none = torch.ones_like(first[0]), torch.zeros_like(first[0])
    kinds = itertools.product(("rms", "layer"), ("head", "all", "each"), eps)
    for kind, across, epsilon in (("", "head", 0.0), *kinds):
        x = Norm(kind, across, epsilon, one, none).plain(raw)[:, :, 0]
        dims = (0, 1) if across == "head" else (0,)
        shift = kind == "layer"
        mean_x, mean_y = (
            side.mean(dims, keepdim=True) if shift else 0.0 * side for side in (x, first)
        )
        dx, dy = x - mean_x, first - mean_y
        gain = (dx * dy).sum(dims, keepdim=True)
        gain = gain / dx.square().sum(dims, keepdim=True).clamp(min=1e-30)
        bias = (mean_y - gain * mean_x).mean(0).expand(one.shape)
        gain = gain.mean(0).expand(one.shape)
        if not kind and float(gain.amax() - gain.amin()) > CLOSE * float(gain.abs().amax()):
            continue
        if float((x * gain + bias - first).abs().max()) <= CLOSE * float(first.abs().max()):
            yield Norm(kind, across, epsilon, gain, bias)


@dataclass(frozen=True)
class Shape:
    """Which features rotate, `size` of them from `start` on, and which two are a pair.

    `apart`: pairs are (m, m + P), not (2m, 2m + 1). `reordered`: the rotation puts the first ones
    of all pairs before the second ones, as some families do with pairs that stood side by side.
    """

    size: int
    start: int
    apart: bool
    reordered: bool = False

    def restored(self, x: Float[Tensor, "b h t d"]) -> Float[Tensor, "b h t d"]:
        """x with the rotated features where they were before the rotation."""
        if not self.reordered:
            return x
        end = self.start + self.size
        first, second = x[..., self.start : end].chunk(2, -1)
        pairs = torch.stack((first, second), -1).flatten(-2)
        return torch.cat((x[..., : self.start], pairs, x[..., end:]), -1)

    def pairs(self, x: Tensor) -> Tensor:
        """The rotated pairs as complex numbers."""
        x = x[..., self.start : self.start + self.size].double()
        return torch.complex(*(x.chunk(2, -1) if self.apart else (x[..., 0::2], x[..., 1::2])))

    def rest(self, x: Tensor) -> Tensor:
        """The features that do not rotate."""
        return torch.cat((x[..., : self.start], x[..., self.start + self.size :]), -1).double()


@dataclass(frozen=True)
class Rotation:
    """θ of each pair of 2·P features from `start` on, and what each position is multiplied with."""

    theta: Float[Tensor, " p"]
    size: Float[Tensor, " t"]
    interleaved: bool
    start: int = 0


def fit_rotation(
    still: Float[Tensor, "b h t d"], given: Float[Tensor, "b h t d"], shape: Shape
) -> Rotation | None:
    """The rotation of this shape that makes `given` of `still`; None where none does.

    θ with ratio_p ∝ e^{iθp} is sharpened from position to position.
    """
    z, w = shape.pairs(still), shape.pairs(given)
    ratio = (w * z.conj()).sum((0, 1)) / z.abs().square().sum((0, 1)).clamp(min=1e-30)  # (T, P)
    size = ratio.abs().mean(-1)
    off = [(w - ratio * z).abs().max()]
    if shape.size < still.shape[-1]:
        off.append((shape.rest(still) * size[:, None] - shape.rest(given)).abs().max())
    uneven = (ratio.abs() - size[:, None]).abs().max()
    if float(max(off)) > CLOSE * float(given.abs().max()) or uneven > 2 * CLOSE * size.max():
        return None
    theta = ratio[1].angle()
    for position in range(2, ratio.shape[0]):
        theta = theta + (ratio[position] * torch.exp(-1j * theta * position)).angle() / position
    places = torch.arange(ratio.shape[0], dtype=torch.float64)[:, None]
    if not float((ratio * torch.exp(-1j * theta * places)).angle().abs().max()) < 10 * CLOSE:
        return None
    return Rotation(theta, size, not shape.apart, shape.start)


def plain_base(theta: Float[Tensor, " p"]) -> float | None:
    """The base b with θ_m = b^(−m/P); None where the frequencies are no such row."""
    pairs = theta.numel()
    if pairs < 2 or abs(float(theta[0] - 1)) > CLOSE or float(theta.min()) <= 0:
        return None
    half = max(1, pairs // 2)
    base = math.exp(-math.log(float(theta[half])) * pairs / half)
    close = (theta - base ** -(torch.arange(pairs, dtype=torch.float64) / pairs)).abs().max()
    return base if base > 1 and float(close) < CLOSE / 10 else None


@dataclass(frozen=True)
class Raw:
    """Queries and keys that projections made; the `last` features of a key are those of all heads.

    `last` is None where keys are of one projection.
    """

    q: Float[Tensor, "b h t d"]
    k: Float[Tensor, "b g t d"]
    last: int | None = None


def candidates(layer: RecordedLayer) -> Iterator[Raw]:
    """Queries and keys apart, joined, side by side, with a gate, or of latent vectors.

    Latent keys are those of multi-head latent attention (arXiv 2405.04434): each head's first
    features come before its values in one projection; the last ones, the same for all heads, are
    the last of another.
    """
    own = [made for _, made in layer.projections]
    (_, heads, _, d), groups, e = layer.q.shape, layer.k.shape[1], layer.v.shape[-1]
    # Queries are alone, or each before the gate of its head.
    queries = [(x, heads_of(x, d)) for x in own if x.shape[-1] == heads * d]
    gated = [x for x in own if e and x.shape[-1] == heads * (d + e)]
    queries += [(x, heads_of(x, d + e)[..., :d]) for x in gated]
    both = [*own, *(made for _, made in layer.shared)]
    for width in (groups * d, groups * (d + e)):  # alone, or before the values
        for (one, q), other in itertools.product(queries, both):
            if one is not other and other.shape[-1] == width:
                yield Raw(q, heads_of(other[..., : groups * d], d))
    for one in own:
        if one.shape[-1] == (heads + 2 * groups) * d:
            parts = heads_of(one, d)
            yield Raw(parts[:, :heads], parts[:, heads : heads + groups])
            if heads == groups:
                joined = heads_of(one, 3 * d)
                yield Raw(joined[..., :d], joined[..., d : 2 * d])
    for other, shared in itertools.permutations(own, 2):
        size, rest = divmod(other.shape[-1], groups)
        last = d + e - size
        if rest or not 0 < last < d or shared.shape[-1] < last:
            continue
        kept = heads_of(other, size)
        values = kept[..., size - e :]
        if values.shape == layer.v.shape and torch.allclose(values, layer.v, 1e-3, 1e-5):
            rotated = heads_of(shared[..., -last:], last).expand(-1, groups, -1, -1)
            k = torch.cat((kept[..., : size - e], rotated), -1)
            yield from (Raw(q, k, last) for one, q in queries if one is not other)


def heads_of(x: Float[Tensor, "b t w"], size: int) -> Float[Tensor, "b h t d"]:
    """Heads of this size, side by side in x."""
    return x.reshape(*x.shape[:2], -1, size).transpose(1, 2)
