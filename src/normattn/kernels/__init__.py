"""softmax(score) · value for plain tensors: a readable reference and fast paths that equal it."""

from normattn.kernels.cross_entropy import TokenScores, linear_cross_entropy, token_scores
from normattn.kernels.dispatch import BACKENDS, attend, choose, reasons, run_kernel
from normattn.kernels.inputs import AttentionInputs, AttentionMask
from normattn.kernels.numerics import merge_by_lse

__all__ = [
    "BACKENDS",
    "AttentionInputs",
    "AttentionMask",
    "TokenScores",
    "attend",
    "choose",
    "linear_cross_entropy",
    "merge_by_lse",
    "reasons",
    "run_kernel",
    "token_scores",
]
