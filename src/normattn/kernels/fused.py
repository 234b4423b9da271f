"""Everything multiplicative is folded into q and k: what is left is the stock flash kernel."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from normattn.kernels.problem import Problem


def fused(problem: Problem) -> Float[Tensor, "b h t e"]:
    """`scaled_dot_product_attention` with scale 1.

    Causal with one query, the last, means that every key is seen.
    """
    causal = problem.visibility.causal and problem.q.shape[2] > 1
    return scaled_dot_product_attention(
        problem.q,
        problem.k,
        problem.v,
        is_causal=causal,
        scale=1.0,
        dropout_p=problem.dropout,
        enable_gqa=problem.q.shape[1] != problem.k.shape[1],
    )


def why_not_fused(problem: Problem) -> str | None:
    """The reason why this kernel cannot serve the problem, or None."""
    if problem.bias is not None or problem.sink is not None or problem.cap is not None:
        return "it adds no bias, no sink and no cap to the score"
    if problem.two_regimes:
        return "it has one score per pair, not two regimes"
    if not problem.visibility.plain:
        return "it takes no mask beside plain causality"
    if problem.visibility.causal and problem.q.shape[2] not in (1, problem.k.shape[2]):
        return "its causal mask needs as many queries as keys"
    if problem.v.shape[-1] != problem.q.shape[-1]:
        return "its values must have the size of the keys"
    return None
