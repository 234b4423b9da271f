"""Scores that fold into queries and keys: prepared once for their shapes, by torch's kernel.

`find_folded` gives what was prepared, for whole sequences or, from `layers.decode_step`, for one
more token beside a cache, so that a small call costs its operations alone. What is learned is read
in each call.

Legend: B batch, H query heads, G key heads, T queries, S keys, D head dimension, E value size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import forward_ad

from normattn.kernels import AttentionInputs, AttentionMask, attend, choose
from normattn.kernels.inputs import check_shapes
from normattn.kernels.sdpa import sdpa
from normattn.kernels.stats import _OBSERVER
from normattn.layers.cache import KeyValueCache
from normattn.layers.checks import AttentionArguments, check_heads
from normattn.layers.decode_step import FoldedStep, prepare_step
from normattn.layers.folds import folds, learned_operands, visible_keys, without_parameters
from normattn.layers.gates import pair_values
from normattn.layers.prepare import prepare
from normattn.plain import FAKE
from normattn.score import Score, ScoreSpec
from normattn.score.rotary import (
    Rotation,
    RotationArguments,
    key_tables,
    query_tables,
    rotate_rows,
    rotate_with_gradient,
    scaled,
)


@dataclass(frozen=True, eq=False)
class FoldedAttention:
    """What turns queries and keys of some shapes into operands of torch's kernel.

    `query` are the arguments that rotate queries and multiply them by λ, `key` those that rotate
    keys; None where nothing rotates. `scale` is then λ, a number for all rows or one for each. `n`
    (1, T) is the number of visible keys, where a learned part of λ depends on it. `mask` and
    `backend` are for numbers that torch's kernel does not serve.
    """

    query: RotationArguments | None
    key: RotationArguments | None
    scale: Tensor | float | None
    n: Float[Tensor, "1 t"] | None
    mask: AttentionMask
    backend: str

    def run(
        self,
        score: Score,
        q: Float[Tensor, "b h t d"],
        k: Float[Tensor, "b g s d"],
        v: Float[Tensor, "b g s e"],
        cache: KeyValueCache | None = None,
    ) -> Float[Tensor, "b h t e"]:
        """softmax(score) · v by norm, rotation and torch's kernel.

        What is not finite shows. On a CPU a number is read, and other kernels take over. On another
        device the rows of the batch that hold it become NaN, without waiting for the device.
        """
        q, k = learned_operands(score, q, k, self.n)
        if self.query is not None and self.key is not None:
            rotate = rotate_with_gradient if torch.is_grad_enabled() else rotate_rows
            q, k = rotate(q, *self.query), rotate(k, *self.key)
        elif isinstance(self.scale, Tensor):
            q = scaled(q, self.scale)
        elif self.scale is not None:
            q = q * self.scale  # as for a number for each row: equal numbers give equal bits
        if not q.is_cpu:
            return sdpa(q, k, v, self.mask.causal, 1.0) + zero_or_nan(q, k).to(v.dtype)
        # In float32: a sum of half-precision numbers is beyond their range soon.
        total = q.detach().sum(dtype=torch.float32) + k.detach().sum(dtype=torch.float32)
        if math.isfinite(total.item()):
            return sdpa(q, k, v, self.mask.causal, 1.0)
        return attend(AttentionInputs(q, k, v, self.mask), self.backend)


class Prepared(NamedTuple):
    """The prepared computation for a score and tensors of some shapes.

    `module` is the score of a specification, which learns nothing; None where callers have their
    own. `final` says that no gate, no pairs of heads and no part of the values follow.
    """

    way: FoldedAttention | FoldedStep
    module: Any
    final: bool


# All are forgotten at once when there are so many: lengths vary without end.
_MOST = 512
_PREPARED: dict[tuple[object, ...], tuple[object, Prepared | None]] = {}


def find_folded(
    score: Score | ScoreSpec | str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    backend: str,
    cache: KeyValueCache | None,
) -> Prepared | None:
    """What was prepared for tensors of these shapes, made at the first call; None without.

    Whatever looks into a computation or changes it (a compiler, fake tensors, autocast, an
    observer, hooks, torch.func) has none, nor has more than one token beside a cache, or one whose
    gradient is wanted. Raises `InputError` for tensors that do not fit.
    """
    if torch.compiler.is_compiling() or not type(q) is type(k) is type(v) is Tensor or q.is_meta:
        return None
    if torch.is_autocast_enabled(q.device.type) or _OBSERVER.get() is not None:
        return None
    if torch._C._get_dispatch_mode(FAKE) is not None:
        return None
    if torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0:
        return None
    given: ScoreSpec | str
    sizes: tuple[int, int, int] | None = None
    if isinstance(score, Score):
        hooked = score._forward_hooks or score._forward_pre_hooks or score._backward_pre_hooks
        if hooked or type(score) is not Score:
            return None  # whoever hangs a hook on the score wants to see its tensors
        given, sizes = score._spec, (score.heads, score.kv_heads, score.head_dim)
    else:
        given = score
    capacity = 0
    if cache is not None:
        if not causal or backend != "auto" or not q.shape[2] == k.shape[2] == 1:
            return None
        if torch.is_grad_enabled() and _learns(score, q, k, v):
            return None
        # A step serves any number of tokens up to the next power of two.
        capacity = max(64, 1 << cache.length.bit_length())
    name = (
        # A specification by identity: its hash would take as long as all the rest.
        *(given if isinstance(given, str) else id(given), sizes, causal, backend, capacity),
        *(q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.layout, k.layout, v.layout),
        *(q.device, k.device, v.device),
    )
    kept = _PREPARED.get(name)
    if kept is None:
        if len(_PREPARED) >= _MOST:
            _PREPARED.clear()
        # The specification is kept, too: another one may not get its number.
        kept = _PREPARED[name] = given, _prepare(score, q, k, v, causal, backend, capacity)
    return kept[1]


def _learns(score: Score | ScoreSpec | str, *tensors: Tensor) -> bool:
    learned = score.parameters() if isinstance(score, Score) else ()
    return any(x.requires_grad for x in (*tensors, *learned))


@torch.no_grad()
def _prepare(
    score: Score | ScoreSpec | str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    backend: str,
    capacity: int,
) -> Prepared | None:
    """For tensors like these; None where the score asks for more."""
    check_shapes(q, k, v)
    module = score if isinstance(score, Score) else without_parameters(score, q, k)
    check_heads(module, q, k)
    way: FoldedAttention | FoldedStep | None = None
    if capacity:
        way = prepare_step(module, q, k, v, capacity)
    elif backend in ("auto", "fused") and module.spec.remapping is None and folds(module):
        way = _prepare_sequence(module, q, k, v, causal, backend)
    spec = module.spec
    final = spec.gate is None and spec.difference is None and spec.values is None
    return None if way is None else Prepared(way, None if module is score else module, final)


def _prepare_sequence(
    score: Score, q: Tensor, k: Tensor, v: Tensor, causal: bool, backend: str
) -> FoldedAttention | None:
    """For whole sequences like these; None where torch's kernel does not serve them."""
    spec, size = score.spec, score.head_dim
    plan = prepare(spec, q, k.shape[2], AttentionArguments(causal, backend))
    at = plan.positions
    inputs = score(q, k, pair_values(spec, v, size), at, plan.mask)
    if choose(inputs, backend).name != "fused" or not inputs.visibility.plain:
        return None
    query, key = query_tables(spec, size, at, q.dtype), key_tables(spec, size, at.key, k.dtype, 0)
    assert isinstance(query.near, Rotation | None)
    assert isinstance(key.near, Rotation | None)
    turn_q, turn_k = (None if turn is None else turn.arguments for turn in (query.near, key.near))
    visible = visible_keys(score, at.n, q)
    return FoldedAttention(turn_q, turn_k, query.scale, visible, plan.mask, backend)


def zero_or_nan(q: Tensor, k: Tensor) -> Float[Tensor, "b 1 1 1"]:
    """0 for each row of the batch, or NaN where a query or a key is not finite; on the device."""
    if not q.numel() or not k.numel():
        return q.new_zeros(())
    largest = [torch.linalg.vector_norm(x.detach(), torch.inf, (1, 2, 3)) for x in (q, k)]
    zero: Tensor = (largest[0] + largest[1]) * 0.0
    return zero[:, None, None, None]
