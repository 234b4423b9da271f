"""The attention function of an extended layer: from q and k to the inputs of a kernel.

Queries and keys arrive un-rotated (or, where only log-n is added, rotated by the model). The
rotation is that of the model's own frequencies, scaled where the method says so.

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
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.hf.masks import Placing, placing
from normattn.hf.probe import KNOWN, hide_unselected
from normattn.hf.rope_detection import HeadRotation, method_frequencies, method_gain
from normattn.kernels import AttentionInputs, attend
from normattn.layers.cache import Room
from normattn.layers.prepare import in_blocks
from normattn.plain import keepable
from normattn.score import Positions, ScoreSpec
from normattn.score.rotary import RotaryTables, Rotation, scale_column, scaled


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


def query_factor(spec: ScoreSpec, scaling: float, n: Tensor) -> Tensor | float:
    """λ at n visible keys: the model's own scale, and log-n."""
    if spec.logn is None:
        return scaling
    assert spec.train_length is not None
    return spec.logn.factor(n.double(), spec.train_length) * scaling


class MethodTables:
    """A method's rotary tables over the rotation that a model brings with it, cached."""

    def __init__(self, spec: ScoreSpec, rotation: HeadRotation) -> None:
        self.spec, self.rotation = spec, rotation
        amplitude = rotation.amplitude * method_gain(spec)
        # Far keys that all stand at 0 need no rotation (ReRoPE).
        self._far_still = False
        if spec.remapping is not None and amplitude == 1:
            some = torch.tensor([1.0, 2.0**20])
            self._far_still = not bool(spec.remapping.far_positions(some, some)[1].any())

    def queries(
        self, at: Positions, block: int, scaling: float, dtype: torch.dtype
    ) -> RotaryTables:
        """The tables of queries, as the rows of `block` read them, with the model's own λ."""
        if self.spec.blockwise:
            # The rows of one block of DynamicNTK are few: only its keys are worth keeping.
            return self.make(at.query, block, scaling, dtype).select_block(block)
        first = at.key.shape[-1] - at.query.shape[-1]
        return self._cached(at, at.query, first, block, scaling, dtype)

    def keys(self, at: Positions, start: int, block: int, dtype: torch.dtype) -> RotaryTables:
        """The tables of keys from column `start` on, as the rows of `block` read them."""
        # Rules by chunks rotate keys alike for every block, and lay them out for each.
        own = 0 if self.spec.chunk_remapping is not None else block
        return self._cached(at, at.key[..., start:], start, own, None, dtype).select_block(block)

    def make(
        self, positions: Tensor, block: int, scaling: float | None, dtype: torch.dtype
    ) -> RotaryTables:
        """The tables of queries, with the model's own λ; those of keys where `scaling` is None."""
        spec = self.spec.for_block(block)
        theta = method_frequencies(spec, self.rotation)
        amplitude = self.rotation.amplitude * method_gain(spec)
        rotator = self.rotation.rotator(theta, amplitude)
        if scaling is not None:
            scale = query_factor(spec, scaling, positions.clamp(min=0) + 1)
            return rotator.queries(spec, positions, scale, dtype)
        made = rotator.keys(spec, positions, dtype)
        return replace(made, far=None) if self._far_still else made

    def _cached(
        self,
        at: Positions,
        positions: Tensor,
        first: int,
        block: int,
        scaling: float | None,
        dtype: torch.dtype,
    ) -> RotaryTables:
        if not at.regular or not keepable():
            return self.make(positions, block, scaling, dtype)
        last = first + positions.shape[-1]
        capacity = max(64, 1 << (last - 1).bit_length())
        whole = _counted_tables(self, capacity, positions.device, block, scaling, dtype)
        return whole.rows(slice(first, last))


@lru_cache(maxsize=32)
@torch.inference_mode(False)
def _counted_tables(
    tables: MethodTables,
    capacity: int,
    device: torch.device,
    block: int,
    scaling: float | None,
    dtype: torch.dtype,
) -> RotaryTables:
    """The tables of positions 0 … capacity − 1."""
    return tables.make(torch.arange(capacity, device=device), block, scaling, dtype)


@dataclass(frozen=True)
class ExtendedLayer:
    """How one layer attends while its model is extended.

    `tables` rotates queries and keys; None where they come as they shall be multiplied: rotated by
    the model, or never (a NoPE layer). `kept` are the keys that it has rotated, where it keeps any.
    """

    spec: ScoreSpec
    tables: MethodTables | None
    memory: ForwardMemory
    kept: RotatedKeyCache | None = None

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
        counted, sizes = self.tables is not None, (q.shape[2], k.shape[2], q.shape[0])
        placed: Placing = self.memory.remember(
            "placing",
            (mask, before, position_ids, self.tables),
            lambda: placing(mask, *sizes, position_ids, counted, before),
        )
        if self.kept is not None:
            self.kept.begin(k, q.shape[2], whole=placed.runs is None)
        if placed.runs is None:
            k, v = k[:, :, : placed.keys], v[:, :, : placed.keys]
            return self._attend(q, k, v, placed, scaling, more)
        out = v.new_zeros(*q.shape[:3], v.shape[-1])
        for run in placed.runs:
            if run.inner.keys:
                own, columns = q[run.batch, :, run.queries], (run.batch, slice(None), run.keys)
                made = self._attend(own, k[columns], v[columns], run.inner, scaling, more)
                out[run.batch, :, run.queries] = made
        return out

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        placed: Placing,
        scaling: float,
        more: Mapping[str, Any],
    ) -> Float[Tensor, "b h t e"]:
        """The same for keys and queries at the positions of `placed`."""
        if self.tables is None:  # rotated by the model, or without positions
            factor = scale_column(query_factor(self.spec, scaling, placed.positions.n))
            seen = placed.seen.part(slice(0, q.shape[2]), placed.keys)
            return attend(one_type(AttentionInputs(scaled(q, factor), k, v, seen, **more)))
        gains = self.tables.rotation.gains
        if gains is not None:  # features that rotate evenly
            q, k = (x * gain.to(x.device, x.dtype) for x, gain in zip((q, k), gains, strict=True))

        def part(rows: slice, keys: int, block: int) -> Tensor:
            given = q[:, :, rows], k[:, :, :keys], v[:, :, :keys]
            inputs = self._rotated(*given, placed, rows, block, scaling)
            seen = placed.seen.part(rows, keys)
            return attend(one_type(replace(inputs, visibility=seen, **more)))

        return in_blocks(self.spec, placed.positions, part)

    def _rotated(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        placed: Placing,
        rows: slice,
        block: int,
        scaling: float,
    ) -> AttentionInputs:
        """The inputs of some rows: queries and keys at their near and far positions."""
        tables = self.tables
        assert tables is not None
        at = placed.positions.part(rows, k.shape[2])
        remapping, start = self.spec.remapping, 0
        if remapping is not None and at.regular and remapping.window is not None:
            start = max(0, k.shape[2] - q.shape[2] - remapping.window + 1)

        def make() -> tuple[RotaryTables, RotaryTables, RotaryTables]:
            far = tables.keys(at, 0, block, q.dtype)
            near = far if start == 0 else tables.keys(at, start, block, q.dtype)
            return tables.queries(at, block, scaling, q.dtype), near, far

        name = f"{rows} {k.shape[2]} {block} {scaling} {q.dtype}"
        queries, near, far = self.memory.remember(name, (placed, tables), make)
        near_q = _evened(tables.rotation, queries.near(q))
        if remapping is None or queries.far is None:
            near_k = self._keys(k, near.near, at, block, "near")
            return AttentionInputs(near_q, near_k, v, placed.seen)
        near_k = near.near(k[:, :, start:])
        far_q = _evened(tables.rotation, queries.far(q))
        far_k = k if far.far is None else self._keys(k, far.far, at, block, "far")
        inputs = AttentionInputs(near_q, near_k, v, placed.seen, far_q, far_k, remapping.window)
        return replace(inputs, near_start=start)

    def _keys(self, k: Tensor, whole: Any, at: Positions, block: int, side: str) -> Tensor:
        """All keys at their near or far positions: those of the calls before as they were kept."""
        tables, kept = self.tables, self.kept
        kept_apart = kept is not None and kept.open and at.regular and isinstance(whole, Rotation)
        if tables is None or kept is None or not kept_apart:
            return whole(k)  # type: ignore[no-any-return]

        def rotate(first: int) -> Tensor:
            made: Tensor = getattr(tables.keys(at, first, block, k.dtype), side)(k[:, :, first:])
            return made

        return kept.rotated((side, block), k, rotate)


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


def _evened(rotation: HeadRotation, q: Tensor) -> Tensor:
    """Rotated queries without the gains in the products of features."""
    if rotation.gains is None:
        return q
    return scaled(q, (rotation.gains[0] * rotation.gains[1]).reciprocal().to(q.device))


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
            f"{type(module).__name__} runs with the attention of an extended model, but it is not "
            "part of one: extend its own model"
        )
    for name, given in more.items():
        ignored = name not in KNOWN or name == "output_attentions"
        if ignored and given is not None and given is not False:
            instead = "leave it out, or remove the extension for that"
            if name.startswith(("cu_seq_lens", "max_length")):
                instead = "give position_ids that begin at 0 with every document"
            raise InputError(f"an extended model takes no {name}: {instead}")
    if more.get("is_causal") is False:
        raise InputError("an extended model is causal, but is_causal=False was asked for")
    if indices is not None:
        if attention_mask is None or attention_mask.dtype != torch.bool:
            raise InputError("an indexer selects keys, but its layer got no mask of every pair")
        attention_mask = hide_unselected(attention_mask, indices)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    settings = {"dropout": float(dropout), "cap": softcap, "sink": s_aux}
    run = _uncompiled if layer.spec.blockwise else type(layer).__call__
    out = run(layer, query, key, value, attention_mask, position_ids, scale, settings)
    return out.transpose(1, 2).contiguous(), None


@torch.compiler.disable(  # type: ignore[untyped-decorator, no-untyped-call]
    reason="DynamicNTK and DualChunk read rows in blocks that depend on the length of the text"
)
def _uncompiled(layer: ExtendedLayer, *given: Any) -> Tensor:
    """What a compiled model runs between its graphs."""
    out: Tensor = layer(*given)
    return out
