"""softmax(score) · value for plain tensors: a readable reference and fast paths that equal it."""

from normattn.kernels.cross_entropy import (
    LinearCrossEntropy,
    TokenScores,
    linear_cross_entropy,
    token_scores,
)
from normattn.kernels.dispatch import (
    BACKENDS,
    TABLE,
    Decision,
    attend,
    capability_table,
    choose,
    reasons,
)
from normattn.kernels.inputs import AttentionInputs, AttentionMask

__all__ = [
    "BACKENDS",
    "TABLE",
    "AttentionInputs",
    "AttentionMask",
    "Decision",
    "LinearCrossEntropy",
    "TokenScores",
    "attend",
    "capability_table",
    "choose",
    "linear_cross_entropy",
    "reasons",
    "token_scores",
]
