"""The attention function of an extended layer: from q and k to the inputs of a kernel.

Queries and keys arrive unrotated (where only log-n is added, rotated by the model). A `Score`
rotates them by the model's frequencies, scaled by the method. Rotated keys are cached next to the
unrotated ones of transformers' cache, so that a decoding step rotates only the new ones.

Legend: B batch, H query heads, G key heads, T queries, S keys, D head dimension, E value size.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.hf.masks import MaskedPositions, masked_positions
from normattn.hf.plan import rotates_inside
from normattn.hf.probe import KNOWN_ARGUMENTS, Layer, find_tables, hide_unselected, replace_argument
from normattn.hf.rotations import method_gain
from normattn.kernels import AttentionInputs, attend
from normattn.kernels.stats import announce_layer
from normattn.layers.cache import Room
from normattn.layers.checks import AttentionArguments
from normattn.layers.plan import AttentionPlan
from normattn.score import Score, ScoreSpec
from normattn.score.parts import Part, rope_frequencies
from normattn.score.parts.qk_norm import Baseline
from normattn.score.parts.rope import NoPE, RotaryPosition
from normattn.score.rotary import scaled


def refuse_copy(_: object) -> Any:
    """The `__reduce__` of what belongs to one extended model: raises `InputError`."""
    raise InputError("an extended model cannot be copied or pickled: remove() the extension first")


class RotatedKeyCache:
    """The rotated keys of one layer of a `DynamicCache`, kept there beside the unrotated ones.

    They take as much memory as the keys. None are kept for other caches, in inference mode, where
    torch does not count writes to a tensor, with gradients, and while a compiler traces.
    """

    def __init__(self, owner: ExtendedLayer) -> None:
        self.owner = owner
        self._source: weakref.ref[Tensor] | None = None
        self._version = 0
        self._rotated: dict[Hashable, Room] = {}

    def begin(self, k: Float[Tensor, "b g s d"], before: Float[Tensor, "b g r d"]) -> None:
        """Start an attention call with the keys `k`, which continue those `before` this call."""
        # `before` continues the unmodified keys of the last call if it is them or a prefix of them.
        source = None if self._source is None else self._source()
        continues = before is source
        if source is not None and not continues:
            same_memory = before._base is source and before.data_ptr() == source.data_ptr()
            same_strides = before.stride() == source.stride()
            continues = same_memory and same_strides and before.shape[:2] == source.shape[:2]
        if source is not None and continues and source._version == self._version:
            for room in self._rotated.values():
                room.used = min(room.used, before.shape[2])
        else:
            self._rotated.clear()
        self._source, self._version = weakref.ref(k), k._version

    def rotated(
        self, name: Hashable, k: Float[Tensor, "b g s d"], rotate: Callable[[int], Tensor]
    ) -> Float[Tensor, "b g s d"]:
        """All keys under the rotation `name`; `rotate(first)` rotates those from `first` on."""
        room = self._rotated.get(name)
        if room is None:
            # Each block of DynamicNTK rotates all keys by other angles.
            self._rotated = {name: (room := Room(2))}
        if room.used < k.shape[2]:
            room.append(rotate(room.used))
        return room.view(k.shape[2])

    def __reduce__(self) -> Any:
        """None, because a copy of the cache has other keys."""
        return type(None), ()


LAYER_ATTRIBUTE, CACHE_ATTRIBUTE = "normattn_layer", "normattn_rotated_keys"


class ForwardMemory:
    """Values that the layers share in one forward of a thread; none while a compiler traces."""

    __reduce__ = refuse_copy

    def __init__(self) -> None:
        self._thread = threading.local()

    @property
    def _values(self) -> dict[str, tuple[tuple[object, ...], Any]]:
        # A compiler traces no thread, and its values would be constants of the graph.
        return {} if torch.compiler.is_compiling() else vars(self._thread)

    def clear(self, *_: object) -> None:
        """Empty the memory; takes the arguments of any hook."""
        self._values.clear()

    def get(self, name: str) -> Any:
        """The value of this name, or None."""
        return self._values.get(name, ((), None))[1]

    def keep(self, name: str, value: Any) -> None:
        """Store a value."""
        self._values[name] = (), value

    def remember(self, name: str, inputs: tuple[object, ...], make: Callable[[], Any]) -> Any:
        """The cached result of `make` for these same input objects; computed if there is none."""
        known, value = self._values.get(name, ((), None))
        if not known or any(a is not b for a, b in zip(known, inputs, strict=True)):
            value = make()
            self._values[name] = inputs, value
        return value

    def note_cache(self, module: nn.Module, _: Any, kwargs: dict[str, Any]) -> None:
        """A hook before a layer: note its layer of a plain `DynamicCache`, and the keys in it."""
        if torch.compiler.is_compiling():
            return
        from transformers.cache_utils import DynamicCache, DynamicLayer

        cache, index = kwargs.get("past_key_values"), getattr(module, "layer_idx", None)
        layers = cache.layers if type(cache) is DynamicCache else ()
        layer: Any = layers[index] if index is not None and 0 <= index < len(layers) else None
        initialised = type(layer) is DynamicLayer and layer.is_initialized
        self.keep("cache", (layer, layer.keys) if initialised else None)

    def restore_tables(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A hook before a submodule, such as an indexer: give it the model's own tables."""
        argument, tables = find_tables(args, kwargs), self.get("own tables")
        if argument is None or tables is None:
            return None
        return replace_argument(args, kwargs, argument, tables)


@dataclass(frozen=True)
class ModelRoPE(RotaryPosition):
    """The model's own θ_m, which may be scaled; a method multiplies them by its θ'_m/θ_m."""

    name: ClassVar[str] = "ModelRoPE"
    equation: ClassVar[str] = "R^i k_j by the model's own θ_m"
    source: ClassVar[str] = "the model's configuration"
    theta: tuple[float, ...] = ()
    start: int = 0

    def rotary_dim(self, head_dim: int) -> int:
        """Two features for each frequency."""
        return 2 * len(self.theta)

    def rotary_start(self, head_dim: int) -> int:
        """The first feature that rotates."""
        return self.start

    def adjusted(self, theta: Float[Tensor, " p"]) -> Float[Tensor, " p"]:
        """The model's frequencies, times θ'/θ of unscaled ones."""
        frequencies = torch.tensor(self.theta, dtype=torch.float64)
        return frequencies * (theta / rope_frequencies(2 * frequencies.numel(), self.base))


class ExtendedLayer:
    """The attention of one layer of an extended model: the score of the method."""

    __reduce__ = refuse_copy

    def __init__(self, spec: ScoreSpec, layer: Layer, memory: ForwardMemory) -> None:
        self.memory = memory
        rotation = layer.rotation if rotates_inside(spec) else None
        self.scaling = layer.call.scaling
        self._before_rotation: tuple[Tensor, Tensor] | None = None
        self._after_rotation: Tensor | None = None
        parts: list[Part] = [Baseline(scale=self.scaling)]
        if rotation is None:
            parts += [NoPE(), *(part for part in spec.parts if part is spec.logn)]
        else:
            position = ModelRoPE(
                base=rotation.base or 10000.0,
                layout="interleaved" if rotation.layout.interleaved else "half",
                theta=tuple(rotation.frequencies.tolist()),
                start=rotation.layout.start,
            )
            parts += [position, *(part for part in spec.parts if part.when != "training-time")]
            # Rotating features get the model's amplitude for q and k; the others lose the gain.
            factors = torch.full((rotation.head_dim,), 1 / method_gain(spec), dtype=torch.float64)
            for features in rotation.layout.halves(factors):
                features.fill_(rotation.amplitude**2)
            before = [factors, torch.ones_like(factors)]
            if rotation.gains is not None:
                pairs = zip(before, rotation.gains, strict=True)
                before = [x * gain.cpu() for x, gain in pairs]
                self._after_rotation = (rotation.gains[0] * rotation.gains[1]).reciprocal()
            if any(bool((x != 1).any()) for x in before):
                self._before_rotation = before[0], before[1]
        (_, heads, _, head_dim), groups = layer.call.q.shape, layer.call.k.shape[1]
        self.score = Score(ScoreSpec(tuple(parts), spec.train_length), heads, head_dim, groups)

    def __call__(
        self,
        q: Float[Tensor, "b h t d"],
        k: Float[Tensor, "b g s d"],
        v: Float[Tensor, "b g s e"],
        mask: Tensor | None,
        position_ids: Tensor | None,
        scaling: float,
        settings: Mapping[str, Any],
    ) -> Float[Tensor, "b h t e"]:
        """softmax(score) · v; the queries are the last of the keys that the mask covers.

        `settings` are those of `AttentionInputs`: dropout, cap and sink.
        """
        unselected_mask: Tensor | None = self.memory.get("mask")
        sizes = q.shape[2], k.shape[2], q.shape[0]
        masked: MaskedPositions = self.memory.remember(
            "masked positions",
            (mask, unselected_mask, position_ids),
            lambda: masked_positions(mask, *sizes, position_ids, unselected_mask),
        )
        if scaling != self.scaling:
            q = q * (scaling / self.scaling)
        if masked.groups is None:
            cache = self._key_cache(k) if q.shape[2] < k.shape[2] else None
            k, v = k[:, :, : masked.keys], v[:, :, : masked.keys]
            return self._attend(q, k, v, masked, settings, cache)
        out = v.new_zeros(*q.shape[:3], v.shape[-1])
        for group in masked.groups:
            if group.masked.keys:
                queries = group.rows, slice(None), group.queries
                keys = group.rows, slice(None), group.keys
                out[queries] = self._attend(q[queries], k[keys], v[keys], group.masked, settings)
        return out

    def _key_cache(self, k: Float[Tensor, "b g s d"]) -> RotatedKeyCache | None:
        """The rotated keys beside the keys `k` in transformers' cache; None without."""
        layer, before = self.memory.get("cache") or (None, k)
        if layer is None or layer.keys is not k or k.is_inference() or k.requires_grad:
            return None
        cache: RotatedKeyCache | None = layer.__dict__.get(CACHE_ATTRIBUTE)
        if cache is None or cache.owner is not self:
            layer.__dict__[CACHE_ATTRIBUTE] = cache = RotatedKeyCache(self)
        cache.begin(k, before)
        return cache

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        masked: MaskedPositions,
        settings: Mapping[str, Any],
        cache: RotatedKeyCache | None = None,
    ) -> Float[Tensor, "b h t e"]:
        """Attention at the positions of `masked`; keys that the cache holds are not rotated."""
        score, positions, rotated = self.score, masked.positions, None
        cache = cache if positions.regular else None
        padding = masked.mask.padding
        paddings = padding if q.shape[2] == k.shape[2] else None, padding
        announce_layer(score, q, k, paddings, (positions.query, positions.key))
        if self._before_rotation is not None:
            factors = (factor.to(q.device) for factor in self._before_rotation)
            q, k = (scaled(x, factor) for x, factor in zip((q, k), factors, strict=True))
        if cache is not None and score.spec.blockwise:

            def rotated(num_keys: int, block: int) -> Tensor:
                def rotate(first: int) -> Tensor:
                    new = slice(first, num_keys)
                    return score.rotate_cached_keys(k[:, :, new], positions.key[new], block, first)

                return cache.rotated(block, k[:, :, :num_keys], rotate)

        elif cache is not None:
            unrotated = k

            def rotate_new(first: int) -> Tensor:
                return score.cache_keys(unrotated[:, :, first:], positions.key[first:], first)

            k = cache.rotated("far", k, rotate_new)

        def kernel(inputs: AttentionInputs) -> Tensor:
            if self._after_rotation is not None:
                factor = self._after_rotation.to(q.device)
                far_q = None if inputs.far_q is None else scaled(inputs.far_q, factor)
                inputs = replace(inputs, q=scaled(inputs.q, factor), far_q=far_q)
            return attend(match_autocast(replace(inputs, **settings)))

        plan = AttentionPlan(positions, masked.mask, cache is not None)
        return plan.attend(score, q, k, v, AttentionArguments(), kernel, rotated_keys=rotated)


def match_autocast(inputs: AttentionInputs) -> AttentionInputs:
    """Cast the inputs to autocast's dtype where autocast is on, as stock attention does."""
    device = inputs.q.device.type
    if not torch.is_autocast_enabled(device):
        return inputs
    dtype = torch.get_autocast_dtype(device)
    tensors = {name: getattr(inputs, name) for name in ("q", "k", "v", "far_q", "far_k", "sink")}
    return replace(inputs, **{name: x.to(dtype) for name, x in tensors.items() if x is not None})


def attention_function(
    module: nn.Module,
    query: Float[Tensor, "b h t d"],
    key: Float[Tensor, "b g s d"],
    value: Float[Tensor, "b g s e"],
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Float[Tensor, " h"] | None = None,
    position_ids: Tensor | None = None,
    indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "b t h e"], None]:
    """The attention function of extended layers, with transformers' signature.

    `indices` (B, T, n) are the keys that an indexer selected for each query. Raises `InputError`
    for each argument that it would otherwise ignore: attention weights, a paged cache,
    `cu_seq_lens`, bidirectional attention.
    """
    layer = module.__dict__.get(LAYER_ATTRIBUTE)
    if layer is None:
        raise InputError(
            f"{type(module).__name__} uses the attention of an extended model, but is not part "
            "of one: extend the model that it belongs to"
        )
    for name, argument in kwargs.items():
        ignored = name not in KNOWN_ARGUMENTS or name == "output_attentions"
        if ignored and argument is not None and argument is not False:
            instead = "leave it out, or remove the extension for that"
            if name.startswith(("cu_seq_lens", "max_length")):
                instead = "give position_ids that begin at 0 with every document"
            raise InputError(f"an extended model takes no {name}: {instead}")
    if kwargs.get("is_causal") is False:
        raise InputError("an extended model is causal, but is_causal is False")
    if indices is not None and attention_mask is not None:
        attention_mask = hide_unselected(attention_mask, indices)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    settings = {"dropout": float(dropout), "cap": softcap, "sink": s_aux}
    run = _run_uncompiled if layer.score.spec.blockwise else type(layer).__call__
    out = run(layer, query, key, value, attention_mask, position_ids, scale, settings)
    return out.transpose(1, 2).contiguous(), None


@torch.compiler.disable(  # type: ignore[untyped-decorator, no-untyped-call]
    reason="DynamicNTK and DualChunk read rows in blocks that depend on the length of the text"
)
def _run_uncompiled(layer: ExtendedLayer, *args: Any) -> Tensor:
    out: Tensor = layer(*args)
    return out
