"""Windows that several protocols read go through the model once."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Int
from torch import Tensor

from normattn.kernels.cross_entropy import TokenScores
from normattn.lab.data.windows import EvaluationSet
from normattn.lab.evaluation.cells import AnySet
from normattn.lab.evaluation.scorers import TokenScorer

ScorerOf = Callable[[AnySet], TokenScorer]
"""Which scorer reads a set; asked once for each set, in the order in which they are read."""


def recalling(scorer: TokenScorer, sets: Sequence[AnySet]) -> ScorerOf:
    """Scorers of `sets` that ask `scorer` once for windows that stand in several of them.

    The longest natural text, the last segment behind the longest context and the text that is read
    by position are the same windows where the same number of them is asked for. Their scores, 5
    bytes a token, are kept until the last of these sets is read; they are the very numbers that
    `scorer` gave, and batches of other rows are scored anew. The model must not change meanwhile.
    """
    left = Counter(_text(chosen) for chosen in sets)
    kept: dict[str, _Recalled] = {}

    def scorer_of(chosen: AnySet) -> TokenScorer:
        text = _text(chosen)
        left[text] -= 1
        if left[text]:
            return kept.setdefault(text, _Recalled(scorer))
        return kept.pop(text, scorer)

    return scorer_of


class _Recalled:
    """A scorer that remembers every batch."""

    def __init__(self, scorer: TokenScorer) -> None:
        self._scorer = scorer
        self._scores: dict[bytes, TokenScores] = {}

    def __call__(self, ids: Int[Tensor, "b t1"]) -> TokenScores:
        """The scores of these rows."""
        key = hashlib.sha256(repr(tuple(ids.shape)).encode() + ids.numpy().tobytes()).digest()
        if key not in self._scores:
            self._scores[key] = self._scorer(ids)
        return self._scores[key]


def _text(chosen: AnySet) -> str:
    """What identifies the windows of a set; only those of whole texts recur."""
    if not isinstance(chosen, EvaluationSet):
        return chosen.fingerprint
    windows = np.ascontiguousarray(chosen.windows, dtype="<i8")
    return hashlib.sha256(repr(windows.shape).encode() + windows.tobytes()).hexdigest()
