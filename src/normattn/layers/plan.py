"""How a call of `attention` runs: `prepare` returns its plan, and the plan's `run` computes.

- A `FoldedPlan` (`layers.folded`) runs norms, a rotation and λ, then torch's kernel. It depends on
  the specification, shapes and types only, and is cached by them (`_folded_plan`). It serves calls
  without masks and most other options (`_is_cacheable`).
- An `AttentionPlan` holds the positions and the mask of one call. It serves all other calls: other
  scores, masks, dropout, a prefill with a cache, cross-attention, extended layers and `explain`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import forward_ad

from normattn.errors import InputError
from normattn.kernels import AttentionInputs, AttentionMask, run_kernel
from normattn.kernels.inputs import Selection
from normattn.kernels.numerics import without_infinities
from normattn.kernels.stats import _OBSERVERS, announce_layer, observers
from normattn.layers.cache import KeyValueCache
from normattn.layers.checks import AttentionArguments, check_call, check_order, check_restarts
from normattn.layers.folded import FoldedPlan, fold_sequence, fold_step
from normattn.layers.gates import (
    add_forgetting,
    finish_output,
    log_gates,
    pair_values,
    rotate_values,
    sum_gates,
)
from normattn.plain import FAKE, plain_operations
from normattn.score import Positions, Score, ScoreSpec
from normattn.score.positions import number_documents

# The cache is emptied at this size, since text lengths vary without bound.
_MAX_PLANS = 512
_PLANS: dict[tuple[object, ...], tuple[ScoreSpec, FoldedPlan | None]] = {}


def prepare(
    score: Score,
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b g s d"],
    v: Float[Tensor, "b g s e"],
    args: AttentionArguments,
    cache: KeyValueCache | None,
) -> FoldedPlan | AttentionPlan:
    """Return the plan of a call: the folded one where it applies, else a general one.

    Raises `InputError` for arguments that do not fit together. A cached plan skips these checks:
    the first call with its shapes passed them.
    """
    if cache is not None and not isinstance(cache, KeyValueCache):
        raise InputError(f"cache must be a KeyValueCache, but it is a {type(cache).__name__}")
    num_cached = None if cache is None else cache.length
    if _is_cacheable(score, q, k, v, args):
        folded = _folded_plan(score, q, k, v, args, num_cached)
        if folded is not None:
            return folded
    check_call(score, q, k, v, args, num_cached)
    if cache is not None:
        cache.claim(score.spec)
    return build_plan(score.spec, q, k.shape[2] + (num_cached or 0), args, cache is not None)


def _is_cacheable(score: Score, q: Tensor, k: Tensor, v: Tensor, args: AttentionArguments) -> bool:
    """Whether the cache key of `_folded_plan` covers all that the plan depends on."""
    # Inline conditions: a Python call costs as much as a small tensor operation.
    no_mask = args.attn_mask is None and args.key_padding is None and args.query_padding is None
    no_positions = args.q_positions is None and args.k_positions is None and args.documents is None
    no_options = args.dropout_p == 0 and not args.return_lse
    no_options = no_options and args.residual is None and args.forget is None
    if not (no_mask and no_positions and no_options):
        return False
    if torch.compiler.is_dynamo_compiling() or torch._C._get_dispatch_mode(FAKE):
        return False
    if torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0:
        return False
    # An observer or a hook needs the score's tensors; a subclass may compute something else.
    hooked = score._forward_hooks or score._forward_pre_hooks or score._backward_pre_hooks
    if _OBSERVERS.get() or hooked or type(score) is not Score:
        return False
    if not type(q) is type(k) is type(v) is Tensor or q.is_meta:
        return False
    same_type = q.dtype is k.dtype is v.dtype and q.layout is k.layout is v.layout
    return same_type and not torch.is_autocast_enabled(q.device.type)


def _folded_plan(
    score: Score, q: Tensor, k: Tensor, v: Tensor, args: AttentionArguments, num_cached: int | None
) -> FoldedPlan | None:
    """Look up or make the folded plan of a cacheable call; None if there is none."""
    # A decoding step's plan serves any number of cached tokens up to the next power of two.
    capacity = 0 if num_cached is None else max(64, 1 << num_cached.bit_length())
    key = (
        # The identity of the specification: hashing it would take as long as everything else.
        *(id(score._spec), score.heads, score.kv_heads, score.head_dim),
        *(args.causal, args.backend, capacity, q.shape, k.shape, v.shape),
        *(q.dtype, q.layout, q.device, k.device, v.device),
    )
    entry = _PLANS.get(key)
    if entry is None:
        check_call(score, q, k, v, args, num_cached)
        if len(_PLANS) >= _MAX_PLANS:
            _PLANS.clear()
        made: FoldedPlan | None = None
        with torch.no_grad():
            if num_cached is None:
                general = build_plan(score.spec, q, k.shape[2], args)
                made = fold_sequence(score, q, k, v, general.positions, general.mask, args.backend)
            elif args.causal and args.backend == "auto" and q.shape[2] == 1:
                made = fold_step(score, q, k, v, capacity)
        # The entry keeps the specification alive, so that no other one gets its id.
        entry = _PLANS[key] = score._spec, made
    plan = entry[1]
    if plan is None:
        return None
    # A cache refuses gradients; the general path raises its error.
    learns = num_cached is not None and torch.is_grad_enabled()
    if learns and any(x.requires_grad for x in (q, k, v, *score.parameters())):
        return None
    if plan.post_processes or args.gate is not None:
        check_call(score, q, k, v, args, None)
    return plan


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """Positions and mask of a call, for any score; `cached` keys come from `Score.cache_keys`."""

    positions: Positions
    mask: AttentionMask
    cached: bool = False

    def run(
        self,
        score: Score,
        q: Float[Tensor, "b h t d"],
        k: Float[Tensor, "b g s d"],
        v: Float[Tensor, "b g s e"],
        args: AttentionArguments,
        cache: KeyValueCache | None,
    ) -> Float[Tensor, "b outputs t out"] | tuple[Tensor, Tensor]:
        """Return softmax(score) · v, and ℓ with `return_lse`; append keys and values to a cache."""
        spec, positions = score.spec, self.positions
        num_cached = 0 if cache is None else cache.length
        # Positions and padding of this call's keys, which with a cache belong to its queries.
        key_positions = positions.key if cache is None else positions.query
        start = num_cached if positions.regular else None
        key_padding = None if args.key_padding is None else args.key_padding[:, num_cached:]
        query_padding = args.query_padding if cache is None else key_padding
        padding = query_padding, key_padding
        announce_layer(score, q, k, padding, (positions.query, key_positions))
        with plain_operations(args.backend == "reference"):
            v = rotate_values(spec, pair_values(spec, v, k.shape[-1]), key_positions, start)
        gates = None
        if args.forget is not None:
            gates = log_gates(args.forget, k.shape[1], k.dtype, key_padding)
        plan, selection, rotated_keys = self, None, None
        if cache is not None:
            k = without_infinities(score.cache_keys(k, key_positions, start))
            size = k.shape[-1]
            # Gates are cached as features of their keys, so that both are dropped and reordered.
            k, v = cache.append(k if gates is None else torch.cat((k, gates), -1), v)
            k, gates = k[..., :size], None if gates is None else k[..., size:]
            if cache.dropped:
                stored = replace(positions, key=positions.key[..., cache.dropped :], regular=False)
                plan = replace(self, positions=stored, mask=self.mask.drop_first(cache.dropped))
            if spec.selection is not None:
                selection = cache.selection(num_cached, k, key_padding)
            if spec.blockwise:
                rotated_keys = _rotated_keys(score, cache, k, plan.positions)
        lse: list[Tensor] = []

        def kernel(inputs: AttentionInputs) -> Tensor:
            output, output_lse = run_kernel(inputs, args.backend, args.return_lse)
            if output_lse is not None:
                lse.append(output_lse)
            return output

        forget_sums = None if gates is None else sum_gates(gates, q.shape[1])
        out = plan.attend(score, q, k, v, args, kernel, forget_sums, selection, rotated_keys)
        if cache is not None and selection is not None:
            cache.keep_selection(num_cached, selection)
        return (out, lse[0]) if args.return_lse else out

    def attend(
        self,
        score: Score,
        q: Float[Tensor, "b h t d"],
        k: Float[Tensor, "b g s cached"],
        v: Float[Tensor, "b g s e"],
        args: AttentionArguments,
        kernel: Callable[[AttentionInputs], Tensor],
        forget_sums: Float[Tensor, "b h s"] | None = None,
        selection: Selection | None = None,
        rotated_keys: Callable[[int, int], Tensor] | None = None,
    ) -> Float[Tensor, "b outputs t out"]:
        """Return softmax(score) · v over all keys; `kernel` computes the output of its inputs.

        Values are already paired (`pair_values`) and rotated (`rotate_values`). `forget_sums` are
        the summed gates of `FoX`, `selection` what earlier queries have selected. For a blockwise
        score, `rotated_keys(num_keys, block)` returns the first keys as that block reads them.
        """
        spec, positions, num_queries = score.spec, self.positions, q.shape[2]

        def attend_rows(rows: slice, num_keys: int, block: int) -> Tensor:
            keys = k[:, :, :num_keys] if rotated_keys is None else rotated_keys(num_keys, block)
            inputs = score(
                *(q[:, :, rows], keys, v[:, :, :num_keys]),
                *(positions.select(rows, num_keys), self.mask.select(rows, num_keys)),
                query_padding=None if args.query_padding is None else args.query_padding[:, rows],
                block=block,
                dropout=args.dropout_p,
                cached=self.cached,
            )
            if selection is not None:
                inputs = replace(inputs, selection=selection)
            if forget_sums is not None:
                inputs = add_forgetting(inputs, forget_sums, rows, num_queries)
            if args.residual is not None:
                inputs = args.residual.join(inputs)
            return kernel(inputs)

        with plain_operations(args.backend == "reference"):
            if spec.blockwise and positions.query.numel():
                out = _attend_blocks(spec, positions, attend_rows)
            else:
                out = attend_rows(slice(0, num_queries), positions.key.shape[-1], 0)
            return finish_output(score, out, v, positions, args.gate)


def build_plan(
    spec: ScoreSpec, q: Tensor, num_keys: int, args: AttentionArguments, cached: bool = False
) -> AttentionPlan:
    """Build the positions and the mask of a call whose arguments are checked.

    Only the shape and device of q matter. `cached` keys come from a cache that ends with the
    queries, or with `q_positions` from another sequence. Raises `InputError` for unsupported
    positions.
    """
    batch, _, num_queries, _ = q.shape
    query_positions, key_positions = args.q_positions, args.k_positions
    padding, documents = args.key_padding, args.documents
    own_cache = cached and query_positions is None
    if (args.causal or own_cache) and key_positions is not None and documents is None:
        check_restarts(key_positions, padding)
    if own_cache and key_positions is not None:
        query_positions = key_positions[..., num_keys - num_queries :]
    if documents is not None:
        documents = number_documents(documents, padding)
    optional = padding, query_positions, key_positions, documents
    positions = Positions.of(num_queries, num_keys, args.causal, q.device, *optional)
    if own_cache and not positions.ordered:
        positions = replace(positions, ordered=True)
    elif not cached and (query_positions is not None or key_positions is not None):
        # Not with a cache: left padding has its own positions, so positions may decrease after it.
        check_order(spec, positions, documents)
    index = positions.query, positions.key, positions.regular
    mask = AttentionMask(args.causal, *index, padding, args.attn_mask)
    if documents is not None:
        of_queries = documents[:, num_keys - num_queries :]
        mask = replace(mask, query_documents=of_queries, key_documents=documents)
    if args.attn_mask is not None and spec.logn is not None:
        positions = positions.exclude_masked(mask)
    if spec.chunk is not None:
        # Keys of other chunks are hidden in the same way as keys of other documents.
        query_chunks, key_chunks = (
            (x if x.dim() == 2 else x[None]).expand(batch, -1) // spec.chunk
            for x in (mask.query, mask.key)
        )
        mask = replace(mask, query_documents=query_chunks, key_documents=key_chunks)
    return AttentionPlan(positions, mask, cached)


def _attend_blocks(
    spec: ScoreSpec, positions: Positions, attend_rows: Callable[[slice, int, int], Tensor]
) -> Float[Tensor, "b h t e"]:
    """Attend with the rows of each block in turn: `attend_rows(rows, num_keys, block)`.

    At the same query, batch rows may be in different blocks: each keeps its block's output.
    """
    if torch.compiler.is_compiling():
        raise InputError(
            f"{spec.block[0]} computes blocks of rows that depend on positions, which a compiler "
            "does not know: run it uncompiled, or use a rope scaling with fixed frequencies"
        )
    length = spec.block[1]
    num_queries, num_keys = positions.query.shape[-1], positions.key.shape[-1]
    first = num_keys - num_queries
    if positions.regular:
        blocks = list(range(first // length, (num_keys - 1) // length + 1))
    else:
        blocks = sorted(set((positions.query // length).reshape(-1).tolist()))
    if blocks[0] < 0:
        raise InputError(f"{spec.block[0]} counts blocks from position 0, but a query is before it")
    outputs: list[Tensor] = []
    mixed: Tensor | None = None
    for block in blocks:
        rows, in_block = slice(0, num_queries), None
        if positions.regular:
            start = block * length - first
            rows = slice(max(0, start), min(num_queries, start + length))
        elif len(blocks) > 1:
            in_block = positions.query // length == block
            indices = in_block.reshape(-1, num_queries).any(0).nonzero()[:, 0]
            rows = slice(int(indices[0]), int(indices[-1]) + 1)
            contiguous = in_block.dim() == 1 and positions.ordered
            in_block = None if contiguous else in_block[..., rows]
        for observer in observers():
            observer.select_rows(rows, in_block)
        num_visible = num_keys - num_queries + rows.stop if positions.ordered else num_keys
        out = attend_rows(rows, num_visible, block)
        if in_block is None:
            outputs.append(out)
            continue
        padded = out.new_zeros(*out.shape[:2], num_queries, out.shape[3])
        padded[:, :, rows] = torch.where(in_block.reshape(-1, 1, out.shape[2], 1), out, 0.0)
        mixed = padded if mixed is None else mixed + padded
    return torch.cat(outputs, 2) if mixed is None else mixed


def _rotated_keys(
    score: Score, cache: KeyValueCache, keys: Tensor, positions: Positions
) -> Callable[[int, int], Tensor]:
    """A function of (num_keys, block) that rotates cached keys as the rows of a block read them.

    The cache keeps the rotated keys of the last rows' blocks, which the next tokens read again.
    """
    kept_blocks = set((positions.query[..., -1] // score.spec.block[1]).reshape(-1).tolist())
    cache.forget_rotated(kept_blocks)

    def rotated(num_keys: int, block: int) -> Float[Tensor, "b g s rotated"]:
        def rotate(first: int, last: int) -> Tensor:
            start = first if positions.regular else None
            key_positions = positions.key[..., first:last]
            return score.rotate_cached_keys(keys[:, :, first:last], key_positions, block, start)

        if block in kept_blocks:
            return cache.rotated(block, 0, num_keys, rotate)
        return rotate(0, num_keys)

    return rotated
