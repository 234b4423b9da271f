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
            search = _Search(model, own, beam, length_penalty, limits)
            while search.numbers:
                search.step()
            for number, hypotheses in zip(numbers, search.finished, strict=True):
                translations[number] = sorted(hypotheses, key=lambda one: -one.score)
    return translations


class _Search:
    """One batch under way: a grid of R sources by K places, of which some may be empty.

    `total` (R, K) holds log-probabilities, −∞ for an empty place, `tokens` (R, K, t) what is
    written. `numbers` and `limits` are those of the sources that are not done.
    """

    def __init__(
        self,
        model: Any,
        sources: Sequence[Sequence[int]],
        beam: int,
        penalty: float,
        limits: list[int],
    ) -> None:
        self.model, self.config = model, model.config
        self.beam, self.penalty = beam, penalty
        rows, device = len(sources), model.head_weight.device
        longest = max(len(source) for source in sources)
        padded = [[*source, *[self.config.pad_id] * (longest - len(source))] for source in sources]
        self.encoded = model.encode(torch.tensor(padded, device=device))
        self.cache = model.new_cache()
        self.finished: list[list[Hypothesis]] = [[] for _ in sources]
        self.numbers, self.limits = list(range(rows)), limits
        self.total = torch.full((rows, beam), -math.inf, dtype=torch.float64, device=device)
        self.total[:, 0] = 0.0
        self.tokens = torch.full((rows, beam, 1), self.config.bos_id, device=device)

    def step(self) -> None:
        """Write one token more in every place, and leave the sources that are done."""
        values, parents, words = self._continuations()
        ended = (words == self.config.eos_id) & (values > -math.inf)
        self._finish(values, parents, ended)
        # Empty places last: the others keep their order.
        values = values.masked_fill(ended, -math.inf)
        values, order = torch.sort(values, stable=True, dim=-1, descending=True)
        parents, words = parents.gather(1, order), words.gather(1, order)
        highest = values[:, 0].tolist()
        going = [row for row in range(len(self.numbers)) if self._is_open(row, highest[row])]
        rows = torch.tensor(going, dtype=torch.long, device=values.device)
        if len(going) < len(self.numbers):
            self.encoded = self.encoded.choose(rows)
            self.numbers = [self.numbers[row] for row in going]
            self.limits = [self.limits[row] for row in going]
        if not going:
            return
        parents, self.total = parents[rows], values[rows]
        before = self.tokens[rows[:, None], parents]
        self.tokens = torch.cat((before, words[rows][:, :, None]), -1)
        flat = (rows[:, None] * self.beam + parents).flatten()
        if not torch.equal(flat, torch.arange(values.numel(), device=flat.device)):
            self.cache.reorder(flat)

    def _continuations(self) -> tuple[Tensor, Tensor, Tensor]:
        """The K best of each source, best first: log-probability, the place it comes from, token.

        −∞ where a source has no place left.
        """
        rows, beam, length = self.tokens.shape
        hidden = self.model.decode(self.tokens[:, :, -1].reshape(-1, 1), self.encoded, self.cache)
        logits = F.linear(hidden[:, -1], self.model.head_weight)
        # In half precision many words would share a probability.
        log_p = torch.log_softmax(logits if logits.element_size() > 2 else logits.float(), -1)
        if not bool(torch.isfinite(log_p.amax(-1)).all()):
            raise InputError("the model's logits are not finite: its weights cannot be used")
        log_p[:, [self.config.pad_id, self.config.bos_id]] = -math.inf
        over = [row for row, limit in enumerate(self.limits) if limit < length]
        if over:
            grid = log_p.view(rows, beam, -1)
            end = grid[over, :, self.config.eos_id]
            grid[over] = -math.inf
            grid[over, :, self.config.eos_id] = end
        chance, words = best(log_p, min(beam, log_p.shape[1]))
        total = (self.total.reshape(-1, 1) + chance.double()).view(rows, -1)
        values, at = torch.sort(total, stable=True, dim=-1, descending=True)
        values, at = values[:, :beam], at[:, :beam]
        left = torch.tensor([beam - len(self.finished[n]) for n in self.numbers])
        taken = torch.arange(beam)[None] >= left[:, None]
        values = values.masked_fill(taken.to(values.device), -math.inf)
        return values, at // chance.shape[1], words.view(rows, -1).gather(1, at)

    def _finish(self, values: Tensor, parents: Tensor, ended: Tensor) -> None:
        """Put those aside that ended."""
        length = self.tokens.shape[2]
        for row, candidate in ended.nonzero().tolist():
            tokens = tuple(self.tokens[row, parents[row, candidate], 1:].tolist())
            value = float(values[row, candidate])
            why: Literal["stop", "length"] = "length" if length > self.limits[row] else "stop"
            one = Hypothesis(tokens, self._score(value, length), value, why)
            self.finished[self.numbers[row]].append(one)

    def _is_open(self, row: int, highest: float) -> bool:
        """Whether one that is under way could still score above the best that ended."""
        ended = self.finished[self.numbers[row]]
        if highest == -math.inf or not ended:
            return highest > -math.inf
        # Probabilities only fall, and no length penalty is larger than that of the last length.
        return self._score(highest, self.limits[row] + 1) > max(one.score for one in ended)

    def _score(self, log_probability: float, tokens: int) -> float:
        """log p / lp of so many tokens, the end token among them."""
        return log_probability / math.pow((5 + tokens) / 6, self.penalty)


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
