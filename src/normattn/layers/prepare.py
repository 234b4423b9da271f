"""What is decided about a call of attention before a number is read: an `AttentionPlan`.

The same plan serves training, a prefill, tokens beside a cache, cross attention and `explain`;
`layers.attention` runs it. Where everything that a score does folds into queries and keys and
torch's own kernel serves, there are `FoldedTables`, kept by score and shapes.

Legend: B batch, T queries, S keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd import forward_ad

from normattn.errors import InputError
from normattn.kernels import AttentionInputs, AttentionMask, attend, choose
from normattn.kernels.inputs import check_shapes
from normattn.kernels.sdpa import sdpa
from normattn.kernels.stats import _OBSERVER, confine
from normattn.layers.checks import (
    BOOLEAN,
    check_mask,
    check_order,
    check_positions,
    check_restarts,
    check_score,
    check_tensor,
)
from normattn.score import Positions, Score, ScoreSpec
from normattn.score.positions import number_documents
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

# Tables are forgotten, all at once, when there are so many: lengths may vary without end.
_MOST = 512
_TABLES: dict[tuple[object, ...], tuple[object, FoldedTables | None]] = {}


@dataclass(frozen=True, eq=False)
class FoldedTables:
    """What turns queries and keys of some shapes into operands of `scaled_dot_product_attention`.

    `query` are the arguments that rotate queries and multiply them by λ, `key` those that rotate
    keys; None where nothing rotates. `scale` is then λ, a number for all rows or one for each.
    `score` is one that learns nothing, built for a specification; None where callers have their
    own. `mask` and `backend` are for numbers that torch's kernel does not serve.
    """

    score: Score | None
    query: RotationArguments | None
    key: RotationArguments | None
    scale: Tensor | float | None
    mask: AttentionMask
    backend: str


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """Which keys the queries of a call see, from which positions, and the kernel.

    `cached` says that keys come from `Score.cache_keys`, normalised and rotated.
    """

    positions: Positions
    mask: AttentionMask
    backend: str = "auto"
    cached: bool = False

    def without_first(self, keys: int) -> AttentionPlan:
        """The plan for keys of which the first are forgotten; distances stay what they are."""
        if not keys:
            return self
        at, seen = self.positions, self.mask
        mask, documents = seen.mask, seen.key_documents
        seen = replace(
            seen,
            key=seen.key[..., keys:],
            padding=None if seen.padding is None else seen.padding[:, keys:],
            mask=mask if mask is None or mask.shape[-1] == 1 else mask[..., keys:],
            key_documents=None if documents is None else documents[:, keys:],
        )
        at = replace(at, key=at.key[..., keys:], regular=False)
        return replace(self, positions=at, mask=seen)


def prepare(
    spec: ScoreSpec,
    q: Float[Tensor, "b h t d"],
    keys: int,
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
    """Check what says who sees whom, and build positions and mask of a call of `attention`.

    Of q only the shape and the device count. The queries beside a cache are the last of its keys,
    whose positions grow. Raises `InputError` for shapes and types that do not fit, and for
    positions that a score cannot have.
    """
    batch, heads, queries, _ = q.shape
    check_mask(attn_mask, (batch, heads, queries, keys))
    check_tensor("key_padding", key_padding, BOOLEAN, (batch, keys))
    check_positions("q_positions", q_positions, batch, queries)
    check_positions("k_positions", k_positions, batch, keys)
    if (causal or cached) and k_positions is not None and documents is None:
        check_restarts("k_positions", k_positions, key_padding)
    if cached and k_positions is not None:
        q_positions = k_positions[..., keys - queries :]
    if documents is not None:
        documents = number_documents(documents, key_padding)
    given = (key_padding, q_positions, k_positions, documents)
    if causal and all(argument is None for argument in given):
        positions = regular_positions(queries, keys, q.device)
    else:
        positions = Positions.of(queries, keys, causal, q.device, *given)
    if not cached and (q_positions is not None or k_positions is not None):
        # Those of a cache count padding apart, and so may go back where it ends.
        check_order(spec, positions, documents)
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
        places.div(size, rounding_mode="floor").reshape(-1, places.shape[-1]).expand(batch, -1)
        for places in (mask.query, mask.key)
    )
    return replace(mask, query_documents=query, key_documents=key)


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


def find_tables(
    score: Score | ScoreSpec | str, q: Tensor, k: Tensor, v: Tensor, causal: bool, backend: str
) -> FoldedTables | None:
    """The tables for tensors of these shapes, made at the first call; None without.

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
    sizes: tuple[int, int, int] | None = None
    if isinstance(score, Score):
        if score._forward_hooks or score._forward_pre_hooks:
            return None  # whoever hangs a hook on the score wants to see its tensors
        given, sizes = score._spec, (score.heads, score.kv_heads, score.head_dim)
    else:
        given = score
    name = (
        # A specification by identity: its hash would take as long as all the rest.
        *(given if isinstance(given, str) else id(given), sizes, causal, backend),
        *(q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.layout, k.layout, v.layout),
        *(q.device, k.device, v.device),
    )
    kept = _TABLES.get(name)
    if kept is None:
        if len(_TABLES) >= _MOST:
            _TABLES.clear()
        # The specification is kept, too: another one may not get its number.
        kept = _TABLES[name] = given, _make_tables(score, q, k, v, causal, backend)
    return kept[1]


@torch.no_grad()
def _make_tables(
    score: Score | ScoreSpec | str, q: Tensor, k: Tensor, v: Tensor, causal: bool, backend: str
) -> FoldedTables | None:
    """The tables for tensors like these; None where the score asks for more than those.

    Raises `InputError` as `attention` does.
    """
    check_shapes(q, k, v)
    module = score if isinstance(score, Score) else without_parameters(score, q, k)
    check_score(module, q, k)
    spec = module.spec
    beside = spec.remapping or spec.gate or spec.documents or spec.difference
    if backend not in ("auto", "fused") or beside is not None or not folds(module):
        return None
    plan = prepare(spec, q, k.shape[2], causal, backend)
    inputs = module(q, k, v, plan.positions, plan.mask)
    if choose(inputs, backend).name != "fused" or not inputs.visibility.plain:
        return None
    query = query_tables(spec, module.head_dim, plan.positions, q.dtype)
    key = key_tables(spec, module.head_dim, plan.positions.key, k.dtype, 0)
    assert isinstance(query.near, Rotation | None)
    assert isinstance(key.near, Rotation | None)
    own = None if isinstance(score, Score) else module
    turn_q, turn_k = (None if turn is None else turn.arguments for turn in (query.near, key.near))
    return FoldedTables(own, turn_q, turn_k, query.scale, plan.mask, backend)


def run_folded(
    tables: FoldedTables,
    score: Score | None,
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b g s d"],
    v: Float[Tensor, "b g s e"],
) -> Float[Tensor, "b h t e"]:
    """softmax(score) · v by norm, rotation and torch's kernel.

    What is not finite shows. On a CPU a number is read, and other kernels take over. On another
    device the rows of the batch that hold it become NaN, without waiting for the device.
    """
    assert score is not None
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
        q, k = rotate(q, *tables.query), rotate(k, *tables.key)
    elif isinstance(tables.scale, Tensor):
        q = scaled(q, tables.scale)
    elif tables.scale is not None:
        q = q * tables.scale  # as for a number for each row: equal numbers give equal bits
    causal = tables.mask.causal
    if not q.is_cpu:
        return sdpa(q, k, v, causal, 1.0) + zero_or_nan(q, k).to(v.dtype)
    # In float32: a sum of half-precision numbers is beyond their range soon.
    total = q.detach().sum(dtype=torch.float32) + k.detach().sum(dtype=torch.float32)
    if math.isfinite(total.item()):
        return sdpa(q, k, v, causal, 1.0)
    return attend(AttentionInputs(q, k, v, tables.mask), tables.backend)


def zero_or_nan(q: Tensor, k: Tensor) -> Float[Tensor, "b 1 1 1"]:
    """0 for each row of the batch, or NaN where a query or a key is not finite; on the device."""
    if not q.numel() or not k.numel():
        return q.new_zeros(())
    largest = [torch.linalg.vector_norm(x.detach(), torch.inf, (1, 2, 3)) for x in (q, k)]
    zero: Tensor = (largest[0] + largest[1]) * 0.0
    return zero[:, None, None, None]


def folds(score: Score) -> bool:
    """Whether nothing but a norm, a rotation and λ is done to queries and keys.

    Statistics over rows take padding into account, and so do not count.
    """
    spec = score.spec
    learned = score.position is not None or score.logn is not None
    wider = getattr(spec.position, "widens", False) or spec.forgets or spec.residual is not None
    moved = spec.order is not None or spec.blockwise or spec.chunk is not None
    return not (learned or wider or moved or spec.leaks_future)


def without_parameters(score: ScoreSpec | str, q: Tensor, k: Tensor) -> Score:
    """The score of a specification that learns nothing, for tensors of these shapes."""
    build: Callable[..., Score] = _build
    if torch.compiler.is_compiling():
        # Modules are made outside of the graph; `disable` loads the compiler, so only where one
        # runs. What fullgraph=True cannot do, torch says with the line, its hint included.
        build = torch.compiler.disable(_build)  # type: ignore[no-untyped-call] # pass a Score
    return build(score, q.shape[1], q.shape[-1], k.shape[1])


def _build(score: ScoreSpec | str, heads: int, head_dim: int, kv_heads: int) -> Score:
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
    mixed: list[Tensor] = []
    for number, span, own in _blocks(positions, spec.block[1]):
        confine(span, own)
        piece = part(span, keys - queries + span.stop if positions.ordered else keys, number)
        if own is None:
            pieces.append(piece)
            continue
        whole = piece.new_zeros(*piece.shape[:2], queries, piece.shape[3])
        whole[:, :, span] = torch.where(own.reshape(-1, 1, piece.shape[2], 1), piece, 0.0)
        mixed = [mixed[0] + whole] if mixed else [whole]
    pieces = mixed or pieces
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
        own = block == number
        rows = own.reshape(-1, queries).any(0).nonzero()[:, 0]
        if rows.numel():
            span = slice(int(rows[0]), int(rows[-1]) + 1)
            alone = own.dim() == 1 and positions.ordered
            yield number, span, None if alone else own[..., span]
