"""A document read by several processes: each holds a slice of its tokens, and keys are gathered.

Process r of P has tokens ⌊r·T/P⌋ … ⌊(r + 1)·T/P⌋ − 1 of every row, from the embedding to the loss.
In each layer the keys and values of all slices are gathered, and the slice's queries attend to
those up to their own: it is read as new tokens are behind a cache, so that positions, windows,
log-n and every method are those of the whole row. Each process keeps a P-th of what a forward pass
holds; whole are only the keys and values of one layer at a time. A score that is carried from layer
to layer would need the keys of all layers together, one with `Selective` what the rows before have
selected: both are refused.

Legend: B batch, T tokens that predict the next, G key heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from normattn.errors import InputError
from normattn.kernels.cross_entropy import TokenScores, token_scores
from normattn.lab.evaluation.scorers import Precision, Scoring, TokenScorer, autocast
from normattn.layers.cache import KeyValueCache
from normattn.models.cache import ModelCache
from normattn.models.causal_lm import CausalLM
from normattn.models.dropout import without_dropout
from normattn.score import ScoreSpec

# Fewer tokens of a row on a process are no slice, but a single new token.
_LEAST = 2


def in_shards(model: CausalLM, precision: Precision = "fp32") -> TokenScorer:
    """A scorer that all processes of the group call together, with the same ids.

    Each has a copy of the model, with the same method switched on, and gets the scores of all
    tokens. Raises `InputError` for a score that cannot be divided, and for rows of fewer than two
    tokens for each process.
    """

    def score(ids: Int[Tensor, "b t1"]) -> TokenScores:
        refuse_undivided(model.spec)
        device = next(model.parameters()).device
        with without_dropout(model), torch.no_grad(), autocast(device, precision):
            return _scores(model, ids.to(device))

    return score


def refuse_undivided(spec: ScoreSpec) -> None:
    """Raise `InputError` for a score that needs more than the keys and values of one layer."""
    why = None
    if spec.carry is not None:
        why = "carries each layer's scores to the next: every process would hold all layers' keys"
    elif spec.selection is not None:
        why = "subtracts what all rows before have selected: processes would wait for each other"
    if why is not None:
        raise InputError(f"{spec.name} {why}; read it in one process")


@contextmanager
def leading() -> Iterator[Scoring]:
    """In the first process: what makes scorers, in whose every call the others take part.

    They are in `following` meanwhile, and leave it when this context ends, however it ends.
    """

    def scorer(model: CausalLM, precision: Precision = "fp32") -> TokenScorer:
        together = in_shards(model, precision)

        def score(ids: Int[Tensor, "b t1"]) -> TokenScores:
            # What this process refuses, the others are not asked for.
            refuse_undivided(model.spec)
            _slices(ids.shape[1] - 1)
            _told((model.spec, precision, ids.cpu()))
            return together(ids)

        return score

    try:
        yield scorer
    finally:
        _told(None)


def following(model: CausalLM) -> None:
    """In every other process: take part in what the first one reads, until that has done."""
    while (asked := _told(None)) is not None:
        spec, precision, ids = asked
        with nullcontext() if spec == model.spec else model.using(spec):
            in_shards(model, precision)(ids)


def _told(question: Any) -> Any:
    """What the first process asks of all."""
    box = [question]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _slices(tokens: int) -> list[int]:
    """The first token of each process, and the number of all."""
    size = dist.get_world_size()
    if tokens < _LEAST * size:
        raise InputError(
            f"{size} processes share a row of {tokens} tokens, but each needs at least {_LEAST}: "
            "read longer rows, or with fewer processes"
        )
    return [rank * tokens // size for rank in range(size + 1)]


def _scores(model: CausalLM, ids: Int[Tensor, "b t1"]) -> TokenScores:
    starts = _slices(ids.shape[1] - 1)
    counts = [stop - start for start, stop in pairwise(starts)]
    first, stop = starts[dist.get_rank()], starts[dist.get_rank() + 1]
    cache = _cache(model.blocks.specs, ids[:, :first], counts)
    hidden = model.hidden(ids[:, first:stop], cache=cache)
    targets = ids[:, first + 1 : stop + 1]
    own = token_scores(hidden.flatten(0, 1), model.head_weight, targets.flatten())
    loss = _gathered(own.loss.view(targets.shape), counts, 1)
    correct = _gathered(own.correct.view(targets.shape).to(torch.uint8), counts, 1)
    return TokenScores(loss, correct.bool())


def _cache(
    specs: Sequence[ScoreSpec], before: Int[Tensor, "b t"], counts: Sequence[int]
) -> ModelCache:
    """The cache of a model that is to go on after the tokens `before` its slice."""
    cache = ModelCache(specs)
    if before.shape[1]:
        # Documents are counted from the row's first token on.
        cache.read(before)
        cache.done(before.shape[1])
    cache.layers = [_Slices(before.shape[1], counts) for _ in specs]
    return cache


class _Slices(KeyValueCache):
    """One layer's keys and values from the row's first token on, gathered when the slice is read.

    Nothing is kept but their number.
    """

    def __init__(self, first: int, counts: Sequence[int]) -> None:
        super().__init__()
        self.length, self._counts = first, counts

    def make_room(self, tokens: int) -> None:
        """None is taken."""

    def append(
        self, k: Float[Tensor, "b g t d"], v: Float[Tensor, "b g t e"]
    ) -> tuple[Float[Tensor, "b g s d"], Float[Tensor, "b g s e"]]:
        """Give the slice's keys and values to all, and return those up to its last token."""
        self.length += k.shape[2]
        upto = self._counts[: dist.get_rank() + 1]
        return _gathered(k, self._counts, 2, upto), _gathered(v, self._counts, 2, upto)


def _gathered(
    x: Tensor, counts: Sequence[int], axis: int, wanted: Sequence[int] | None = None
) -> Tensor:
    """The slices of the first `wanted` processes (None: of all) side by side; this one's is `x`."""
    missing = list(x.shape)
    missing[axis] = max(counts) - x.shape[axis]
    mine = torch.cat((x, x.new_zeros(missing)), axis).contiguous()
    every = [torch.empty_like(mine) for _ in counts]
    dist.all_gather(every, mine)
    held = zip(every, counts if wanted is None else wanted, strict=False)
    return torch.cat([part.narrow(axis, 0, count) for part, count in held], axis)
