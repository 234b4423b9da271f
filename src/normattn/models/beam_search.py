"""Beam search: the likeliest translations of many sources at once, each as if it were alone.

score(Y) = log p(Y | X) / lp(Y),   lp(Y) = ((5 + |Y|) / 6)^α

|Y| counts the end token (α and lp: GNMT, arXiv 1609.08144, equation 14).

Legend: R sources, K beams, V vocabulary, t tokens written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from normattn.errors import InputError
from normattn.models.utils import without_dropout


@dataclass(frozen=True)
class Hypothesis:
    """A finished translation: its `tokens` without begin and end token.

    `log_probability` is that of the tokens and the end token, `score` the same over the length
    penalty. `ended` is "stop" where the end token was chosen, "length" where the longest allowed
    length left nothing else; its probability counts in both.
    """

    tokens: tuple[int, ...]
    score: float
    log_probability: float
    ended: Literal["stop", "length"]


@torch.inference_mode()
def beam_search(
    model: Any,
    sources: Sequence[Sequence[int]],
    *,
    beam: int = 4,
    length_penalty: float = 0.6,
    max_length: int | None = None,
    batch: int = 64,
) -> list[list[Hypothesis]]:
    """The finished translations of each source, best first.

    Args:
        model: a `Translator`; its dropout is off meanwhile.
        sources: the token ids of each source, of any lengths, at least one token each.
        beam: K, the hypotheses of a source that are followed at a time; 1 takes the likeliest token
            each time.
        length_penalty: α; 0 compares bare probabilities and so favours the short.
        max_length: the most tokens of a translation; None: 2·(source tokens) + 10.
        batch: so many sources at a time, those of like length together.

    Each step goes on with the K likeliest continuations of all; one that ends is put aside and
    leaves its place empty, so that K hypotheses end at most. A source is done when no place is left
    or when nothing that is still open could score above its best. Padding and begin tokens are
    never written. Of equal scores the hypothesis that ranked higher before comes first, then the
    smaller token id. A source's result does not depend on the others. Raises `InputError` for an
    empty source, ids outside the vocabulary and settings out of range.
    """
    for name, value in (("beam", beam), ("batch", batch), ("max_length", max_length)):
        if value is not None and value < 1:
            raise InputError(f"{name} is {value}; it must be at least 1")
    if not (math.isfinite(length_penalty) and length_penalty >= 0):
        raise InputError(f"length_penalty is {length_penalty}; it must be 0 or more")
    for number, source in enumerate(sources):
        if len(source) == 0:
            raise InputError(f"source {number} is empty; give it at least the end token")
        if model.config.pad_id in source:
            raise InputError(
                f"source {number} holds the padding token {model.config.pad_id}; give sources "
                "without padding, they are padded here"
            )
    order = sorted(range(len(sources)), key=lambda number: len(sources[number]), reverse=True)
    translations: list[list[Hypothesis]] = [[] for _ in sources]
    with without_dropout(model):
        for start in range(0, len(order), batch):
            numbers = order[start : start + batch]
            own = [sources[number] for number in numbers]
            limits = [max_length or 2 * len(source) + 10 for source in own]
            found = _search(model, own, beam, length_penalty, limits)
            for number, hypotheses in zip(numbers, found, strict=True):
                translations[number] = sorted(hypotheses, key=lambda one: -one.score)
    return translations


def _search(
    model: Any,
    sources: Sequence[Sequence[int]],
    beam: int,
    penalty: float,
    limits: Sequence[int],
) -> list[list[Hypothesis]]:
    """The finished translations of one batch of sources, in the order in which they ended.

    The search keeps a grid of R open sources by K places, some of which may be empty: `total`
    (R, K) holds log-probabilities, −∞ for an empty place, `tokens` (R, K, t) what is written.
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
        """log p / lp of so many tokens, the end token among them."""
        return log_probability / math.pow((5 + length) / 6, penalty)

    while open_sources:
        rows, _, length = tokens.shape
        full = [row for row, n in enumerate(open_sources) if limits[n] < length]
        log_p = _log_probabilities(model, tokens, encoded, cache, full)
        # The K best continuations of each source, best first; no more than it has places left.
        chance, words = best(log_p, min(beam, log_p.shape[1]))
        whole = (total.reshape(-1, 1) + chance.double()).view(rows, -1)
        values, at = torch.sort(whole, stable=True, dim=-1, descending=True)
        values, at = values[:, :beam], at[:, :beam]
        left = torch.tensor([beam - len(finished[n]) for n in open_sources])
        taken = torch.arange(beam)[None] >= left[:, None]
        values = values.masked_fill(taken.to(device), -math.inf)
        parents, words = at // chance.shape[1], words.view(rows, -1).gather(1, at)

        ended = (words == config.eos_id) & (values > -math.inf)
        for row, place in ended.nonzero().tolist():
            number, value = open_sources[row], float(values[row, place])
            written = tuple(tokens[row, parents[row, place], 1:].tolist())
            why: Literal["stop", "length"] = "length" if length > limits[number] else "stop"
            finished[number].append(Hypothesis(written, score(value, length), value, why))
        # Empty places last: the others keep their order.
        values = values.masked_fill(ended, -math.inf)
        values, order = torch.sort(values, stable=True, dim=-1, descending=True)
        parents, words = parents.gather(1, order), words.gather(1, order)

        going = []
        for row, (number, highest) in enumerate(
            zip(open_sources, values[:, 0].tolist(), strict=True)
        ):
            # Probabilities only fall, and no length penalty is larger than that of the last length.
            reach = score(highest, limits[number] + 1)
            best_ended = max((one.score for one in finished[number]), default=-math.inf)
            if highest > -math.inf and reach > best_ended:
                going.append(row)
        kept = torch.tensor(going, dtype=torch.long, device=device)
        if len(going) < len(open_sources):
            encoded = encoded.choose(kept)
            open_sources = [open_sources[row] for row in going]
        parents, total = parents[kept], values[kept]
        tokens = torch.cat((tokens[kept[:, None], parents], words[kept][:, :, None]), -1)
        flat = (kept[:, None] * beam + parents).flatten()
        if going and not torch.equal(flat, torch.arange(values.numel(), device=device)):
            cache.reorder(flat)
    return finished


def _log_probabilities(
    model: Any, tokens: Tensor, encoded: Any, cache: Any, full: Sequence[int]
) -> Float[Tensor, "rk v"]:
    """log p of the next token in every place; of sources that are `full` only the end may follow.

    Padding and begin tokens are never written.
    """
    config = model.config
    hidden = model.decode(tokens[:, :, -1].reshape(-1, 1), encoded, cache)
    logits = F.linear(hidden[:, -1], model.head_weight)
    # In half precision many words would share a probability.
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


def best(
    values: Float[Tensor, "n v"], count: int
) -> tuple[Float[Tensor, "n c"], Int[Tensor, "n c"]]:
    """The `count` largest of each row, falling, and their indices; of equal ones the first."""
    top = values.topk(count, dim=-1)
    places = top.indices
    # topk picks any of those that equal the last one taken.
    unsure = (values >= top.values[:, -1:]).sum(-1) > count
    if bool(unsure.any()):
        whole = torch.sort(values[unsure], stable=True, dim=-1, descending=True)
        places = places.index_put((unsure.nonzero()[:, 0],), whole.indices[:, :count])
    places = places.sort(-1).values
    chosen, order = torch.sort(values.gather(-1, places), stable=True, dim=-1, descending=True)
    return chosen, places.gather(-1, order)
