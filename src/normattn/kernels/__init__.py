"""softmax(score) · value for plain tensors: a readable reference and fast paths that equal it."""

from normattn.kernels.cross_entropy import (
    LinearCrossEntropy,
    TokenScores,
    linear_cross_entropy,
    token_scores,
)
from normattn.kernels.dispatch import BACKENDS, attend, choose
from normattn.kernels.problem import Problem, Visibility

__all__ = [
    "BACKENDS",
    "LinearCrossEntropy",
    "Problem",
    "TokenScores",
    "Visibility",
    "attend",
    "choose",
    "linear_cross_entropy",
    "token_scores",
]
