"""`prepare`: what attention needs beside its tensors, decided once for a score and its shapes.

Where everything that a score does folds into queries and keys and torch's own kernel serves, an
`AttentionPlan` holds the rotary tables with the scale in them. Running it is norm, rotation and
`scaled_dot_product_attention`; plans are kept from call to call.

Legend: B batch, H query heads, G key heads, T queries, S keys, D head dimension, E value size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import forward_ad

from normattn.errors import InputError
from normattn.kernels import AttentionMask, choose
from normattn.kernels.inputs import check_shapes
from normattn.kernels.sdpa import sdpa
from normattn.kernels.stats import observer
from normattn.score import Positions, Score, ScoreSpec
from normattn.score.rotary import Rotation, key_tables, query_tables, scaled
from normattn.score.spec import as_spec

# Plans are forgotten, all at once, when there are so many: lengths may vary without end.
_MOST = 512
_PLANS: dict[tuple[object, ...], tuple[object, AttentionPlan | None]] = {}


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """The way of queries, keys and values of certain shapes to `scaled_dot_product_attention`.

    `query` turns queries and multiplies them with λ, `key` turns keys; None where nothing turns.
    `scale` is then λ, a number for all rows or one for each. `score` is one that learns nothing,
    made for a specification; None where callers have their own, of the head sizes `heads`.
    `watched`: a number can be read at no cost, so that infinities are looked for.
    """

    score: Score | None
    heads: tuple[int, int, int]
    causal: bool
    query: Rotation | None
    key: Rotation | None
    scale: Tensor | float | None
    watched: bool

    def run(
        self,
        score: Score,
        q: Float[Tensor, "b h t d"],
        k: Float[Tensor, "b g s d"],
        v: Float[Tensor, "b g s e"],
    ) -> Float[Tensor, "b h t e"] | None:
        """softmax(score) · v; None where a query or a key is not finite: other kernels show it."""
        if score.query_norm is not None:
            q = score.query_norm(q)
        if score.key_norm is not None:
            k = score.key_norm(k)
        if score.scale is not None:
            q = q * score.scale
        if self.query is not None and self.key is not None:
            q, k = self.query.turn(q), self.key.turn(k)
        elif isinstance(self.scale, Tensor):
            q = scaled(q, self.scale)
        elif self.scale is not None:
            q = q * self.scale  # as for a number for each row: equal numbers give equal bits
        if self.watched:
            # In float32: a sum of half-precision numbers is beyond their range soon.
            total = q.detach().sum(dtype=torch.float32) + k.detach().sum(dtype=torch.float32)
            if not math.isfinite(total.item()):
                return None
        return sdpa(q, k, v, self.causal, 1.0)


def planned(
    score: Score | ScoreSpec | str, q: Tensor, k: Tensor, v: Tensor, causal: bool, backend: str
) -> Float[Tensor, "b h t e"] | None:
    """softmax(score) · v of dense tensors by the plan for their shapes; None where there is none.

    A plan is found by what decides it: specification, shapes, types, devices. Whatever looks into
    a computation or changes it (a compiler, autocast, an observer, hooks, torch.func) has none.
    """
    if torch.compiler.is_compiling() or not type(q) is type(k) is type(v) is Tensor or q.is_meta:
        return None
    if torch.is_autocast_enabled(q.device.type) or observer() is not None:
        return None
    if isinstance(score, Score) and (score._forward_hooks or score._forward_pre_hooks):
        return None  # whoever hangs a hook on the score wants to see its tensors
    if torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0:
        return None
    known = score.spec if isinstance(score, Score) else score
    name = (
        *(known if isinstance(known, str) else id(known), causal, backend),
        *(q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.layout, k.layout, v.layout),
        *(q.device, k.device, v.device),
    )
    kept = _PLANS.get(name)
    if kept is None:
        if len(_PLANS) >= _MOST:
            _PLANS.clear()
        # The specification is kept, too: another one may not get its number.
        kept = _PLANS[name] = known, prepare(score, q, k, v, causal, backend)
    plan = kept[1]
    if plan is None:
        return None
    if isinstance(score, Score):
        own = score.heads, score.kv_heads, score.head_dim
        return plan.run(score, q, k, v) if own == plan.heads else None
    assert plan.score is not None
    return plan.run(plan.score, q, k, v)


@torch.no_grad()
def prepare(
    score: Score | ScoreSpec | str, q: Tensor, k: Tensor, v: Tensor, causal: bool, backend: str
) -> AttentionPlan | None:
    """The plan for tensors like these; None where the score asks for more than norm and rotation.

    Raises `InputError` as `attention` does.
    """
    if backend not in ("auto", "fused"):
        return None
    check_shapes(q, k, v)
    module = score if isinstance(score, Score) else without_parameters(score, q, k)
    check_score(module, q, k)
    spec, heads = module.spec, (module.heads, module.kv_heads, module.head_dim)
    if not _straight(module):
        return None
    positions = positions_of(q, k, causal)
    seen = AttentionMask(causal, positions.query, positions.key, positions.regular)
    problem = module(q, k, v, positions, seen)
    if choose(problem, backend).name != "fused" or not problem.visibility.plain:
        return None
    query = query_tables(spec, module.head_dim, positions, q.dtype)
    key = key_tables(spec, module.head_dim, positions.key, k.dtype, 0)
    assert isinstance(query.near, Rotation | None)
    assert isinstance(key.near, Rotation | None)
    own = None if isinstance(score, Score) else module
    return AttentionPlan(
        own, heads, causal, query.near, key.near, query.scale, q.device.type == "cpu"
    )


def _straight(score: Score) -> bool:
    """Whether nothing but a norm, a rotation and λ is done to queries and keys."""
    spec, position = score.spec, score.spec.position
    once = (
        spec.remapping is None
        and spec.order is None
        and not spec.blockwise
        and spec.residual is None
    )
    features = score.position is not None or getattr(position, "widens", False) or spec.forgets
    beside = spec.gate is not None or spec.documents is not None or spec.chunk is not None
    beside = beside or spec.difference is not None
    beside = beside or spec.leaks_future  # statistics over the rows take padding into account
    return once and not features and not beside and score.logn is None


def positions_of(q: Tensor, k: Tensor, causal: bool) -> Positions:
    """The positions of tokens that are simply counted, the queries the last of them."""
    if causal:
        return regular_positions(q.shape[2], k.shape[2], q.device)
    return Positions.of(q.shape[2], k.shape[2], False, q.device)


def regular_positions(queries: int, keys: int, device: torch.device) -> Positions:
    """Causal positions of the last `queries` of `keys` tokens."""
    if queries > keys or torch.compiler.is_compiling():
        return Positions.of(queries, keys, True, device)
    capacity = max(64, 1 << (keys - 1).bit_length())
    return _counted(capacity, device).part(slice(keys - queries, keys), keys)


@lru_cache(maxsize=64)
def _counted(capacity: int, device: torch.device) -> Positions:
    with torch.inference_mode(False):
        return Positions.of(capacity, capacity, True, device)


def forget_positions() -> None:
    """Make positions and plans anew when they are next asked for."""
    _counted.cache_clear()
    _PLANS.clear()


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


def without_parameters(score: ScoreSpec | str, q: Tensor, k: Tensor) -> Score:
    """The score of a specification that learns nothing, for tensors of these shapes."""
    sizes = q.shape[1], q.shape[-1], k.shape[1]
    if not torch.compiler.is_compiling():
        return _made(score, *sizes)
    # Modules are made outside of the graph; `disable` loads the compiler, so only where one runs.
    # What fullgraph=True cannot do, torch says with the line, the hint at its end included.
    outside: Any = torch.compiler.disable(_made)  # type: ignore[no-untyped-call] # pass a Score
    made: Score = outside(score, *sizes)
    return made


def _made(score: ScoreSpec | str, heads: int, head_dim: int, kv_heads: int) -> Score:
    return _built(as_spec(score), heads, head_dim, kv_heads)


def check_score(score: Score, q: Tensor, k: Tensor) -> None:
    """Refuse tensors of other heads than those that the score was built for."""
    expected = (score.heads, score.kv_heads, score.head_dim)
    if (q.shape[1], k.shape[1], q.shape[-1]) != expected:
        raise InputError(
            f"the score was built for {expected[0]} query heads, {expected[1]} key heads and "
            f"dimension {expected[2]}, but q is {tuple(q.shape)} and k is {tuple(k.shape)}"
        )
