"""What unseen positions cost: the last L tokens of a text read alone, behind it, and clamped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import polars as pl
import torch
from jaxtyping import Int
from torch import Tensor

from normattn.errors import InputError
from normattn.lab.diagnostics.documents import Documents
from normattn.lab.stats import sums
from normattn.models import CausalLM

READINGS = ("alone", "as is", "clamped")
"""The last L tokens with nothing before them; behind the whole text; the same with every relative
position of at least L − 1 read as L − 1 (ReRoPE, w = L − 1), so that none is unseen."""


class ClampedReading:
    """Accuracy and loss of the same last L tokens in each of the `READINGS`, by document.

    Rows, by the number of the reading: `last_accuracy`, right predictions of all; `last_loss`,
    nats. A score without rotary positions, or with a rule of its own for far ones, cannot be
    clamped: `of` is 0 there.
    """

    def __init__(self, documents: Documents, length: int) -> None:
        self.documents, self.length = documents, length
        shape = (len(documents.names), len(READINGS))
        self.correct, self.loss, self.tokens = (np.zeros(shape) for _ in range(3))

    def add(self, part: slice, model: CausalLM, ids: Int[Tensor, "b t1"]) -> None:
        """Read a part of the texts, whose last tokens are only predicted."""
        self._score(part, 0, model, ids[:, -self.length - 1 :])
        self._score(part, 1, model, ids)
        with _clamped(model, self.length - 1) as possible:
            if possible:
                self._score(part, 2, model, ids)

    def _score(self, part: slice, reading: int, model: CausalLM, ids: Tensor) -> None:
        scored = model.token_scores(ids)
        rows = self.documents.of_text[part]
        for total, values in (
            (self.correct, scored.correct),
            (self.loss, scored.loss),
            (self.tokens, torch.ones_like(scored.loss)),
        ):
            last = values[:, -self.length :].double().sum(-1)
            np.add.at(total[:, reading], rows, last.cpu().numpy())

    def measured(self) -> list[pl.DataFrame]:
        """The rows of the frame, without an identity."""
        names, edges = self.documents.names, list(range(len(READINGS)))
        return [
            sums(name, names, above, self.tokens, axis="reading", edges=edges)
            for name, above in (("last_accuracy", self.correct), ("last_loss", self.loss))
        ]


@contextmanager
def _clamped(model: CausalLM, window: int) -> Iterator[bool]:
    """The model reading no relative position beyond `window`; False where its score cannot."""
    try:
        method = model.using("ReRoPE", window=window)
    except InputError:
        yield False
        return
    with method:
        yield True
