"""softmax(score) · value for plain tensors: a readable reference and fast paths that equal it."""

from normattn.kernels.capabilities import TABLE, capability_table
from normattn.kernels.cross_entropy import (
    LinearCrossEntropy,
    TokenScores,
    linear_cross_entropy,
    token_scores,
)
from normattn.kernels.dispatch import BACKENDS, Decision, attend, choose, reasons, unrounded
from normattn.kernels.problem import Problem
from normattn.kernels.visibility import Visibility

__all__ = [
    "BACKENDS",
    "TABLE",
    "Decision",
    "LinearCrossEntropy",
    "Problem",
    "TokenScores",
    "Visibility",
    "attend",
    "capability_table",
    "choose",
    "linear_cross_entropy",
    "reasons",
    "token_scores",
    "unrounded",
]
