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
