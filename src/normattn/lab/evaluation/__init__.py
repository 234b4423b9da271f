"""The protocols: token accuracy and loss of any tokens-to-logits callable, as measurements."""

from __future__ import annotations

from normattn.lab.evaluation.language_model import (
    bin_edges,
    evaluate_cell,
    evaluate_run,
    rising_edges,
)
from normattn.lab.evaluation.retrieval import evaluate_retrieval
from normattn.lab.evaluation.scorer import (
    AnySet,
    TokenScorer,
    from_causal_lm,
    from_logits,
    weights_digest,
)

__all__ = [
    "AnySet",
    "TokenScorer",
    "bin_edges",
    "evaluate_cell",
    "evaluate_retrieval",
    "evaluate_run",
    "from_causal_lm",
    "from_logits",
    "rising_edges",
    "weights_digest",
]
