"""Whole sequences under scores that fold into queries and keys: prepared once, by torch's kernel.

`find_folded` gives what was prepared for a score and shapes, so that a small call costs its
operations alone. What is learned is read in each call. `layers.decode_step` does the same for one
more token beside a cache.

Legend: B batch, H query heads, G key heads, T queries, S keys, D head dimension, E value size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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
from normattn.layers.decode_step import FoldedStep, find_step
from normattn.layers.folds import (
    folds,
    normed,
    output_is_final,
    times_learned_length,
    visible_keys,
    without_parameters,
)
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

# Prepared objects are forgotten, all at once, when there are so many: lengths vary without end.
_MOST = 512
_PREPARED: dict[tuple[object, ...], tuple[object, FoldedAttention | None]] = {}


@dataclass(frozen=True, eq=False)
class FoldedAttention:
    """What turns queries and keys of some shapes into operands of torch's kernel.

    `query` are the arguments that rotate queries and multiply them by λ, `key` those that rotate
    keys; None where nothing rotates. `scale` is then λ, a number for all rows or one for each. `n`
    (1, T) is the number of visible keys, where a learned part of λ depends on it. `score` is one
    that learns nothing, built for a specification; None where callers have their own.
    `output_is_final` says that no gate and no pairs of heads follow. `mask` and `backend` are for
    numbers that torch's kernel does not serve.
    """

    score: Score | None
    query: RotationArguments | None
    key: RotationArguments | None
    scale: Tensor | float | None
    n: Float[Tensor, "1 t"] | None
    output_is_final: bool
    mask: AttentionMask
    backend: str

    def run(
        self,
        score: Score | None,
        q: Float[Tensor, "b h t d"],
        k: Float[Tensor, "b g s d"],
        v: Float[Tensor, "b g s e"],
        cache: KeyValueCache | None = None,
    ) -> Float[Tensor, "b h t e"]:
        """softmax(score) · v by norm, rotation and torch's kernel.

        What is not finite shows. On a CPU a number is read, and other kernels take over. On another
        device the rows of the batch that hold it become NaN, without waiting for the device.
        """
        assert score is not None
        q, k = normed(score, q, k)
        if self.n is not None:
            q = times_learned_length(score, q, self.n)
        learned = score._parameters.get("scale")
        if learned is None and "scale" not in score._parameters:
            learned = score.scale  # where a parametrisation or a replica keeps it
        if learned is not None:
            q = q * learned
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


def find_folded(
    score: Score | ScoreSpec | str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    backend: str,
    cache: KeyValueCache | None,
) -> FoldedAttention | FoldedStep | None:
    """What was prepared for tensors of these shapes, made at the first call; None without.

    Whatever looks into a computation or changes it (a compiler, fake tensors, autocast, an
    observer, hooks, torch.func) has none. Raises `InputError` for tensors that do not fit.
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
    if cache is not None:
        return find_step(score, q, k, v, cache) if causal and backend == "auto" else None
    name = (
        # A specification by identity: its hash would take as long as all the rest.
        *(given if isinstance(given, str) else id(given), sizes, causal, backend),
        *(q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.layout, k.layout, v.layout),
        *(q.device, k.device, v.device),
    )
    kept = _PREPARED.get(name)
    if kept is None:
        if len(_PREPARED) >= _MOST:
            _PREPARED.clear()
        # The specification is kept, too: another one may not get its number.
        kept = _PREPARED[name] = given, _prepare(score, q, k, v, causal, backend)
    return kept[1]


@torch.no_grad()
def _prepare(
    score: Score | ScoreSpec | str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    backend: str,
) -> FoldedAttention | None:
    """For whole sequences like these; None where the score asks for more than torch's kernel."""
    check_shapes(q, k, v)
    module = score if isinstance(score, Score) else without_parameters(score, q, k)
    check_heads(module, q, k)
    built, spec, size = None if isinstance(score, Score) else module, module.spec, module.head_dim
    if backend not in ("auto", "fused") or spec.documents is not None or not folds(module):
        return None
    if spec.remapping is not None:
        return None
    plan = prepare(spec, q, k.shape[2], AttentionArguments(causal, backend))
    at = plan.positions
    inputs = module(q, k, pair_values(spec, v, size), at, plan.mask)
    if choose(inputs, backend).name != "fused" or not inputs.visibility.plain:
        return None
    query, key = query_tables(spec, size, at, q.dtype), key_tables(spec, size, at.key, k.dtype, 0)
    assert isinstance(query.near, Rotation | None)
    assert isinstance(key.near, Rotation | None)
    turn_q, turn_k = (None if turn is None else turn.arguments for turn in (query.near, key.near))
    return FoldedAttention(
        *(built, turn_q, turn_k, query.scale, visible_keys(module, at.n, q)),
        *(output_is_final(spec), plan.mask, backend),
    )


def zero_or_nan(q: Tensor, k: Tensor) -> Float[Tensor, "b 1 1 1"]:
    """0 for each row of the batch, or NaN where a query or a key is not finite; on the device."""
    if not q.numel() or not k.numel():
        return q.new_zeros(())
    largest = [torch.linalg.vector_norm(x.detach(), torch.inf, (1, 2, 3)) for x in (q, k)]
    zero: Tensor = (largest[0] + largest[1]) * 0.0
    return zero[:, None, None, None]
