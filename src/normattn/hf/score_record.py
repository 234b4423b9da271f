"""Record every attention layer of a model, and fit the norm and rotation from projections to q, k.

Layers are recorded in the model's own forward, so this works for every family whose layers take
their attention function from transformers. The first token has position 0 and is not rotated: it
determines the normalisation and its gain. Later tokens determine the angle of each pair.

Legend: B batch, H query heads, G key heads, T tokens, D head dimension, E value size, W width, P
rotated pairs.
"""

from __future__ import annotations

import itertools
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
from normattn.hf.rotations import TOLERANCE

_BATCH = 4
HALF_PRECISION = (torch.bfloat16, torch.float16)
Projection = tuple[Tensor, Tensor]
"""Input and output of a linear map inside an attention layer, (B, T, W)."""


@dataclass
class RecordedLayer(AttentionCall):
    """One call of an attention layer, with its projections in the same run.

    q and k are normalised and rotated, and `mask` (B, H or 1, T, S) also hides keys that an indexer
    did not select. `shared` are the projections of the layer whose keys this one reads.
    """

    index: int = 0
    projections: list[Projection] = field(default_factory=list)
    shared: list[Projection] = field(default_factory=list)


def record_layers(model: Any, tokens: int = 48) -> list[RecordedLayer]:
    """Record every attention layer of the model on `tokens` random tokens.

    Raises `InputError` for a model that cannot run on tokens alone, or whose layers do not take
    their attention function from transformers' AttentionInterface.
    """
    vocabulary, name = model.config.get_text_config().vocab_size, type(model).__name__
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(
        min(2, vocabulary - 1), vocabulary, (_BATCH, tokens), generator=generator
    ).to(model.device)
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
        if x.dim() == 4 and x.shape[1] != tokens:
            return x[:, 0] if x.shape[1] == 1 else None
        return x.flatten(2)

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

    def matches(self, other: Norm) -> bool:
        """Whether one part of a score can express both, of queries and of keys."""
        across = {self.across == "all", other.across == "all"}
        return (self.kind, self.eps) == (other.kind, other.eps) and len(across) == 1

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
        shift = kind == "layer"
        mean_x, mean_y = (
            side.mean(dims, keepdim=True) if shift else 0.0 * side for side in (x, first)
        )
        dx, dy = x - mean_x, first - mean_y
        gain = (dx * dy).sum(dims, keepdim=True)
        gain = gain / dx.square().sum(dims, keepdim=True).clamp(min=1e-30)
        bias = (mean_y - gain * mean_x).mean(0).expand(ones.shape)
        gain = gain.mean(0).expand(ones.shape)
        if not kind and float(gain.amax() - gain.amin()) > TOLERANCE * float(gain.abs().amax()):
            continue
        if float((x * gain + bias - first).abs().max()) <= TOLERANCE * float(first.abs().max()):
            yield Norm(kind, across, epsilon, gain, bias)


@dataclass(frozen=True)
class Unrotated:
    """Queries and keys as projections give them, before norm and rotation.

    The `shared_size` last features of a key are shared by all heads; None where none are.
    """

    q: Float[Tensor, "b h t d"]
    k: Float[Tensor, "b g t d"]
    shared_size: int | None = None


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
