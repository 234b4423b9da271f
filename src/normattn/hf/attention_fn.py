"""The attention function of an extended layer: from un-rotated q and k to a kernel's problem.

Legend: B batch, H query heads, G key heads, T queries, S keys, D head dimension, E value size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.hf.masks import Placing, placing
from normattn.hf.probe import KNOWN
from normattn.hf.rotated_key_cache import RotatedKeyCache
from normattn.hf.rotation_tables import HeadRotation, MethodTables, query_factor
from normattn.kernels import AttentionInputs, attend
from normattn.layers.prepare import in_blocks
from normattn.score import Positions, ScoreSpec
from normattn.score.rotary import (
    ChunkKeys,
    ChunkQueries,
    RotaryTables,
    Rotation,
    scale_column,
    scaled,
)

ATTRIBUTE = "normattn_layer"
MASK_BEFORE, OWN_TABLES = "mask before", "own tables"
"""What a layer's hooks keep: its mask before it chooses keys, its own position embeddings."""


@dataclass(frozen=True)
class CallOptions:
    """What a layer asks of attention beside its tensors."""

    scaling: float
    dropout: float
    softcap: float | None
    sink: Float[Tensor, " h"] | None


class ForwardMemory:
    """What the layers of one forward share; the model's forward begins with an empty one."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[tuple[object, ...], Any]] = {}

    def clear(self, *_: object) -> None:
        """Forget everything; takes what a hook is given."""
        self._kept = {}

    def get(self, name: str, given: tuple[object, ...]) -> Any:
        """What was kept for these very objects, or None."""
        kept = self._kept.get(name)
        if kept is None or len(kept[0]) != len(given):
            return None
        same = all(a is b for a, b in zip(kept[0], given, strict=True))
        return kept[1] if same else None

    def keep(self, name: str, given: tuple[object, ...], value: Any) -> None:
        """Keep a value for these very objects; a compiler keeps nothing."""
        if not torch.compiler.is_compiling():
            self._kept[name] = (given, value)


@dataclass(frozen=True)
class ExtendedLayer:
    """How one layer attends while its model is extended.

    `tables` turns queries and keys; None where they come as they shall be multiplied: rotated by
    the model, or never (a NoPE layer). `kept` are the keys that it has turned, where it keeps any.
    """

    spec: ScoreSpec
    tables: MethodTables | None
    memory: ForwardMemory
    kept: RotatedKeyCache | None = None

    @property
    def by_blocks(self) -> bool:
        """Whether the rows of a text are read in blocks that depend on its length."""
        return self.spec.blockwise or self.spec.chunk_remapping is not None

    def __call__(
        self,
        q: Float[Tensor, "b h t d"],
        k: Float[Tensor, "b g s d"],
        v: Float[Tensor, "b g s e"],
        mask: Tensor | None,
        position_ids: Tensor | None,
        asked: CallOptions,
    ) -> Float[Tensor, "b h t e"]:
        """softmax(score) · v for the queries, the last of the keys that the mask names."""
        placement = self._placing(mask, q, k, position_ids)
        if self.kept is not None:
            self.kept.begin(k, q.shape[2], whole=placement.runs is None)
        if placement.runs is None:
            return self._attend(
                q, k[:, :, : placement.keys], v[:, :, : placement.keys], placement, asked
            )
        out = v.new_zeros(*q.shape[:3], v.shape[-1])
        for run in placement.runs:
            if run.inner.keys:
                columns = (run.batch, slice(None), run.keys)
                own = q[run.batch, :, run.queries]
                out[run.batch, :, run.queries] = self._attend(
                    own, k[columns], v[columns], run.inner, asked
                )
        return out

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, placement: Placing, asked: CallOptions
    ) -> Float[Tensor, "b h t e"]:
        """The same for keys and queries that stand where `placement` says."""

        def part(rows: slice, keys: int, block: int) -> Tensor:
            seen = placement.seen.part(rows, keys)
            own, k_own = q[:, :, rows], k[:, :, :keys]
            if self.tables is None:
                scale = query_factor(self.spec, asked.scaling, placement.positions.n[..., rows])
                problem = AttentionInputs(
                    scaled(own, scale_column(scale)), k_own, v[:, :, :keys], seen
                )
            else:
                problem = self._rotated(own, k_own, v[:, :, :keys], placement, rows, block, asked)
                problem = replace(problem, visibility=seen)
            problem = replace(problem, dropout=asked.dropout, cap=asked.softcap, sink=asked.sink)
            problem = one_type(problem)
            return attend(problem)

        if self.tables is None:
            return part(slice(0, q.shape[2]), placement.keys, 0)
        q, k = _arranged(self.tables.rotation, q, 0), _arranged(self.tables.rotation, k, 1)
        return in_blocks(self.spec, placement.positions, part)

    def _rotated(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        placement: Placing,
        rows: slice,
        block: int,
        asked: CallOptions,
    ) -> AttentionInputs:
        """The problem of some rows: queries and keys at their near and far positions."""
        assert self.tables is not None
        at = placement.positions.part(rows, k.shape[2])
        regime = self.spec.remapping
        start = 0
        if regime is not None and at.regular and regime.window is not None:
            start = max(0, k.shape[2] - q.shape[2] - regime.window + 1)
        name = f"{rows} {k.shape[2]} {block} {asked.scaling} {q.dtype}"
        given = (placement, self.tables)
        folds: tuple[RotaryTables, RotaryTables, RotaryTables] | None = self.memory.get(name, given)
        if folds is None:
            far = self.tables.keys(at, 0, block, q.dtype)
            folds = (
                self.tables.queries(at, block, asked.scaling, q.dtype),
                far if start == 0 else self.tables.keys(at, start, block, q.dtype),
                far,
            )
            self.memory.keep(name, given, folds)
        queries, near, far = folds
        assert queries.near is not None
        assert near.near is not None
        near_q = _evened(self.tables.rotation, queries.near(q))
        if regime is None or queries.far is None:
            near_k = self._keys(k, near.near, at, block, "near")
            return AttentionInputs(near_q, near_k, v, placement.seen)
        near_k = near.near(k[:, :, start:])
        far_q = _evened(self.tables.rotation, queries.far(q))
        far_k = k if far.far is None else self._keys(k, far.far, at, block, "far")
        return AttentionInputs(
            *(near_q, near_k, v, placement.seen, far_q, far_k, regime.window), near_start=start
        )

    def _keys(
        self,
        k: Tensor,
        whole: Rotation | ChunkQueries | ChunkKeys,
        at: Positions,
        block: int,
        side: Literal["near", "far"],
    ) -> Tensor:
        """All keys at their near or far positions: those of the calls before as they were kept."""
        tables, kept = self.tables, self.kept
        counted = at.regular and isinstance(whole, Rotation)
        if kept is None or tables is None or not (kept.open and counted):
            return whole(k)

        def turn(first: int) -> Tensor:
            made = getattr(tables.keys(at, first, block, k.dtype), side)
            turned: Tensor = made(k[:, :, first:])
            return turned

        return kept.rotated((side, block), k, turn)

    def _placing(
        self, mask: Tensor | None, q: Tensor, k: Tensor, position_ids: Tensor | None
    ) -> Placing:
        before: Tensor | None = self.memory.get(MASK_BEFORE, ())
        given = (mask, before, position_ids, self.tables)
        placement: Placing | None = self.memory.get("placing", given)
        if placement is None:
            counted = self.tables is not None
            sizes = (q.shape[2], k.shape[2], q.shape[0])
            placement = placing(mask, *sizes, position_ids, counted, before)
            self.memory.keep("placing", given, placement)
        return placement


def one_type(problem: AttentionInputs) -> AttentionInputs:
    """The problem in autocast's type where that is on, as the stock attention computes it.

    A model's rotation makes float32 of queries and keys there, while values stay as they are.
    """
    device = problem.q.device.type
    if not torch.is_autocast_enabled(device):
        return problem
    dtype = torch.get_autocast_dtype(device)
    tensors = {
        name: value.to(dtype)
        for name in ("q", "k", "v", "far_q", "far_k", "sink")
        if (value := getattr(problem, name)) is not None
    }
    return replace(problem, **tensors)


def _arranged(rotation: HeadRotation, x: Tensor, side: int) -> Tensor:
    """Queries (side 0) or keys (1) with the features that turn first, and evenly."""
    x = rotation.arranged(x)
    return x if rotation.gains is None else x * rotation.gains[side].to(x.device, x.dtype)


def _evened(rotation: HeadRotation, q: Tensor) -> Tensor:
    """Rotated queries without the gains that stand in the products of features."""
    if rotation.gains is None:
        return q
    even = (rotation.gains[0] * rotation.gains[1]).reciprocal().to(q.device)
    # Rules by chunks lay the same features side by side.
    return scaled(q, even.repeat(q.shape[-1] // even.shape[-1]))


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
            raise InputError(f"an extended model takes no {name}: {_instead(name)}")
    if more.get("is_causal") is False:
        raise InputError("an extended model is causal, but is_causal=False was asked for")
    if indices is not None:
        attention_mask = _selected(attention_mask, indices)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    asked = CallOptions(scale, float(dropout), softcap, s_aux)
    run = _uncompiled if layer.by_blocks else type(layer).__call__
    out = run(layer, query, key, value, attention_mask, position_ids, asked)
    return out.transpose(1, 2).contiguous(), None


@torch.compiler.disable(  # type: ignore[untyped-decorator, no-untyped-call]
    reason="DynamicNTK and DualChunk read rows in blocks that depend on the length of the text"
)
def _uncompiled(layer: ExtendedLayer, *given: Any) -> Tensor:
    """What a compiled model runs between its graphs."""
    out: Tensor = layer(*given)
    return out


def _instead(name: str) -> str:
    if name.startswith(("cu_seq_lens", "max_length")):
        return "give position_ids that begin at 0 with every document"
    return "leave it out, or remove the extension for that"


def _selected(mask: Tensor | None, indices: Tensor) -> Tensor:
    """The mask of every pair without the keys that were not selected."""
    if mask is None or mask.dim() != 4 or mask.dtype != torch.bool:
        raise InputError("an indexer selects keys, but its layer got no mask of every pair")
    chosen = torch.zeros_like(mask[:, 0]).scatter(-1, indices.long(), True)
    return mask & chosen[:, None]
