"""Beam search: the most probable translations of many sources, independent of each other.

score(Y) = log p(Y | X) / lp(Y),   lp(Y) = ((5 + |Y|) / 6)^α

|Y| counts the end token (α and lp: GNMT, arXiv 1609.08144, equation 14).

Legend: R sources, K beams, V vocabulary, t tokens so far.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from normattn.errors import InputError, require_sizes
from normattn.models.utils import without_dropout


@dataclass(frozen=True)
class Hypothesis:
    """A finished translation: its `tokens` without begin and end token.

    `log_probability` is that of the tokens and the end token; `score` divides it by the length
    penalty.
    """

    tokens: tuple[int, ...]
    score: float
    log_probability: float


@torch.inference_mode()
def beam_search(
    model: Any,
    sources: Sequence[Sequence[int]],
    *,
    beam: int = 4,
    length_penalty: float = 0.6,
    max_length: int | None = None,
) -> list[list[Hypothesis]]:
    """The finished translations of each source, best first.

    Args:
        model: a `Translator`; its dropout is off during the call.
        sources: the token ids of each source, of any lengths, at least one token each.
        beam: K, the number of open hypotheses of a source; 1 is greedy decoding.
        length_penalty: α; 0 compares probabilities, which favours short translations.
        max_length: the most tokens of a translation; None: 2·(source tokens) + 10.

    Each step keeps the K most probable continuations. A hypothesis that ends leaves its beam empty,
    so at most K end. A source is done when no beam is left, or when no open hypothesis could exceed
    its best score. Padding and begin tokens are never generated. Ties go to the hypothesis that
    ranked higher before, then to the smaller token id. A source's result does not depend on the
    others. Raises `InputError` for no or empty sources, unknown ids and settings out of range.
    """
    most = 1 if max_length is None else max_length
    require_sizes("translate", beam=beam, max_length=most)
    if not 0 <= length_penalty <= 10:
        raise InputError(f"length_penalty is {length_penalty}; it must be from 0 to 10")
    if not sources:
        raise InputError("there is no source: give at least one")
    if any(model.config.pad_id in source for source in sources):
        raise InputError("a source holds the padding token: give sources without padding")
    limits = [max_length or 2 * len(source) + 10 for source in sources]
    with without_dropout(model):
        finished = _search(model, sources, beam, length_penalty, limits)
    return [sorted(hypotheses, key=lambda x: -x.score) for hypotheses in finished]


def _search(
    model: Any, sources: Sequence[Sequence[int]], beam: int, penalty: float, limits: Sequence[int]
) -> list[list[Hypothesis]]:
    """The finished translations of one batch of sources, in the order in which they ended.

    Of R open sources with K beams each, `total` (R, K) holds log-probabilities, −∞ for an empty
    beam, and `tokens` (R, K, t) the tokens so far.
    """
    config, device, rows = model.config, model.head_weight.device, len(sources)
    longest = max(len(source) for source in sources)
    padded = [[*source, *[config.pad_id] * (longest - len(source))] for source in sources]
    encoded, cache = model.encode(torch.tensor(padded, device=device)), model.new_cache()
    finished: list[list[Hypothesis]] = [[] for _ in sources]
    open_sources = list(range(rows))
    total = torch.full((rows, beam), -math.inf, dtype=torch.float64, device=device)
    total[:, 0] = 0.0
    tokens = torch.full((rows, beam, 1), config.bos_id, device=device)

    def score(log_probability: float, length: int) -> float:
        """log p / lp of `length` tokens, including the end token."""
        return log_probability / math.pow((5 + length) / 6, penalty)

    while open_sources:
        rows, _, length = tokens.shape
        full = [row for row, n in enumerate(open_sources) if limits[n] < length]
        log_p = _log_probabilities(model, tokens, encoded, cache, full)
        # The K best continuations of each source, best first; no more than it has beams left.
        top_log_p, top_tokens = stable_topk(log_p, min(beam, log_p.shape[1]))
        candidates = (total.reshape(-1, 1) + top_log_p.double()).view(rows, -1)
        values, indices = torch.sort(candidates, stable=True, dim=-1, descending=True)
        values, indices = values[:, :beam], indices[:, :beam]
        beams_left = torch.tensor([beam - len(finished[n]) for n in open_sources])
        closed = torch.arange(beam)[None] >= beams_left[:, None]
        values = values.masked_fill(closed.to(device), -math.inf)
        parents = indices // top_log_p.shape[1]
        new_tokens = top_tokens.view(rows, -1).gather(1, indices)

        ended = (new_tokens == config.eos_id) & (values > -math.inf)
        for row, column in ended.nonzero().tolist():
            number, value = open_sources[row], float(values[row, column])
            written = tuple(tokens[row, parents[row, column], 1:].tolist())
            finished[number].append(Hypothesis(written, score(value, length), value))
        # Move empty beams to the end; the others keep their order.
        values = values.masked_fill(ended, -math.inf)
        values, order = torch.sort(values, stable=True, dim=-1, descending=True)
        parents, new_tokens = parents.gather(1, order), new_tokens.gather(1, order)

        active = []
        for row, (number, highest) in enumerate(
            zip(open_sources, values[:, 0].tolist(), strict=True)
        ):
            # An upper bound: log p only falls, and lp is largest at the longest length.
            bound = score(highest, limits[number] + 1)
            best_score = max((x.score for x in finished[number]), default=-math.inf)
            if highest > -math.inf and bound > best_score:
                active.append(row)
        kept = torch.tensor(active, dtype=torch.long, device=device)
        if len(active) < len(open_sources):
            encoded = encoded.choose(kept)
            open_sources = [open_sources[row] for row in active]
        parents, total = parents[kept], values[kept]
        tokens = torch.cat((tokens[kept[:, None], parents], new_tokens[kept][:, :, None]), -1)
        cache_rows = (kept[:, None] * beam + parents).flatten()
        if active and not torch.equal(cache_rows, torch.arange(values.numel(), device=device)):
            cache.reorder(cache_rows)
    return finished


def _log_probabilities(
    model: Any, tokens: Tensor, encoded: Any, cache: Any, full: Sequence[int]
) -> Float[Tensor, "rk v"]:
    """log p of the next token of every beam, −∞ for pad and begin; `full` sources may only end."""
    config = model.config
    hidden = model.decode(tokens[:, :, -1].reshape(-1, 1), encoded, cache)
    logits = F.linear(hidden[:, -1], model.head_weight)
    # In half precision many tokens would have the same probability.
    log_p = torch.log_softmax(logits if logits.element_size() > 2 else logits.float(), -1)
    if not bool(torch.isfinite(log_p.amax(-1)).all()):
        raise InputError("the model's logits are not finite: its weights cannot be used")
    log_p[:, [config.pad_id, config.bos_id]] = -math.inf
    if full:
        grid = log_p.view(*tokens.shape[:2], -1)
        end = grid[full, :, config.eos_id]
        grid[full] = -math.inf
        grid[full, :, config.eos_id] = end
    return log_p


def stable_topk(
    values: Float[Tensor, "n v"], count: int
) -> tuple[Float[Tensor, "n c"], Int[Tensor, "n c"]]:
    """The `count` largest of each row in descending order, and their indices; first of equals."""
    top = values.topk(count, dim=-1)
    indices = top.indices
    # Of values equal to the last one, topk takes any: such rows are sorted instead.
    ties = (values >= top.values[:, -1:]).sum(-1) > count
    if bool(ties.any()):
        sorted_rows = torch.sort(values[ties], stable=True, dim=-1, descending=True)
        indices = indices.index_put((ties.nonzero()[:, 0],), sorted_rows.indices[:, :count])
    indices = indices.sort(-1).values
    largest, order = torch.sort(values.gather(-1, indices), stable=True, dim=-1, descending=True)
    return largest, indices.gather(-1, order)
