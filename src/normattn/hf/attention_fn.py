"""The attention function of an extended layer: from q and k to the inputs of a kernel.

Queries and keys arrive unrotated (or, where only log-n is added, rotated by the model), and a
`Score` rotates them by the model's own frequencies, scaled where the method says so.

transformers' cache holds keys as a layer projects them, and a decode step would rotate them all
again: keys that were rotated are kept beside it. Its `DynamicLayer` makes a new tensor of those it
held and the new ones. So where it held the very tensor that the call before was given, or an
untouched front part, only what is new is rotated.

Legend: B batch, H query heads, G key heads, T queries, S keys, D head dimension, E value size.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.hf.masks import Placing, placing
from normattn.hf.probe import KNOWN, hide_unselected
from normattn.hf.rope_detection import HeadRotation, Layer
from normattn.kernels import AttentionInputs, attend
from normattn.layers.cache import Room
from normattn.layers.checks import AttentionArguments
from normattn.layers.plan import AttentionPlan
from normattn.score import Score, ScoreSpec
from normattn.score.parts import Part, rope_frequencies
from normattn.score.parts.qk_norm import Baseline
from normattn.score.parts.rope import NoPE, RotaryPosition
from normattn.score.rotary import scaled


class RotatedKeyCache:
    """The rotated keys of one layer; a hook before that layer, which sees its cache.

    They take as much memory as the keys themselves, and are let go with the cache's last tensor.
    Nothing is kept of other caches than transformers' `DynamicCache`, in inference mode, where
    torch does not say whether a tensor was written to, where gradients are wanted, or while a
    compiler traces.
    """

    def __init__(self) -> None:
        self._cache: Any = None
        self._before: Tensor | None = None
        self._source: weakref.ref[Tensor] | None = None
        self._version = 0
        self._rooms: dict[Hashable, Room] = {}
        self.open = False

    def __call__(self, module: nn.Module, _: Any, kwargs: dict[str, Any]) -> None:
        """See what the cache of the layer holds before its forward."""
        cache = None if torch.compiler.is_compiling() else kwargs.get("past_key_values")
        self._cache = _dynamic(cache, module)
        self._before = None if self._cache is None else self._cache.keys

    def begin(self, k: Float[Tensor, "b g s d"], new: int, whole: bool) -> None:
        """Attention is given these keys, the last `new` of which were not there before.

        `whole` is whether all rows of the batch are rotated at once. `open` says afterwards whether
        rotated keys are kept in this call.
        """
        cache, before = self._cache, self._before
        self._cache = self._before = None
        first = k.shape[2] - new
        held = before is not None and cache is not None and cache.keys is k
        self.open = whole and first > 0 and held and not (k.is_inference() or k.requires_grad)
        if not self.open or before is None:
            self._forget()
            return
        if before.shape[2] == first and self._continues(before):
            for room in self._rooms.values():
                room.used = min(room.used, first)
        else:
            self._rooms.clear()
        self._source, self._version = weakref.ref(k, self._forget), k._version

    def rotated(
        self, name: Hashable, k: Float[Tensor, "b g s d"], rotate: Callable[[int], Tensor]
    ) -> Float[Tensor, "b g s d"]:
        """All keys, rotated in the way of that name; `rotate(first)` does those from `first` on."""
        room = self._rooms.get(name)
        if room is None:
            # Another block of DynamicNTK rotates all keys otherwise.
            self._rooms = {name: (room := Room(2))}
        if room.used < k.shape[2]:
            room.append(rotate(room.used))
        return room.view(k.shape[2])

    def _continues(self, before: Tensor) -> bool:
        """Whether the cache held what the last call was given, or the front of it."""
        source = None if self._source is None else self._source()
        if source is None or source._version != self._version:
            return False
        same_place = before._base is source and before.data_ptr() == source.data_ptr()
        same_shape = before.stride() == source.stride() and before.shape[:2] == source.shape[:2]
        return before is source or (same_place and same_shape)

    def _forget(self, _: object = None) -> None:
        self._source = None
        self._rooms.clear()


def _dynamic(cache: Any, module: nn.Module) -> Any:
    """The layer's part of a `DynamicCache` whose `update` is transformers' own; else None."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    index = getattr(module, "layer_idx", None)
    if type(cache) is not DynamicCache or index is None or index >= len(cache.layers):
        return None
    layer = cache.layers[index]
    return layer if type(layer) is DynamicLayer and layer.is_initialized else None


ATTRIBUTE = "normattn_layer"


class ForwardMemory:
    """What the layers of one forward share; the model's forward begins with an empty one."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[tuple[object, ...], Any]] = {}

    def clear(self, *_: object) -> None:
        """Forget everything; takes what a hook is given."""
        self._kept = {}

    def get(self, name: str) -> Any:
        """What was kept under a name, or None."""
        return self._kept.get(name, ((), None))[1]

    def keep(self, name: str, value: Any) -> None:
        """Keep a value; a compiler keeps nothing."""
        if not torch.compiler.is_compiling():
            self._kept[name] = (), value

    def remember(self, name: str, given: tuple[object, ...], make: Callable[[], Any]) -> Any:
        """What was made under a name of these very objects, made where there is none."""
        before, value = self._kept.get(name, (None, None))
        if before is None or not all(a is b for a, b in zip(before, given, strict=True)):
            value = make()
            if not torch.compiler.is_compiling():
                self._kept[name] = given, value
        return value


@dataclass(frozen=True)
class ModelRoPE(RotaryPosition):
    """The rotation that a model brings with it, as the position of a score.

    A method's θ'_m/θ_m of plain frequencies times the model's own, which may be scaled already.
    """

    name: ClassVar[str] = "ModelRoPE"
    equation: ClassVar[str] = "R^i k_j by the model's own θ_m"
    source: ClassVar[str] = "the model's configuration"
    theta: tuple[float, ...] = ()
    start: int = 0

    def rotary_dim(self, head_dim: int) -> int:
        """Two features a frequency."""
        return 2 * len(self.theta)

    def rotary_start(self, head_dim: int) -> int:
        """The first feature that rotates."""
        return self.start

    def adjusted(self, theta: Float[Tensor, " p"]) -> Float[Tensor, " p"]:
        """The model's frequencies, as much changed as plain ones were."""
        own = torch.tensor(self.theta, dtype=torch.float64)
        return own * (theta / rope_frequencies(2 * own.numel(), self.base))


class ExtendedLayer:
    """How one layer attends while its model is extended: by the score of the method.

    Where the method does not rotate inside, queries and keys come as they shall be multiplied:
    rotated by the model, or never (a NoPE layer). `kept` are the keys that the layer has rotated,
    where it keeps any.
    """

    def __init__(
        self,
        spec: ScoreSpec,
        layer: Layer,
        memory: ForwardMemory,
        kept: RotatedKeyCache | None = None,
    ) -> None:
        q, k = layer.call.q, layer.call.k
        self.memory, self.kept = memory, kept
        self.rotation = layer.rotation if kept is not None else None
        self.scaling = float(layer.call.more.get("scaling") or q.shape[-1] ** -0.5)
        parts: list[Part] = [Baseline(scale=self.scaling)]
        own, gain = self.rotation, 1.0
        if own is None:
            parts += [NoPE(), *(part for part in spec.parts if part is spec.logn)]
        else:
            place = ModelRoPE(
                base=own.base or 10000.0,
                layout="interleaved" if own.interleaved else "half",
                theta=tuple(own.frequencies.tolist()),
                start=own.start,
            )
            parts += [place, *(part for part in spec.parts if part.when != "training-time")]
            gain = 1.0 if spec.rope_scaling is None else spec.rope_scaling.gain(spec.train_length)
        self.score = Score(
            ScoreSpec(tuple(parts), spec.train_length), q.shape[1], q.shape[-1], k.shape[1]
        )
        self._before, self._after = None if own is None else _factors(own, gain), None
        if own is not None and own.gains is not None:
            self._after = (own.gains[0] * own.gains[1]).reciprocal()

    @property
    def blockwise(self) -> bool:
        """Whether rows are read in blocks."""
        return self.score.spec.blockwise

    def __call__(
        self,
        q: Float[Tensor, "b h t d"],
        k: Float[Tensor, "b g s d"],
        v: Float[Tensor, "b g s e"],
        mask: Tensor | None,
        position_ids: Tensor | None,
        scaling: float,
        more: Mapping[str, Any],
    ) -> Float[Tensor, "b h t e"]:
        """softmax(score) · v for the queries, the last of the keys that the mask names.

        `more` are settings of `AttentionInputs`: dropout, cap and sink.
        """
        before: Tensor | None = self.memory.get("mask")
        counted, sizes = self.rotation is not None, (q.shape[2], k.shape[2], q.shape[0])
        placed: Placing = self.memory.remember(
            f"placing {counted}",
            (mask, before, position_ids),
            lambda: placing(mask, *sizes, position_ids, counted, before),
        )
        if self.kept is not None:
            self.kept.begin(k, q.shape[2], whole=placed.runs is None)
        if self._before is not None:
            q, k = (scaled(x, by.to(x.device)) for x, by in zip((q, k), self._before, strict=True))
        if scaling != self.scaling:
            q = q * (scaling / self.scaling)
        if placed.runs is None:
            return self._attend(q, k[:, :, : placed.keys], v[:, :, : placed.keys], placed, more)
        out = v.new_zeros(*q.shape[:3], v.shape[-1])
        for run in placed.runs:
            if run.inner.keys:
                own, columns = q[run.batch, :, run.queries], (run.batch, slice(None), run.keys)
                made = self._attend(own, k[columns], v[columns], run.inner, more)
                out[run.batch, :, run.queries] = made
        return out

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, placed: Placing, more: Mapping[str, Any]
    ) -> Float[Tensor, "b h t e"]:
        """The same for keys and queries at the positions of `placed`.

        Keys of the calls before are not rotated again.
        """
        score, kept, at, rotated = self.score, self.kept, placed.positions, None
        cached = kept is not None and kept.open and at.regular
        if kept is not None and cached and self.blockwise:

            def rotated(keys: int, block: int) -> Tensor:
                def rotate(first: int) -> Tensor:
                    own, places = k[:, :, first:keys], at.key[first:keys]
                    return score.rotate_cached_keys(own, places, block, first)

                return kept.rotated(block, k[:, :, :keys], rotate)

        elif kept is not None and cached:
            given = k
            k = kept.rotated(
                "far", k, lambda first: score.cache_keys(given[:, :, first:], at.key[first:], first)
            )

        def kernel(inputs: AttentionInputs) -> Tensor:
            if self._after is not None:
                after = self._after.to(q.device)
                far_q = None if inputs.far_q is None else scaled(inputs.far_q, after)
                inputs = replace(inputs, q=scaled(inputs.q, after), far_q=far_q)
            return attend(one_type(replace(inputs, **more)))

        plan = AttentionPlan(at, placed.seen, cached)
        return plan.attend(score, q, k, v, AttentionArguments(), kernel, rotated=rotated)


def _factors(rotation: HeadRotation, gain: float) -> tuple[Tensor, Tensor] | None:
    """What to multiply queries and keys with before they rotate; None for nothing.

    Features that rotate are multiplied by the model's amplitude on either side, and those that do
    not by no gain of the method.
    """
    d, size = rotation.head_dim, 2 * rotation.frequencies.numel()
    q = torch.full((d,), 1 / gain, dtype=torch.float64)
    q[rotation.start : rotation.start + size] = rotation.amplitude**2
    k = torch.ones(d, dtype=torch.float64)
    if rotation.gains is not None:
        q, k = (x * own.cpu() for x, own in zip((q, k), rotation.gains, strict=True))
    return None if bool((q == 1).all() and (k == 1).all()) else (q, k)


def one_type(inputs: AttentionInputs) -> AttentionInputs:
    """The inputs in autocast's type where that is on, as the stock attention computes them.

    A model's rotation makes float32 of queries and keys there, while values stay as they are.
    """
    device = inputs.q.device.type
    if not torch.is_autocast_enabled(device):
        return inputs
    dtype = torch.get_autocast_dtype(device)
    given = {name: getattr(inputs, name) for name in ("q", "k", "v", "far_q", "far_k", "sink")}
    return replace(inputs, **{name: x.to(dtype) for name, x in given.items() if x is not None})


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
    **more: Any,
) -> tuple[Float[Tensor, "b t h e"], None]:
    """Attention as transformers calls it, for the layers of an extended model.

    `indices` (B, T, n) are the keys that an indexer has selected for each query. Raises
    `InputError` for every argument that it would otherwise ignore: attention weights, a paged
    cache, `cu_seq_lens`, bidirectional attention.
    """
    layer = module.__dict__.get(ATTRIBUTE)
    if layer is None:
        raise InputError(
            f"{type(module).__name__} uses the attention of an extended model, but is not part "
            "of one: extend the model that it belongs to"
        )
    for name, given in more.items():
        ignored = name not in KNOWN or name == "output_attentions"
        if ignored and given is not None and given is not False:
            instead = "leave it out, or remove the extension for that"
            if name.startswith(("cu_seq_lens", "max_length")):
                instead = "give position_ids that begin at 0 with every document"
            raise InputError(f"an extended model takes no {name}: {instead}")
    if more.get("is_causal") is False:
        raise InputError("an extended model is causal, but is_causal is False")
    if indices is not None:
        if attention_mask is None or attention_mask.dtype != torch.bool:
            raise InputError(
                "an indexer selects keys, but its layer got no mask of query-key pairs"
            )
        attention_mask = hide_unselected(attention_mask, indices)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    settings = {"dropout": float(dropout), "cap": softcap, "sink": s_aux}
    run = _uncompiled if layer.blockwise else type(layer).__call__
    out = run(layer, query, key, value, attention_mask, position_ids, scale, settings)
    return out.transpose(1, 2).contiguous(), None


@torch.compiler.disable(  # type: ignore[untyped-decorator, no-untyped-call]
    reason="DynamicNTK and DualChunk read rows in blocks that depend on the length of the text"
)
def _uncompiled(layer: ExtendedLayer, *given: Any) -> Tensor:
    """What a compiled model runs between its graphs."""
    out: Tensor = layer(*given)
    return out
