"""`prepare` decides everything about a call of attention before a number is read; `run` computes.

An `AttentionPlan` holds the positions, the mask and the kernel, and, where everything that a score
does folds into queries and keys and torch's own kernel serves, rotary tables with λ in them. The
same plan serves training, a prefill, tokens beside a cache and cross attention. One more token
beside a cache has tables for the tokens to come as well (`decode_step`).

Legend: B batch, H query heads, G key heads, T queries, S keys, D head dimension, E value size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd import forward_ad

from normattn.errors import InputError
from normattn.kernels import AttentionInputs, AttentionMask, attend, choose
from normattn.kernels.inputs import Selection, check_shapes
from normattn.kernels.sdpa import sdpa
from normattn.kernels.stats import _OBSERVER, confine
from normattn.layers.checks import check_score
from normattn.layers.gates import add_forgetting, apply_gate, join_pairs
from normattn.layers.residual_scores import ResidualLayer
from normattn.plain import plain_operations
from normattn.score import Positions, Score, ScoreSpec
from normattn.score.rotary import (
    Rotation,
    RotationArguments,
    key_tables,
    query_tables,
    rotate_rows,
    rotate_with_gradient,
    scaled,
)
from normattn.score.spec import as_spec

Kernel = Callable[[AttentionInputs], Tensor]

# Plans are forgotten, all at once, when there are so many: lengths may vary without end.
_MOST = 512
_PLANS: dict[tuple[object, ...], tuple[object, AttentionPlan]] = {}


@dataclass(frozen=True, eq=False)
class FoldedTables:
    """What turns queries and keys into operands of `scaled_dot_product_attention`.

    `query` are the arguments that rotate queries and multiply them by λ, `key` those that rotate
    keys; None where nothing rotates. `scale` is then λ, a number for all rows or one for each.
    `score` is one that learns nothing, built for a specification; None where callers have their
    own, of the sizes `heads`.
    """

    score: Score | None
    heads: tuple[int, int, int]
    query: RotationArguments | None
    key: RotationArguments | None
    scale: Tensor | float | None


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """Which keys the queries of a call see, from which positions, and the kernel.

    `cached` says that keys come from `Score.cache_keys`, normalised and rotated. `tables` are there
    where torch's kernel alone serves, for calls that ask for nothing beside q, k and v.
    """

    positions: Positions
    mask: AttentionMask
    backend: str = "auto"
    cached: bool = False
    tables: FoldedTables | None = None

    def run_folded(
        self,
        tables: FoldedTables,
        score: Score,
        q: Float[Tensor, "b h t d"],
        k: Float[Tensor, "b g s d"],
        v: Float[Tensor, "b g s e"],
    ) -> Float[Tensor, "b h t e"]:
        """softmax(score) · v by norm, rotation and torch's kernel.

        What is not finite shows. On a CPU a number is read, and other kernels take over. On another
        device the rows of the batch that hold it become NaN, without waiting for the device.
        """
        # Not by attribute, which is a call of Python each.
        norms, learned = score._modules, score.scale
        query_norm, key_norm = norms.get("query_norm"), norms.get("key_norm")
        if query_norm is not None:
            q = query_norm.apply_directly(q)  # type: ignore[operator]
        if key_norm is not None:
            k = key_norm.apply_directly(k)  # type: ignore[operator]
        if learned is not None:
            q = q * learned
        if tables.query is not None and tables.key is not None:
            rotate = rotate_with_gradient if torch.is_grad_enabled() else rotate_rows
            q, k = rotate(q, *tables.query, False), rotate(k, *tables.key, False)
        elif isinstance(tables.scale, Tensor):
            q = scaled(q, tables.scale)
        elif tables.scale is not None:
            q = q * tables.scale  # as for a number for each row: equal numbers give equal bits
        if q.is_cpu:
            # In float32: a sum of half-precision numbers is beyond their range soon.
            total = q.detach().sum(dtype=torch.float32) + k.detach().sum(dtype=torch.float32)
            if not math.isfinite(total.item()):
                return attend(AttentionInputs(q, k, v, self.mask), self.backend)
            return sdpa(q, k, v, self.mask.causal, 1.0)
        return sdpa(q, k, v, self.mask.causal, 1.0) + zero_or_nan(q, k).to(v.dtype)

    def run(
        self,
        score: Score,
        q: Float[Tensor, "b h t d"],
        k: Float[Tensor, "b g s cached"],
        v: Float[Tensor, "b g s e"],
        *,
        residual: ResidualLayer | None = None,
        gate: Float[Tensor, "b t gates"] | None = None,
        forget_sums: Float[Tensor, "b h s"] | None = None,
        query_padding: Bool[Tensor, "b t"] | None = None,
        dropout: float = 0.0,
        selection: Selection | None = None,
        rotate: Callable[[int, int], Tensor | None] | None = None,
        kernel: Kernel | None = None,
    ) -> Float[Tensor, "b h t out"]:
        """softmax(score) · v for any score, with what a layer adds to it.

        Args:
            score: the score.
            q: queries, not yet normalised, scaled or rotated.
            k: keys, likewise, or those of a cache.
            v: values; side by side where heads are pairs.
            residual: what the layers below hand on.
            gate: logits of the output's gate.
            forget_sums: summed gates of `FoX`, of all keys.
            query_padding: True where a query is padding, for statistics over queries.
            dropout: the probability of dropping a weight.
            selection: what queries before have selected, beside a cache.
            rotate: (keys, block) → the first keys of a cache as the rows of a block read them, for
                a score that works by blocks.
            kernel: computes instead of the one that the plan names (`explain`).
        """
        compute = kernel or self._kernel(residual)

        def part(rows: slice, keys: int, block: int) -> Tensor:
            own = None if query_padding is None else query_padding[:, rows]
            tensors = q[:, :, rows], k[:, :, :keys], v[:, :, :keys]
            at, seen = self.positions.part(rows, keys), self.mask.part(rows, keys)
            if self.cached:
                rotated = None if rotate is None else rotate(keys, block)
                inputs = score.with_cached_keys(*tensors, at, seen, own, block, dropout, rotated)
            else:
                inputs = score(*tensors, at, seen, own, block, dropout)
            if selection is not None:
                inputs = replace(inputs, selection=selection)
            return compute(add_forgetting(inputs, forget_sums, rows, q.shape[2]))

        # The definition is made of operations that every derivative goes through.
        with plain_operations(self.backend == "reference"):
            out = in_blocks(score.spec, self.positions, part)
            return apply_gate(score.spec, join_pairs(score, out), gate)

    def _kernel(self, residual: ResidualLayer | None) -> Kernel:
        if residual is None:
            return lambda inputs: attend(inputs, self.backend)
        return lambda inputs: residual.attend(inputs, self.backend)

    def without_first(self, keys: int) -> AttentionPlan:
        """The plan for keys of which the first are forgotten; distances stay what they are."""
        if not keys:
            return self
        at, seen = self.positions, self.mask
        mask, documents = seen.mask, seen.key_documents
        return replace(
            self,
            positions=replace(at, key=at.key[..., keys:], regular=False),
            mask=replace(
                seen,
                key=seen.key[..., keys:],
                padding=None if seen.padding is None else seen.padding[:, keys:],
                mask=mask if mask is None or mask.shape[-1] == 1 else mask[..., keys:],
                key_documents=None if documents is None else documents[:, keys:],
            ),
        )


def prepare(
    spec: ScoreSpec,
    queries: int,
    keys: int,
    batch: int,
    device: torch.device,
    causal: bool,
    backend: str = "auto",
    *,
    attn_mask: Tensor | None = None,
    key_padding: Bool[Tensor, "b s"] | None = None,
    q_positions: Int[Tensor, "*bq t"] | None = None,
    k_positions: Int[Tensor, "*bk s"] | None = None,
    documents: Int[Tensor, "b s"] | None = None,
    cached: bool = False,
) -> AttentionPlan:
    """Build positions and the mask of a call; the arguments are those of `attention`.

    The queries beside a cache are the last of its keys, whose positions grow.
    """
    given = (key_padding, q_positions, k_positions, documents)
    if causal and all(argument is None for argument in given):
        positions = regular_positions(queries, keys, device)
    else:
        positions = Positions.of(queries, keys, causal, device, *given)
    if cached and not positions.ordered:
        positions = replace(positions, ordered=True)
    mask = AttentionMask(
        causal, positions.query, positions.key, positions.regular, key_padding, attn_mask
    )
    if documents is not None:
        own = documents[:, documents.shape[1] - queries :]
        mask = replace(mask, query_documents=own, key_documents=documents)
    if attn_mask is not None and spec.logn is not None:
        positions = positions.without_masked(mask)
    if spec.chunk is not None:
        mask = hide_other_chunks(mask, spec.chunk, batch)
    return AttentionPlan(positions, mask, backend, cached)


def hide_other_chunks(mask: AttentionMask, size: int, batch: int) -> AttentionMask:
    """The same mask without the keys of other chunks of `size` positions."""
    query, key = (
        positions.div(size, rounding_mode="floor")
        .reshape(-1, positions.shape[-1])
        .expand(batch, -1)
        for positions in (mask.query, mask.key)
    )
    return replace(mask, query_documents=query, key_documents=key)


def find_plan(
    score: Score | ScoreSpec | str, q: Tensor, k: Tensor, v: Tensor, causal: bool, backend: str
) -> AttentionPlan | None:
    """The plan with tables for tensors of these shapes, made at the first call; None without one.

    Whatever looks into a computation or changes it (a compiler, autocast, an observer, hooks,
    torch.func) has none.
    """
    if torch.compiler.is_compiling() or not type(q) is type(k) is type(v) is Tensor or q.is_meta:
        return None
    if torch.is_autocast_enabled(q.device.type) or _OBSERVER.get() is not None:
        return None
    if torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0:
        return None
    given: ScoreSpec | str
    if isinstance(score, Score):
        if score._forward_hooks or score._forward_pre_hooks:
            return None  # whoever hangs a hook on the score wants to see its tensors
        given = score._spec
    else:
        given = score
    name = (
        *(given if isinstance(given, str) else id(given), causal, backend),
        *(q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.layout, k.layout, v.layout),
        *(q.device, k.device, v.device),
    )
    kept = _PLANS.get(name)
    if kept is None:
        if len(_PLANS) >= _MOST:
            _PLANS.clear()
        # The specification is kept, too: another one may not get its number.
        kept = _PLANS[name] = given, _prepare_tables(score, q, k, v, causal, backend)
    tables = kept[1].tables
    if tables is None:
        return None
    own = isinstance(score, Score)
    if own and (score.heads, score.kv_heads, score.head_dim) != tables.heads:  # type: ignore[union-attr]
        return None
    return kept[1]


@torch.no_grad()
def _prepare_tables(
    score: Score | ScoreSpec | str, q: Tensor, k: Tensor, v: Tensor, causal: bool, backend: str
) -> AttentionPlan:
    """The plan for tensors like these, with tables where the score asks for no more than those.

    Raises `InputError` as `attention` does.
    """
    check_shapes(q, k, v)
    module = score if isinstance(score, Score) else without_parameters(score, q, k)
    check_score(module, q, k)
    spec, positions_only = module.spec, (q.shape[2], k.shape[2], q.shape[0], q.device)
    plan = prepare(spec, *positions_only, causal, backend)
    if backend not in ("auto", "fused") or not _folds(module):
        return plan
    inputs = module(q, k, v, plan.positions, plan.mask)
    if choose(inputs, backend).name != "fused" or not inputs.visibility.plain:
        return plan
    query = query_tables(spec, module.head_dim, plan.positions, q.dtype)
    key = key_tables(spec, module.head_dim, plan.positions.key, k.dtype, 0)
    assert isinstance(query.near, Rotation | None)
    assert isinstance(key.near, Rotation | None)
    own = None if isinstance(score, Score) else module
    heads = module.heads, module.kv_heads, module.head_dim
    turn_q, turn_k = (None if x is None else x.arguments for x in (query.near, key.near))
    return replace(plan, tables=FoldedTables(own, heads, turn_q, turn_k, query.scale))


def _folds(score: Score) -> bool:
    """Whether nothing but a norm, a rotation and λ is done to queries and keys.

    Statistics over rows take padding into account, and so do not count.
    """
    spec = score.spec
    several = spec.remapping is not None or spec.order is not None or spec.blockwise
    learned = score.position is not None or score.logn is not None
    wider = getattr(spec.position, "widens", False) or spec.forgets or spec.residual is not None
    beside = spec.gate is not None or spec.documents is not None or spec.chunk is not None
    beside = beside or spec.difference is not None or spec.leaks_future
    return not (several or learned or wider or beside)


def zero_or_nan(q: Tensor, k: Tensor) -> Float[Tensor, "b 1 1 1"]:
    """0 for each row of the batch, or NaN where a query or a key is not finite; on the device."""
    if not q.numel() or not k.numel():
        return q.new_zeros(())
    largest = [torch.linalg.vector_norm(x.detach(), torch.inf, (1, 2, 3)) for x in (q, k)]
    zero: Tensor = (largest[0] + largest[1]) * 0.0
    return zero[:, None, None, None]


def regular_positions(queries: int, keys: int, device: torch.device) -> Positions:
    """Causal positions of the last `queries` of `keys` tokens."""
    if queries > keys or torch.compiler.is_compiling():
        return Positions.of(queries, keys, True, device)
    capacity = max(64, 1 << (keys - 1).bit_length())
    return _counted(capacity, device).part(slice(keys - queries, keys), keys)


@lru_cache(maxsize=64)
def _counted(capacity: int, device: torch.device) -> Positions:
    with torch.inference_mode(False):
        return Positions.of(capacity, capacity, True, device)


def forget_plans() -> None:
    """Make positions and plans anew when they are next asked for."""
    _counted.cache_clear()
    _PLANS.clear()


def without_parameters(score: ScoreSpec | str, q: Tensor, k: Tensor) -> Score:
    """The score of a specification that learns nothing, for tensors of these shapes."""
    sizes = q.shape[1], q.shape[-1], k.shape[1]
    if not torch.compiler.is_compiling():
        return _built(as_spec(score), *sizes)
    # Modules are made outside of the graph; `disable` loads the compiler, so only where one runs.
    # What fullgraph=True cannot do, torch says with the line, the hint at its end included.
    outside: Any = torch.compiler.disable(_made)  # type: ignore[no-untyped-call] # pass a Score
    made: Score = outside(score, *sizes)
    return made


def _made(score: ScoreSpec | str, heads: int, head_dim: int, kv_heads: int) -> Score:
    return _built(as_spec(score), heads, head_dim, kv_heads)


@lru_cache(maxsize=64)
def _built(spec: ScoreSpec, heads: int, head_dim: int, kv_heads: int) -> Score:
    module = Score(spec, heads, head_dim, kv_heads)
    learned = [name for name, _ in module.named_parameters()]
    if learned or any(True for _ in module.buffers()):
        raise InputError(
            f"{spec.name} learns {', '.join(learned) or 'running statistics'}: make a "
            "Score(spec, heads=…, head_dim=…) and pass that"
        )
    return module


def in_blocks(
    spec: ScoreSpec, positions: Positions, part: Callable[[slice, int, int], Tensor]
) -> Float[Tensor, "b h t e"]:
    """All query rows at once, or, where the score works by blocks, those of each block.

    `part(rows, keys, block)` attends from some rows to the first `keys` keys as `block` reads
    them. Rows of a batch may reach a block at different times: a row keeps what is its own.
    """
    queries, keys = positions.query.shape[-1], positions.key.shape[-1]
    if not spec.blockwise or queries == 0:
        return part(slice(0, queries), keys, 0)
    if torch.compiler.is_compiling():
        raise InputError(
            f"{spec.block[0]} reads rows in blocks that depend on their positions, which a "
            "compiler does not know: run it uncompiled, or take a spectrum that does not move"
        )
    pieces: list[Tensor] = []
    out: Tensor | None = None
    for number, span, own in _blocks(positions, spec.block[1]):
        confine(span, own)
        piece = part(span, keys - queries + span.stop if positions.ordered else keys, number)
        if own is None:
            pieces.append(piece)
            continue
        whole = piece.new_zeros(*piece.shape[:2], queries, piece.shape[3])
        mine = own.reshape(-1, 1, piece.shape[2], 1)
        whole[:, :, span] = torch.where(mine, piece, 0.0)
        out = whole if out is None else out + whole
    if out is not None:
        return out
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2)


def _blocks(positions: Positions, length: int) -> Iterator[tuple[int, slice, Tensor | None]]:
    """Each block, the rows among which its own are, and which these are; None for all of them."""
    queries, keys = positions.query.shape[-1], positions.key.shape[-1]
    if positions.regular and queries <= keys:
        # Known without a look at the numbers.
        first = queries - keys
        for number in range(-first // length, (keys - 1) // length + 1):
            start = first + number * length
            yield number, slice(max(0, start), min(queries, start + length)), None
        return
    block = positions.query // length
    lowest, highest = int(block.min()), int(block.max())
    if lowest == highest:
        yield lowest, slice(0, queries), None
        return
    for number in range(lowest, highest + 1):
        mine = block == number
        rows = mine.reshape(-1, queries).any(0).nonzero()[:, 0]
        if rows.numel():
            span = slice(int(rows[0]), int(rows[-1]) + 1)
            alone = mine.dim() == 1 and positions.ordered
            yield number, span, None if alone else mine[..., span]
