"""What a layer adds to attention: gates, pairs of heads, rotated and excluded values.

A forgetting gate's bias b(i, j) = C_i − C_j with C_j = Σ_{l≤j} ln σ(f_l) is a product of two
features of the query, C_i and 1, with two of the key, 1 and −C_j. In half precision each C is three
features, the rest of each rounding in the next: products add up in float32.

Key heads 2·g and 2·g + 1 are a pair, and so are the query heads that read them, in their order.

Legend: B batch, H query heads, G key heads, r = H/G, T queries, S keys, D head dimension, E value
size, F features more.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from normattn.errors import InputError
from normattn.kernels import AttentionInputs
from normattn.kernels.numerics import at_least_float32
from normattn.score import Positions, Score, ScoreSpec
from normattn.score.parts import XSA
from normattn.score.rotary import Rotation, key_tables


def share_factor(
    factor: Float[Tensor, " h"], kv_heads: int
) -> tuple[Float[Tensor, " h"], Float[Tensor, " g"]]:
    """Factors of q and k whose products are `factor`: a key head takes the root of its smallest."""
    key = factor.reshape(kv_heads, -1).amin(1).sqrt()
    return factor / key.repeat_interleave(len(factor) // kv_heads), key


def scale_heads(projection: nn.Linear, factor: Float[Tensor, " n"]) -> None:
    """Multiply the output of each of n heads, one after another, by its factor, in place."""
    rows = factor.repeat_interleave(projection.out_features // len(factor))
    projection.weight.mul_(rows[:, None])
    if projection.bias is not None:
        projection.bias.mul_(rows)


def gate_projection(spec: ScoreSpec, dim: int, heads: int, size: int) -> nn.Linear | None:
    """W_g of a score with a gate, from the layer's width to its logits; None for other scores."""
    if spec.gate is None:
        return None
    return nn.Linear(dim, spec.gate.logits(heads, size), bias=False)


def finish(
    score: Score,
    o: Float[Tensor, "b h t e"],
    v: Float[Tensor, "b g s e"],
    at: Positions | None,
    gate: Float[Tensor, "b t gates"] | None,
) -> Float[Tensor, "b outputs t out"]:
    """The output from o: pairs joined, rotated back, the own value removed, gated.

    The queries are the last tokens of v. `at` has their positions, for a score that turns.
    """
    spec = score.spec
    o = join_pairs(score, o)
    if at is not None:
        # Of regular positions the queries are the last ones.
        first = max(0, at.key.shape[-1] - at.query.shape[-1]) if at.regular else None
        o = turn_values(spec, o, at.query, first, back=True)
    if isinstance(spec.values, XSA):
        own = v[:, :, v.shape[2] - o.shape[2] :]
        o = spec.values.without(o, own.repeat_interleave(o.shape[1] // own.shape[1], 1))
    return apply_gate(spec, o, gate)


def turn_values(
    spec: ScoreSpec,
    v: Float[Tensor, "b g s e"],
    positions: Int[Tensor, "*bp s"],
    first: int | None = None,
    back: bool = False,
) -> Float[Tensor, "b g s e"]:
    """R_p v at these positions for a score with `VORoPE`, or R_pᵀ v; v itself for others.

    Positions count from `first` on where it is given.
    """
    if spec.value_rope is None:
        return v
    turn = key_tables(spec.value_rope, v.shape[-1], positions, v.dtype, first).near
    assert isinstance(turn, Rotation)
    turned: Tensor = (replace(turn, sin=-turn.sin) if back else turn)(v)
    return turned


def apply_gate(
    spec: ScoreSpec, o: Float[Tensor, "b h t e"], gate: Float[Tensor, "b t gates"] | None
) -> Float[Tensor, "b outputs t e"]:
    """What a gate makes of o by the logits of its outputs, one after another; o itself without."""
    if spec.gate is None or gate is None:
        return o
    outputs = spec.gate.outputs(o.shape[1])
    logits = gate.reshape(*gate.shape[:2], outputs, -1).transpose(1, 2)
    return spec.gate.gated(o, logits)


def forget_projection(spec: ScoreSpec, dim: int, heads: int) -> nn.Linear | None:
    """w and c of a score with `FoX`, from the layer's width to H; None for other scores."""
    return nn.Linear(dim, heads) if spec.forgets else None


def log_gates(
    forget: Float[Tensor, "b s h"],
    groups: int,
    dtype: torch.dtype,
    padding: Bool[Tensor, "b s"] | None = None,
) -> Float[Tensor, "b g s f"]:
    """ln σ(f) of the heads that share a key head, in parts that `dtype` holds without loss.

    Padding forgets nothing.
    """
    wide = at_least_float32(dtype)
    gates = F.logsigmoid(forget.to(wide))
    gates = gates if padding is None else gates.masked_fill(padding[..., None], 0.0)
    gates = gates.reshape(*forget.shape[:2], groups, -1).transpose(1, 2)
    return _parts(gates, dtype)


def sum_gates(gates: Float[Tensor, "b g s f"], heads: int) -> Float[Tensor, "b h s"]:
    """C of every head, of the `log_gates` of all tokens from the first on."""
    wide = at_least_float32(gates.dtype)
    whole = gates.to(wide).reshape(*gates.shape[:3], heads // gates.shape[1], -1).sum(-1)
    sums: Tensor = whole.cumsum(2).transpose(2, 3).flatten(1, 2)
    return sums


def add_forgetting(
    inputs: AttentionInputs, sums: Float[Tensor, "b h s"] | None, rows: slice, queries: int
) -> AttentionInputs:
    """The inputs of some of the last `queries` tokens with C among their features, near and far.

    `sums` holds C of all tokens; without it the inputs are as they were.
    """
    if sums is None:
        return inputs
    query = sums[:, :, sums.shape[2] - queries :][:, :, rows]
    key = sums[:, :, : inputs.v.shape[2]]
    q_more, k_more = _features(inputs.q, inputs.k.shape[1], query, key)
    near = k_more[:, :, inputs.near_start :]
    q, k = torch.cat((inputs.q, q_more), -1), torch.cat((inputs.k, near), -1)
    if inputs.far_q is None or inputs.far_k is None:
        return replace(inputs, q=q, k=k)
    far_q, far_k = torch.cat((inputs.far_q, q_more), -1), torch.cat((inputs.far_k, k_more), -1)
    return replace(inputs, q=q, k=k, far_q=far_q, far_k=far_k)


def _parts(x: Float[Tensor, "b g s r"], dtype: torch.dtype) -> Float[Tensor, "b g s f"]:
    """x as features of `dtype`: itself, or three whose sum it is."""
    if x.dtype == dtype:
        return x
    first = x.to(dtype)
    second = (x - first).to(dtype)
    third = (x - first - second).to(dtype)
    return torch.stack((first, second, third), -1).flatten(-2)


def _features(
    q: Float[Tensor, "b h t d"],
    groups: int,
    query: Float[Tensor, "b h t"],
    key: Float[Tensor, "b h s"],
) -> tuple[Float[Tensor, "b h t f"], Float[Tensor, "b g s f"]]:
    """(C_i, 1 at the head's own) and (1, −C_j of each head that shares the key)."""
    shared = q.shape[1] // groups
    own = _parts(query[..., None], q.dtype)
    count = own.shape[-1]
    eye = torch.eye(shared, dtype=q.dtype, device=q.device).repeat_interleave(count, 1)
    chosen = eye.repeat(groups, 1)[None, :, None].expand(*q.shape[:3], -1)
    sums = _parts(-key.reshape(-1, groups, shared, key.shape[-1]).transpose(2, 3), q.dtype)
    ones = sums.new_ones(*sums.shape[:3], count)
    return torch.cat((own, chosen), -1), torch.cat((ones, sums), -1)


def pair_values(
    spec: ScoreSpec, v: Float[Tensor, "b g s d"], head_dim: int
) -> Float[Tensor, "b g s e"]:
    """The values of each head and its partner side by side, E = 2·D; v itself without pairs."""
    if spec.difference is None:
        return v
    if v.shape[-1] != head_dim:
        raise InputError(
            f"{spec.name} normalises the values of two heads together, so their size must be "
            f"that of the keys, {head_dim}, but it is {v.shape[-1]}"
        )
    batch, heads, keys, size = v.shape
    both = v.reshape(batch, heads // 2, 2, keys, size).transpose(2, 3).flatten(3)
    return both.repeat_interleave(2, 1)


def join_pairs(score: Score, o: Float[Tensor, "b h t e"]) -> Float[Tensor, "b h t d"]:
    """What each pair makes of the outputs of its heads, in two halves, as heads; else o itself."""
    part = score.spec.difference
    if part is None or score.difference is None:
        return o
    key_pairs, repeat = score.kv_heads // 2, score.heads // score.kv_heads
    pairs = o.reshape(o.shape[0], key_pairs, 2, repeat, *o.shape[2:])
    first, second = (pairs[:, :, side].flatten(1, 2) for side in (0, 1))
    joined = part.joined(first, second, dict(score.difference.items()))
    halves = joined.reshape(o.shape[0], key_pairs, repeat, *o.shape[2:]).chunk(2, -1)
    return torch.stack(halves, 2).flatten(1, 3)
