"""Residual scores as one product: the queries and keys of all layers, laid side by side.

⟨[q_1 … q_n], [k_1 … k_n]⟩ = Σ_m ⟨q_m, k_m⟩, exactly. So nothing per pair is kept, and any kernel
can be asked; but layer n multiplies n·D features where a carried buffer multiplies D. It is chosen
for few features and many keys (`dispatch`: layers·D ≤ 32, from 2048 keys on), by a compiler, and by
name where a graph is used twice.
"""

from __future__ import annotations

from dataclasses import replace

from normattn.kernels.problem import Problem


def concatenated(problem: Problem) -> Problem:
    """The same problem without a carry, its features those of this layer and of all below."""
    state = problem.carry
    assert state is not None
    state.enter("concatenated", problem.stack)
    q, k = state.features(problem.q, problem.k)
    return replace(problem, q=q, k=k, carry=None)
