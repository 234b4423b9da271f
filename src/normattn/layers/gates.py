"""What attention layers do around a kernel: gates, pairs of heads, changes to values.

FoX: the bias of a forget gate, b(i, j) = C_i − C_j with C_j = Σ_{l≤j} ln σ(f_l), is a product of
two features of the query, C_i and 1, with two of the key, 1 and −C_j. In half precision three
features represent each C: the second and third hold what rounding lost. Sums are in float32.

Differential attention pairs key heads 2·g and 2·g + 1, and in order the query heads that read them.

Legend: B batch, H query heads, G key heads, r = H/G, T queries, S keys, D head dimension, E value
size, F additional features.
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
    """Split `factor` of logits into factors of q and k; a key head takes √ of its smallest one."""
    key = factor.reshape(kv_heads, -1).amin(1).sqrt()
    return factor / key.repeat_interleave(len(factor) // kv_heads), key


def scale_heads(projection: nn.Linear, factor: Float[Tensor, " n"]) -> None:
    """Multiply the output of each of a projection's n heads by its factor, in place."""
    rows = factor.repeat_interleave(projection.out_features // len(factor))
    projection.weight.mul_(rows[:, None])
    if projection.bias is not None:
        projection.bias.mul_(rows)


def gate_projection(spec: ScoreSpec, dim: int, heads: int, size: int) -> nn.Linear | None:
    """The projection W_g to the gate of a score; None without a gate."""
    return None if spec.gate is None else nn.Linear(dim, spec.gate.logits(heads, size), bias=False)


def finish_output(
    score: Score,
    o: Float[Tensor, "b h t e"],
    v: Float[Tensor, "b g s e"],
    positions: Positions | None,
    gate: Float[Tensor, "b t gates"] | None,
) -> Float[Tensor, "b outputs t out"]:
    """Join pairs of heads, rotate o back (VORoPE), remove each token's own value (XSA), and gate.

    The queries are the last tokens of v. `positions` are needed for VORoPE only.
    """
    spec = score.spec
    o = join_pairs(score, o)
    if positions is not None:
        num_queries, num_keys = positions.query.shape[-1], positions.key.shape[-1]
        start = max(0, num_keys - num_queries) if positions.regular else None
        o = rotate_values(spec, o, positions.query, start, inverse=True)
    if isinstance(spec.values, XSA):
        query_values = v[:, :, v.shape[2] - o.shape[2] :]
        repeats = o.shape[1] // v.shape[1]
        o = spec.values.without(o, query_values.repeat_interleave(repeats, 1))
    return apply_gate(spec, o, gate)


def rotate_values(
    spec: ScoreSpec,
    v: Float[Tensor, "b g s e"],
    positions: Int[Tensor, "*bp s"],
    start: int | None = None,
    inverse: bool = False,
) -> Float[Tensor, "b g s e"]:
    """R_p v for a score with `VORoPE`, or R_pᵀ v (`inverse`); v itself for other scores.

    `start`: positions are start, start + 1, …
    """
    if spec.value_rope is None:
        return v
    rotation = key_tables(spec.value_rope, v.shape[-1], positions, v.dtype, start).near
    assert isinstance(rotation, Rotation)
    rotation = replace(rotation, sin=-rotation.sin) if inverse else rotation
    rotated: Tensor = rotation(v)
    return rotated


def apply_gate(
    spec: ScoreSpec, o: Float[Tensor, "b h t e"], gate: Float[Tensor, "b t gates"] | None
) -> Float[Tensor, "b outputs t e"]:
    """Gate o by the logits of its outputs; return o itself without a gate."""
    if spec.gate is None or gate is None:
        return o
    outputs = spec.gate.outputs(o.shape[1])
    logits = gate.reshape(*gate.shape[:2], outputs, -1).transpose(1, 2)
    return spec.gate.gated(o, logits)


def forget_projection(spec: ScoreSpec, dim: int, heads: int) -> nn.Linear | None:
    """The projection to the forget gates of `FoX`; None for other scores."""
    return nn.Linear(dim, heads) if spec.forgets else None


def log_gates(
    forget: Float[Tensor, "b s h"],
    groups: int,
    dtype: torch.dtype,
    padding: Bool[Tensor, "b s"] | None = None,
) -> Float[Tensor, "b g s f"]:
    """ln σ(f) of the heads that share a key head, as lossless features of `dtype`; 0 at padding."""
    gates = F.logsigmoid(forget.to(at_least_float32(dtype)))
    gates = gates if padding is None else gates.masked_fill(padding[..., None], 0.0)
    gates = gates.reshape(*forget.shape[:2], groups, -1).transpose(1, 2)
    return _split_precision(gates, dtype)


def sum_gates(gates: Float[Tensor, "b g s f"], heads: int) -> Float[Tensor, "b h s"]:
    """C of every head, from the `log_gates` of all tokens."""
    gates = gates.to(at_least_float32(gates.dtype))
    by_head = gates.reshape(*gates.shape[:3], heads // gates.shape[1], -1).sum(-1)
    sums: Tensor = by_head.cumsum(2).transpose(2, 3).flatten(1, 2)
    return sums


def add_forgetting(
    inputs: AttentionInputs, sums: Float[Tensor, "b h s"] | None, rows: slice, num_queries: int
) -> AttentionInputs:
    """Append the features of C to the queries and keys, near and far; `sums` None changes nothing.

    `sums` holds C of all tokens, and `rows` are some of the last `num_queries`.
    """
    if sums is None:
        return inputs
    query_sums = sums[:, :, sums.shape[2] - num_queries :][:, :, rows]
    key_sums = sums[:, :, : inputs.v.shape[2]]
    q_features, k_features = _forget_features(inputs.q, inputs.k.shape[1], query_sums, key_sums)
    q = torch.cat((inputs.q, q_features), -1)
    k = torch.cat((inputs.k, k_features[:, :, inputs.near_start :]), -1)
    if inputs.far_q is None or inputs.far_k is None:
        return replace(inputs, q=q, k=k)
    far_q = torch.cat((inputs.far_q, q_features), -1)
    far_k = torch.cat((inputs.far_k, k_features), -1)
    return replace(inputs, q=q, k=k, far_q=far_q, far_k=far_k)


def _split_precision(x: Float[Tensor, "b g s r"], dtype: torch.dtype) -> Float[Tensor, "b g s f"]:
    """x as features of `dtype`: x itself, or three that add up to it."""
    if x.dtype == dtype:
        return x
    first = x.to(dtype)
    second = (x - first).to(dtype)
    third = (x - first - second).to(dtype)
    return torch.stack((first, second, third), -1).flatten(-2)


def _forget_features(
    q: Float[Tensor, "b h t d"],
    groups: int,
    query_sums: Float[Tensor, "b h t"],
    key_sums: Float[Tensor, "b h s"],
) -> tuple[Float[Tensor, "b h t f"], Float[Tensor, "b g s f"]]:
    """(C_i, one-hot of the head in its group) and (1, −C_j of each head of the group)."""
    shared = q.shape[1] // groups
    query_sums = _split_precision(query_sums[..., None], q.dtype)
    count = query_sums.shape[-1]
    eye = torch.eye(shared, dtype=q.dtype, device=q.device).repeat_interleave(count, 1)
    one_hot = eye.repeat(groups, 1)[None, :, None].expand(*q.shape[:3], -1)
    key_sums = key_sums.reshape(-1, groups, shared, key_sums.shape[-1]).transpose(2, 3)
    key_sums = _split_precision(-key_sums, q.dtype)
    ones = key_sums.new_ones(*key_sums.shape[:3], count)
    return torch.cat((query_sums, one_hot), -1), torch.cat((ones, key_sums), -1)


def pair_values(
    spec: ScoreSpec, v: Float[Tensor, "b g s d"], head_dim: int
) -> Float[Tensor, "b g s e"]:
    """Concatenate the values of the two heads of each pair, E = 2·D; v itself without pairs."""
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
    """Combine the outputs of the two heads of each pair; o itself without pairs."""
    part = score.spec.difference
    if part is None or score.difference is None:
        return o
    key_pairs, repeat = score.kv_heads // 2, score.heads // score.kv_heads
    pairs = o.reshape(o.shape[0], key_pairs, 2, repeat, *o.shape[2:])
    first, second = (pairs[:, :, side].flatten(1, 2) for side in (0, 1))
    joined = part.joined(first, second, dict(score.difference.items()))
    halves = joined.reshape(o.shape[0], key_pairs, repeat, *o.shape[2:]).chunk(2, -1)
    return torch.stack(halves, 2).flatten(1, 3)
