"""The protocols: token accuracy and loss of any tokens-to-logits callable, as measurements."""

from __future__ import annotations

from normattn.lab.evaluation.cells import AnySet, CellInfo
from normattn.lab.evaluation.fingerprints import weights_digest
from normattn.lab.evaluation.protocols import bin_edges, evaluate_cell, rising_edges
from normattn.lab.evaluation.retrieval import evaluate_retrieval
from normattn.lab.evaluation.runner import evaluate_run
from normattn.lab.evaluation.scorers import TokenScorer, from_causal_lm, from_logits

__all__ = [
    "AnySet",
    "CellInfo",
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
