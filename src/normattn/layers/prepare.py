"""A call of attention in two steps: `prepare` builds an `AttentionPlan`, whose `run` computes.

A plan holds positions, mask and kernel of any call: training, a prefill, tokens beside a cache,
cross attention, `explain`. Where everything that a score does folds into queries and keys,
`layers.folded` keeps more than that from call to call.

Legend: B batch, H query heads, G key heads, T queries, S keys, E value size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.errors import InputError
from normattn.kernels import AttentionInputs, AttentionMask
from normattn.kernels.inputs import Selection
from normattn.kernels.stats import confine
from normattn.layers.checks import AttentionArguments, check_order, check_restarts
from normattn.layers.gates import add_forgetting, finish
from normattn.plain import keepable, plain_operations
from normattn.score import Positions, Score, ScoreSpec
from normattn.score.positions import number_documents


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """Which keys the queries of a call see, from which positions, and what else was given.

    `cached` says that keys come from `Score.cache_keys`, normalised and rotated.
    """

    positions: Positions
    mask: AttentionMask
    given: AttentionArguments
    cached: bool = False

    def run(
        self,
        score: Score,
        q: Float[Tensor, "b h t d"],
        k: Float[Tensor, "b g s cached"],
        v: Float[Tensor, "b g s e"],
        kernel: Callable[[AttentionInputs], Tensor],
        forget_sums: Float[Tensor, "b h s"] | None = None,
        selection: Selection | None = None,
        rotated: Callable[[int, int], Tensor] | None = None,
    ) -> Float[Tensor, "b outputs t out"]:
        """softmax(score) · v for any score.

        Values of pairs of heads stand side by side, and those of `VORoPE` are turned. `kernel`
        computes outputs of inputs. `forget_sums` are the summed gates of `FoX`, of all keys;
        `selection` what queries before have selected, and `rotated` takes (keys, block) to the
        first keys as the rows of a block read them, both beside a cache.
        """
        given = self.given

        def part(rows: slice, keys: int, block: int) -> Tensor:
            padding = None if given.query_padding is None else given.query_padding[:, rows]
            tensors = q[:, :, rows], k[:, :, :keys], v[:, :, :keys]
            at, seen = self.positions.part(rows, keys), self.mask.part(rows, keys)
            if self.cached:
                turned = None if rotated is None else rotated(keys, block)
                inputs = score.with_cached_keys(
                    *(*tensors, at, seen, padding, block, given.dropout_p, turned)
                )
            else:
                inputs = score(*tensors, at, seen, padding, block, given.dropout_p)
            if selection is not None:
                inputs = replace(inputs, selection=selection)
            inputs = add_forgetting(inputs, forget_sums, rows, q.shape[2])
            if given.residual is not None:
                inputs = given.residual.join(inputs)
            return kernel(inputs)

        # The definition is made of operations that every derivative goes through.
        with plain_operations(given.backend == "reference"):
            out = in_blocks(score.spec, self.positions, part)
            return finish(score, out, v, self.positions, given.gate)

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
    if given.causal and all(x is None for x in places):
        at = regular_positions(queries, keys, q.device)
    else:
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
        at = at.without_masked(mask)
    if spec.chunk is not None:
        mask = _hide_other_chunks(mask, spec.chunk, batch)
    return AttentionPlan(at, mask, given, cached)


def _hide_other_chunks(mask: AttentionMask, size: int, batch: int) -> AttentionMask:
    """The same mask without the keys of other chunks of `size` positions."""
    query, key = (
        places.div(size, rounding_mode="floor").reshape(-1, places.shape[-1]).expand(batch, -1)
        for places in (mask.query, mask.key)
    )
    return replace(mask, query_documents=query, key_documents=key)


def regular_positions(queries: int, keys: int, device: torch.device) -> Positions:
    """Causal positions of the last `queries` of `keys` tokens."""
    if queries > keys or not keepable():
        return Positions.of(queries, keys, True, device)
    capacity = max(64, 1 << (keys - 1).bit_length())
    return _counted(capacity, device).part(slice(keys - queries, keys), keys)


@lru_cache(maxsize=64)
def _counted(capacity: int, device: torch.device) -> Positions:
    with torch.inference_mode(False):
        return Positions.of(capacity, capacity, True, device)


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
            f"{spec.block[0]} computes blocks of rows that depend on positions, which a compiler "
            "does not know: run it uncompiled, or use a rope scaling with fixed frequencies"
        )
    pieces: list[Tensor] = []
    mixed: Tensor | None = None
    for number, span, members in _blocks(positions, spec.block[1]):
        confine(span, members)
        piece = part(span, keys - queries + span.stop if positions.ordered else keys, number)
        if members is None:
            pieces.append(piece)
            continue
        whole = piece.new_zeros(*piece.shape[:2], queries, piece.shape[3])
        whole[:, :, span] = torch.where(members.reshape(-1, 1, piece.shape[2], 1), piece, 0.0)
        mixed = whole if mixed is None else mixed + whole
    if mixed is not None:
        return mixed
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
    if not block.numel():
        yield 0, slice(0, queries), None
        return
    lowest, highest = int(block.min()), int(block.max())
    if lowest == highest:
        yield lowest, slice(0, queries), None
        return
    for number in range(lowest, highest + 1):
        members = block == number
        rows = members.reshape(-1, queries).any(0).nonzero()[:, 0]
        if rows.numel():
            span = slice(int(rows[0]), int(rows[-1]) + 1)
            every = members.dim() == 1 and positions.ordered
            yield number, span, None if every else members[..., span]
