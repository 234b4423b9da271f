"""The attention function of an extended layer: from q and k to the inputs of a kernel.

Queries and keys arrive unrotated (where only log-n is added, rotated by the model). A `Score`
rotates them by the model's frequencies, scaled by the method.

transformers' cache holds the unrotated keys, and each decoding step would rotate all of them again.
So rotated keys are cached too. transformers' `DynamicLayer` concatenates its keys and the new ones
in a new tensor. If its keys were the tensor of the previous call, or an unmodified prefix of it,
only the new keys are rotated.

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
from normattn.hf.probe import KNOWN_ARGUMENTS, Layer, hide_unselected
from normattn.hf.rotations import HeadRotation, method_gain
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
        if self._continues(before):
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

    def _continues(self, before: Tensor) -> bool:
        """Whether `before` is the unmodified keys of the last call, or a prefix of them."""
        source = None if self._source is None else self._source()
        if source is None or source._version != self._version:
            return False
        same_memory = before._base is source and before.data_ptr() == source.data_ptr()
        same_shape = before.stride() == source.stride() and before.shape[:2] == source.shape[:2]
        return before is source or (same_memory and same_shape)


def cache_hook(memory: ForwardMemory) -> Callable[..., None]:
    """A hook before a layer that notes its layer of a plain `DynamicCache`, and the keys in it."""

    def hook(module: nn.Module, _: Any, kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        from transformers.cache_utils import DynamicCache, DynamicLayer

        cache, index = kwargs.get("past_key_values"), getattr(module, "layer_idx", None)
        layers = cache.layers if type(cache) is DynamicCache else ()
        layer: Any = layers[index] if index is not None and 0 <= index < len(layers) else None
        initialised = type(layer) is DynamicLayer and layer.is_initialized
        memory.keep("cache", (layer, layer.keys) if initialised else None)

    return hook


LAYER_ATTRIBUTE, CACHE_ATTRIBUTE = "normattn_layer", "normattn_rotated_keys"


class ForwardMemory:
    """Values that the layers share in one forward of a thread; none while a compiler traces."""

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
        known_inputs, value = self._values.get(name, (None, None))
        if known_inputs is None or not all(
            a is b for a, b in zip(known_inputs, inputs, strict=True)
        ):
            value = make()
            self._values[name] = inputs, value
        return value


@dataclass(frozen=True)
class ModelRoPE(RotaryPosition):
    """The model's own rotation as the position of a score.

    A method multiplies the model's θ_m, which may be scaled, by θ'_m/θ_m of unscaled frequencies.
    """

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


def refuse_copy(_: object) -> Any:
    """The `__reduce__` of what belongs to one extended model: raises `InputError`."""
    raise InputError("an extended model cannot be copied or pickled: remove() the extension first")


class ExtendedLayer:
    """The attention of one layer of an extended model: the score of the method.

    Queries and keys arrive rotated by the model, unless the method rotates inside attention.
    """

    __reduce__ = refuse_copy

    def __init__(self, spec: ScoreSpec, layer: Layer, memory: ForwardMemory) -> None:
        q, k = layer.call.q, layer.call.k
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
            self._before_rotation = _feature_factors(rotation, method_gain(spec))
            if rotation.gains is not None:
                self._after_rotation = (rotation.gains[0] * rotation.gains[1]).reciprocal()
        self.score = Score(
            ScoreSpec(tuple(parts), spec.train_length), q.shape[1], q.shape[-1], k.shape[1]
        )

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
        cache = self._key_cache(k) if masked.groups is None and sizes[0] < sizes[1] else None
        if scaling != self.scaling:
            q = q * (scaling / self.scaling)
        if masked.groups is None:
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


def _feature_factors(rotation: HeadRotation, gain: float) -> tuple[Tensor, Tensor] | None:
    """Factors of the features of queries and keys before the rotation; None where all are 1.

    Rotating features get the model's amplitude for q and k; the others lose the method's gain.
    """
    q = torch.full((rotation.head_dim,), 1 / gain, dtype=torch.float64)
    for features in rotation.layout.halves(q):
        features.fill_(rotation.amplitude**2)
    k = torch.ones_like(q)
    if rotation.gains is not None:
        q, k = (x * gains.cpu() for x, gains in zip((q, k), rotation.gains, strict=True))
    return None if bool((q == 1).all() and (k == 1).all()) else (q, k)


def match_autocast(inputs: AttentionInputs) -> AttentionInputs:
    """Cast the inputs to autocast's dtype where autocast is on, as stock attention does.

    Under autocast a model's rotation returns queries and keys, but not values, in float32.
    """
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
