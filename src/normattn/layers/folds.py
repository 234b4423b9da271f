"""What folds into queries and keys: which scores do, and the steps that all of them share.

Legend: B batch, H query heads, G key heads, T queries, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.errors import InputError
from normattn.kernels.numerics import at_least_float32
from normattn.score import Score, ScoreSpec
from normattn.score.parts import VORoPE
from normattn.score.rotary import scaled
from normattn.score.spec import as_spec


def folds(score: Score) -> bool:
    """Whether nothing but a norm, a rotation and λ is done to queries and keys."""
    spec = score.spec
    wider = getattr(spec.position, "widens", False) or spec.forgets or spec.residual is not None
    moved = spec.order is not None or spec.blockwise or spec.chunk is not None
    moved = moved or spec.documents is not None or isinstance(spec.values, VORoPE)
    return not (score.position is not None or wider or moved or spec.leaks_future)


def visible_keys(score: Score, n: Tensor, q: Tensor) -> Float[Tensor, "1 t"] | None:
    """n in float32 or wider, where something that is learned depends on it."""
    if score.logn is None or score.spec.logn is None:
        return None
    # An ordinary tensor even when first asked for in inference mode: training reuses it.
    with torch.inference_mode(False):
        return n.to(at_least_float32(q.dtype))[None].clone()


def learned_operands(
    score: Score,
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b g s d"],
    n: Float[Tensor, "1 #t"] | None,
) -> tuple[Float[Tensor, "b h t d"], Float[Tensor, "b g s d"]]:
    """Queries and keys after their norms, the queries times what λ learns, of n too if given."""
    # Not by attribute, which is a call of Python each.
    query_norm, key_norm = score._modules.get("query_norm"), score._modules.get("key_norm")
    if query_norm is not None:
        q = query_norm.apply_directly(q)  # type: ignore[operator]
    if key_norm is not None:
        k = key_norm.apply_directly(k)  # type: ignore[operator]
    if n is not None and score.logn is not None and score.spec.logn is not None:
        factor = score.spec.logn.learned_factor(n, dict(score.logn.items()))
        q = scaled(q, factor[..., None])
    learned = score._parameters.get("scale")
    if learned is None and "scale" not in score._parameters:
        learned = score.scale  # where a parametrisation or a replica keeps it
    return (q if learned is None else q * learned), k


def without_parameters(score: ScoreSpec | str, q: Tensor, k: Tensor) -> Score:
    """The score of a specification that learns nothing, for tensors of these shapes."""
    build: Callable[..., Score] = _build
    if torch.compiler.is_compiling():
        # Modules are made outside of the graph; `disable` loads the compiler, so only where one
        # runs. What fullgraph=True cannot do, torch says with the line, its hint included.
        build = torch.compiler.disable(_build)  # type: ignore[no-untyped-call] # pass a Score
    return build(score, q.shape[1], q.shape[-1], k.shape[1])


def _build(score: ScoreSpec | str, heads: int, head_dim: int, kv_heads: int) -> Score:
    return _built(as_spec(score), heads, head_dim, kv_heads)


@lru_cache(maxsize=64)
def _built(spec: ScoreSpec, heads: int, head_dim: int, kv_heads: int) -> Score:
    module = Score(spec, heads, head_dim, kv_heads)
    learned = [name for name, _ in module.named_parameters()]
    if learned or any(True for _ in module.buffers()):
        raise InputError(
            f"{spec.name} learns {', '.join(learned) or 'running statistics'}: make a "
            "Score(spec, heads=…, head_dim=…) and pass that"
        )
    return module
