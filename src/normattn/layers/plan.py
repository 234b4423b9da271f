"""A call of attention in two steps: `prepare` gives a plan, whose `run` computes with tensors.

Where all that a score does folds into queries and keys (`layers.folded`), for a whole sequence or
for one more token, a plan is kept by what it depends on: the specification, shapes and types.
`AttentionPlan` holds positions and mask of every other call: other scores, masks, dropout, a
prefill with a cache, cross attention, `explain`, and layers of extended models of transformers.

Legend: B batch, H query heads, G key heads, T queries, S keys, E value size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from normattn.layers.folded import FoldedSequence, FoldedStep, fold_sequence, fold_step
from normattn.layers.gates import (
    add_forgetting,
    finish,
    log_gates,
    pair_values,
    sum_gates,
    turn_values,
)
from normattn.plain import FAKE, plain_operations
from normattn.score import Positions, Score, ScoreSpec
from normattn.score.positions import number_documents

# All are forgotten at once when there are so many: lengths vary without end.
_MOST_PLANS = 512
_PLANS: dict[tuple[object, ...], tuple[ScoreSpec, FoldedSequence | FoldedStep | None]] = {}


def prepare(
    score: Score,
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b g s d"],
    v: Float[Tensor, "b g s e"],
    given: AttentionArguments,
    cache: KeyValueCache | None,
) -> FoldedSequence | FoldedStep | AttentionPlan:
    """What a call needs besides its tensors; `InputError` for what does not fit together.

    A kept plan is looked up before all checks: its first call passed them.
    """
    # Written out: each call of Python costs as much as a small operation.
    plain = given.attn_mask is None and given.key_padding is None and given.query_padding is None
    plain = plain and given.q_positions is None and given.k_positions is None
    plain = plain and given.documents is None and given.residual is None and given.forget is None
    plain = plain and given.dropout_p == 0 and not given.return_lse and type(score) is Score
    # Nor does it serve what looks into the computation or changes it.
    if plain and not torch.compiler.is_dynamo_compiling() and not torch._C._get_dispatch_mode(FAKE):
        intercepted = torch._C._functorch.maybe_current_level() is not None
        intercepted = intercepted or bool(_OBSERVERS.get()) or forward_ad._current_level >= 0
        intercepted = intercepted or not type(q) is type(k) is type(v) is Tensor or q.is_meta
        # A hook on the score needs its tensors.
        intercepted = intercepted or bool(score._forward_hooks or score._forward_pre_hooks)
        intercepted = intercepted or bool(score._backward_pre_hooks)
        same_kind = q.dtype is k.dtype is v.dtype and q.layout is k.layout is v.layout
        if same_kind and not intercepted and not torch.is_autocast_enabled(q.device.type):
            # A step serves any number of tokens up to the next power of two.
            capacity = 0 if cache is None else max(64, 1 << cache.length.bit_length())
            key = (
                # A specification by identity: its hash would take as long as all the rest.
                *(id(score._spec), score.heads, score.kv_heads, score.head_dim),
                *(given.causal, given.backend, capacity, q.shape, k.shape, v.shape),
                *(q.dtype, q.layout, q.device, k.device, v.device),
            )
            if (kept := _PLANS.get(key)) is None:
                check_call(score, q, k, v, given, None if cache is None else cache.length)
                if len(_PLANS) >= _MOST_PLANS:
                    _PLANS.clear()
                # The specification is kept, too: another one may not get its number.
                kept = _PLANS[key] = score._spec, _fold(score, q, k, v, given, capacity)
            # A cache keeps no gradients, which it says itself.
            folded, learning = kept[1], capacity and torch.is_grad_enabled()
            if learning and any(x.requires_grad for x in (q, k, v, *score.parameters())):
                folded = None
            if folded is not None:
                if not folded.complete or given.gate is not None:
                    check_call(score, q, k, v, given)
                return folded
    read = None if cache is None else cache.length
    check_call(score, q, k, v, given, read)
    if cache is not None:
        cache.claim(score.spec)
    return place(score.spec, q, k.shape[2] + (read or 0), given, cached=cache is not None)


@torch.no_grad()
def _fold(
    score: Score, q: Tensor, k: Tensor, v: Tensor, given: AttentionArguments, capacity: int
) -> FoldedSequence | FoldedStep | None:
    """The plan of a score that folds, for tensors like these; None without."""
    if not capacity:
        plan = place(score.spec, q, k.shape[2], given)
        return fold_sequence(score, q, k, v, plan.positions, plan.mask, given.backend)
    one = given.causal and given.backend == "auto" and q.shape[2] == 1
    return fold_step(score, q, k, v, capacity) if one else None


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """Which keys the queries of a call see, from which positions; for any score and kernel.

    `cached` says that keys come from `Score.cache_keys`, normalised and rotated.
    """

    positions: Positions
    mask: AttentionMask
    cached: bool = False

    def run(
        self,
        score: Score,
        q: Float[Tensor, "b h t d"],
        k: Float[Tensor, "b g s d"],
        v: Float[Tensor, "b g s e"],
        given: AttentionArguments,
        cache: KeyValueCache | None,
    ) -> Float[Tensor, "b outputs t out"] | tuple[Tensor, Tensor]:
        """softmax(score) · v, with ℓ if asked for; keys and values are added to a cache."""
        spec, at, first = score.spec, self.positions, 0 if cache is None else cache.length
        places, start = at.key if cache is None else at.query, first if at.regular else None
        padding = None if given.key_padding is None else given.key_padding[:, first:]
        own = given.query_padding if cache is None else padding
        announce_layer(score, q, k, own, padding, at.query, places)
        with plain_operations(given.backend == "reference"):
            v = turn_values(spec, pair_values(spec, v, k.shape[-1]), places, start)
        plan, gates, selection, rotated = self, None, None, None
        if given.forget is not None:
            gates = log_gates(given.forget, k.shape[1], k.dtype, padding)
        if cache is not None:
            k = without_infinities(score.cache_keys(k, places, start))
            width = k.shape[-1]
            # Gates are kept apart from token to token: the oldest may be dropped, and rows moved.
            k, v = cache.append(k if gates is None else torch.cat((k, gates), -1), v)
            k, gates = k[..., :width], None if gates is None else k[..., width:]
            plan = self._without_first(cache.dropped)
            selection = None if spec.selection is None else cache.selection(first, k, padding)
            rotated = _keys_of_blocks(score, cache, k, plan.positions) if spec.blockwise else None
        lse: list[Tensor] = []

        def kernel(inputs: AttentionInputs) -> Tensor:
            output = run_kernel(inputs, given.backend, lse=given.return_lse)
            if output.lse is not None:
                lse.append(output.lse)
            return output.out

        sums = None if gates is None else sum_gates(gates, q.shape[1])
        out = plan.attend(score, q, k, v, given, kernel, sums, selection, rotated)
        if cache is not None and selection is not None:
            cache.keep_selection(first, selection)
        return (out, lse[0]) if given.return_lse else out

    def attend(
        self,
        score: Score,
        q: Float[Tensor, "b h t d"],
        k: Float[Tensor, "b g s cached"],
        v: Float[Tensor, "b g s e"],
        given: AttentionArguments,
        kernel: Callable[[AttentionInputs], Tensor],
        forget_sums: Float[Tensor, "b h s"] | None = None,
        selection: Selection | None = None,
        rotated: Callable[[int, int], Tensor] | None = None,
    ) -> Float[Tensor, "b outputs t out"]:
        """softmax(score) · v for all keys, with a kernel that computes outputs of inputs.

        Values of pairs of heads stand side by side, and those of `VORoPE` are turned. `forget_sums`
        are the summed gates of `FoX`, of all keys; `selection` what queries before have selected.
        `rotated` takes (keys, block) to the first keys as the rows of a block read them, for cached
        keys of a blockwise score.

        Rows of a batch may reach a block at different times: each keeps its own block's output.
        """
        spec, at, queries = score.spec, self.positions, q.shape[2]

        def part(rows: slice, keys: int, block: int) -> Tensor:
            padding = None if given.query_padding is None else given.query_padding[:, rows]
            own = k[:, :, :keys] if rotated is None else rotated(keys, block)
            places, seen = at.select(rows, keys), self.mask.select(rows, keys)
            rest = places, seen, padding, block, given.dropout_p, self.cached
            inputs = score(q[:, :, rows], own, v[:, :, :keys], *rest)
            if selection is not None:
                inputs = replace(inputs, selection=selection)
            inputs = add_forgetting(inputs, forget_sums, rows, queries)
            if given.residual is not None:
                inputs = given.residual.join(inputs)
            return kernel(inputs)

        # The definition is made of operations that every derivative goes through.
        with plain_operations(given.backend == "reference"):
            if not spec.blockwise or not at.query.numel():
                out = part(slice(0, queries), at.key.shape[-1], 0)
            else:
                pieces: list[Tensor] = []
                mixed: Tensor | None = None
                for block, rows, keys, members in _blocks(spec, at):
                    for observer in observers():
                        observer.select_rows(rows, members)
                    piece = part(rows, keys, block)
                    if members is None:
                        pieces.append(piece)
                        continue
                    whole = piece.new_zeros(*piece.shape[:2], queries, piece.shape[3])
                    chosen = members.reshape(-1, 1, piece.shape[2], 1)
                    whole[:, :, rows] = torch.where(chosen, piece, 0.0)
                    mixed = whole if mixed is None else mixed + whole
                out = torch.cat(pieces, 2) if mixed is None else mixed
            return finish(score, out, v, at, given.gate)

    def _without_first(self, keys: int) -> AttentionPlan:
        """The plan for keys of which the first are forgotten; distances stay what they are."""
        if not keys:
            return self
        at, seen = self.positions, self.mask
        mask, documents = seen.attn_mask, seen.key_documents
        seen = replace(
            seen,
            key=seen.key[..., keys:],
            padding=None if seen.padding is None else seen.padding[:, keys:],
            attn_mask=mask if mask is None or mask.shape[-1] == 1 else mask[..., keys:],
            key_documents=None if documents is None else documents[:, keys:],
        )
        at = replace(at, key=at.key[..., keys:], regular=False)
        return replace(self, positions=at, mask=seen)


def place(
    spec: ScoreSpec,
    q: Float[Tensor, "b h t d"],
    keys: int,
    given: AttentionArguments,
    cached: bool = False,
) -> AttentionPlan:
    """Build positions and mask of a call whose arguments are checked.

    Of q only the shape and the device count. Keys that are `cached` are those of a cache, whose
    positions grow and whose last are the queries', or, with `q_positions`, of another sequence.
    Raises `InputError` for positions that a score cannot have.
    """
    batch, _, queries, _ = q.shape
    padding, documents, key_positions = given.key_padding, given.documents, given.k_positions
    query_positions = given.q_positions
    of_cache = cached and query_positions is None
    if (given.causal or of_cache) and key_positions is not None and documents is None:
        check_restarts(key_positions, padding)
    if of_cache and key_positions is not None:
        query_positions = key_positions[..., keys - queries :]
    if documents is not None:
        documents = number_documents(documents, padding)
    places = (padding, query_positions, key_positions, documents)
    at = Positions.of(queries, keys, given.causal, q.device, *places)
    if of_cache and not at.ordered:
        at = replace(at, ordered=True)
    elif not cached and (query_positions is not None or key_positions is not None):
        # Those of a cache count padding apart, and so may go back where it ends.
        check_order(spec, at, documents)
    mask = AttentionMask(given.causal, at.query, at.key, at.regular, padding, given.attn_mask)
    if documents is not None:
        of_queries = documents[:, keys - queries :]
        mask = replace(mask, query_documents=of_queries, key_documents=documents)
    if given.attn_mask is not None and spec.logn is not None:
        at = at.exclude_masked(mask)
    if spec.chunk is not None:
        # Other chunks are hidden as other documents are.
        query, key = (
            places.div(spec.chunk, rounding_mode="floor").reshape(-1, places.shape[-1])
            for places in (mask.query, mask.key)
        )
        query, key = query.expand(batch, -1), key.expand(batch, -1)
        mask = replace(mask, query_documents=query, key_documents=key)
    return AttentionPlan(at, mask, cached)


def _blocks(spec: ScoreSpec, at: Positions) -> Iterator[tuple[int, slice, int, Tensor | None]]:
    """Each block, the rows among which its own are, the keys that they see, and which rows are its.

    The last is None where all are. Positions that are counted are known without a look at them.
    """
    if torch.compiler.is_compiling():
        raise InputError(
            f"{spec.block[0]} computes blocks of rows that depend on positions, which a compiler "
            "does not know: run it uncompiled, or use a rope scaling with fixed frequencies"
        )
    length, queries, keys = spec.block[1], at.query.shape[-1], at.key.shape[-1]
    first, last = keys - queries, keys - 1
    if not at.regular:
        first, last = int(at.query.min()), int(at.query.max())
    lowest, highest = first // length, last // length
    for block in range(lowest, highest + 1):
        members, rows = None, slice(0, queries)
        if at.regular:
            start = block * length - first
            rows = slice(max(0, start), min(queries, start + length))
        elif lowest != highest:
            members = at.query // length == block
            own = members.reshape(-1, queries).any(0).nonzero()[:, 0]
            if not own.numel():
                continue
            rows = slice(int(own[0]), int(own[-1]) + 1)
            every = members.dim() == 1 and at.ordered
            members = None if every else members[..., rows]
        yield block, rows, keys - queries + rows.stop if at.ordered else keys, members


def _keys_of_blocks(
    score: Score, cache: KeyValueCache, keys: Tensor, at: Positions
) -> Callable[[int, int], Tensor]:
    """Cached keys as the rows of each block read them.

    Those of the blocks that the last rows are in stay with the cache: the next tokens want them.
    """
    live = set((at.query[..., -1] // score.spec.block[1]).reshape(-1).tolist())
    cache.forget_rotated(live)

    def rotated(upto: int, block: int) -> Float[Tensor, "b g s wide"]:
        def rotate(first: int, last: int) -> Tensor:
            places, count = at.key[..., first:last], first if at.regular else None
            return score.rotate_cached_keys(keys[:, :, first:last], places, block, count)

        return cache.rotated(block, 0, upto, rotate) if block in live else rotate(0, upto)

    return rotated
