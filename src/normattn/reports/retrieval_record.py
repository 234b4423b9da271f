"""The record of one retrieval task at one length, for one model under one method."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from normattn.reports.cell_record import (
    CellRecord,
    FloatRows,
    Rows,
    check_bounded,
    checked_array,
)

RetrievalTask = Literal["passkey", "multi_key", "variable_tracking"]


class RetrievalRecord(CellRecord):
    """Counts of answers, with samples as rows and depths as columns.

    `tokens` are those of the answer, `correct` those of them that the model found most likely with
    the true answer before them, `loss` their sum in nats. An answer is right when all its tokens
    are: greedy decoding would have given it. `depths` rise from 0, the beginning, to 1, the end.
    """

    protocol: Literal["retrieval"]
    task: RetrievalTask
    depths: tuple[float, ...] = Field(min_length=1)
    tokens: Rows
    correct: Rows
    loss: FloatRows

    @model_validator(mode="after")
    def _consistent(self) -> RetrievalRecord:
        shape = (len(self.documents), len(self.depths))
        if any(a >= b for a, b in zip(self.depths, self.depths[1:], strict=False)):
            raise ValueError("the depths do not increase")
        if self.depths[0] < 0 or self.depths[-1] > 1:
            raise ValueError("the depths are not between 0 and 1")
        what = "samples by {} depths"
        tokens = checked_array(self.tokens, shape, "tokens", what)
        if np.any(tokens < 1):
            raise ValueError("an answer has no token")
        correct = checked_array(self.correct, shape, "correct", what)
        check_bounded(correct, tokens, "correct", "tokens")
        checked_array(self.loss, shape, "loss", what)
        return self

    def counts(self, field: str) -> NDArray[np.float64]:
        """A field as an array (samples, depths).

        `field`: "tokens", "correct", "loss"; "answers" (1 everywhere) and "exact" (1 where every
        token of the answer is correct).
        """
        if field == "answers":
            return np.ones((len(self.documents), len(self.depths)))
        if field == "exact":
            right = self.counts("correct") == self.counts("tokens")
            return np.asarray(right, dtype=np.float64)
        return np.asarray(getattr(self, field), dtype=np.float64)
