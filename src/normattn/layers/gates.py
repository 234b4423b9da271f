"""What attention layers do around a kernel: gates, pairs of heads, changes to values.

FoX: the bias of a forget gate, b(i, j) = C_i − C_j with C_j = Σ_{l≤j} ln σ(f_l), is a product of
two features of the query, C_i and 1, with two of the key, 1 and −C_j. In half precision three
features represent each C: the second and third hold what rounding lost. Sums are in float32.

Differential attention pairs key heads 2·g and 2·g + 1, and in order the query heads that read them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from normattn.errors import InputError
from normattn.kernels import AttentionInputs
from normattn.kernels.numerics import at_least_float32
from normattn.score import Positions, Score, ScoreSpec
from normattn.score.parts import XSA
from normattn.score.rotary import Rotation, key_tables


def gate_projections(
    spec: ScoreSpec, dim: int, heads: int, size: int
) -> tuple[nn.Linear | None, nn.Linear | None]:
    """The projections to the logits of a score's gate and to the forget gates of `FoX`, if any."""
    gate = None
    if spec.gate is not None:
        gate = nn.Linear(dim, spec.gate.logits(heads, size), bias=False)
    return gate, nn.Linear(dim, heads) if spec.forgets else None


@torch.no_grad()
def shrink_heads(factor: Float[Tensor, " h"], kv_heads: int, *projections: nn.Linear) -> None:
    """Multiply the logits of each query head by its factor, through the rows of q and k.

    `projections` have the rows of q, k and v, head by head, in this order. A key head takes the
    root of the smallest factor of its query heads, and these take the rest.
    """
    key = factor.reshape(kv_heads, -1).amin(1).sqrt()
    query = factor / key.repeat_interleave(len(factor) // kv_heads)
    heads = torch.cat((query, key, torch.ones_like(key)))
    widths = [projection.out_features for projection in projections]
    rows = torch.split(heads.repeat_interleave(sum(widths) // len(heads)), widths)
    for projection, scale in zip(projections, rows, strict=True):
        projection.weight.mul_(scale[:, None])
        if projection.bias is not None:
            projection.bias.mul_(scale)


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
    pairs = torch.unflatten(v, 1, (-1, 2)).transpose(2, 3).flatten(3)
    return pairs.repeat_interleave(2, 1)


def rotate_values(
    spec: ScoreSpec,
    v: Float[Tensor, "b g s e"],
    positions: Int[Tensor, "*bp s"],
    start: int | None,
    inverse: bool = False,
) -> Float[Tensor, "b g s e"]:
    """R_p v for a score with `VORoPE`, or R_pᵀ v (`inverse`); v itself for other scores.

    `start`, if not None: positions are start, start + 1, …
    """
    if spec.value_rope is None:
        return v
    rotation = key_tables(spec.value_rope, v.shape[-1], positions, v.dtype, start).near
    assert isinstance(rotation, Rotation)
    rotation = replace(rotation, sin=-rotation.sin) if inverse else rotation
    rotated: Tensor = rotation(v)
    return rotated


def finish_output(
    score: Score,
    o: Float[Tensor, "b h t e"],
    v: Float[Tensor, "b g s e"],
    positions: Positions | None,
    gate: Float[Tensor, "b t gates"] | None,
) -> Float[Tensor, "b outputs t out"]:
    """Combine pairs of heads, rotate o back (VORoPE), remove each token's own value (XSA), gate.

    The queries are the last T tokens of v. Only VORoPE needs `positions`.
    """
    spec = score.spec
    if spec.difference is not None and score.difference is not None:
        key_pairs, repeat = score.kv_heads // 2, score.heads // score.kv_heads
        pairs = torch.unflatten(o, 1, (key_pairs, 2, repeat))
        first, second = (x.flatten(1, 2) for x in pairs.unbind(2))
        joined = spec.difference.joined(first, second, dict(score.difference.items()))
        halves = torch.unflatten(joined, 1, (key_pairs, repeat)).chunk(2, -1)
        o = torch.stack(halves, 2).flatten(1, 3)
    if positions is not None:
        num_queries, num_keys = positions.query.shape[-1], positions.key.shape[-1]
        start = max(0, num_keys - num_queries) if positions.regular else None
        o = rotate_values(spec, o, positions.query, start, inverse=True)
    if isinstance(spec.values, XSA):
        own_values = v[:, :, v.shape[2] - o.shape[2] :]
        o = spec.values.without(o, own_values.repeat_interleave(o.shape[1] // v.shape[1], 1))
    return apply_gate(spec, o, gate)


def apply_gate(
    spec: ScoreSpec, o: Float[Tensor, "b h t e"], gate: Float[Tensor, "b t gates"] | None
) -> Float[Tensor, "b outputs t e"]:
    """Gate o by the logits of its outputs; return o itself without a gate."""
    if spec.gate is None or gate is None:
        return o
    logits = torch.unflatten(gate, -1, (spec.gate.outputs(o.shape[1]), -1)).transpose(1, 2)
    return spec.gate.gated(o, logits)


def log_gates(
    forget: Float[Tensor, "b s h"], groups: int, dtype: torch.dtype, padding: Tensor | None = None
) -> Float[Tensor, "b g s f"]:
    """ln σ(f) of the heads that share a key head, as lossless features of `dtype`; 0 at padding."""
    gates = F.logsigmoid(forget.to(at_least_float32(dtype)))
    gates = gates if padding is None else gates.masked_fill(padding[..., None], 0.0)
    return _split_precision(torch.unflatten(gates, -1, (groups, -1)).transpose(1, 2), dtype)


def sum_gates(gates: Float[Tensor, "b g s f"], heads: int) -> Float[Tensor, "b h s"]:
    """C of every head, from the `log_gates` of all tokens."""
    gates = gates.to(at_least_float32(gates.dtype))
    by_head = torch.unflatten(gates, -1, (heads // gates.shape[1], -1)).sum(-1)
    sums: Tensor = by_head.cumsum(2).transpose(2, 3).flatten(1, 2)
    return sums


def add_forgetting(
    inputs: AttentionInputs, sums: Float[Tensor, "b h s"], rows: slice, num_queries: int
) -> AttentionInputs:
    """Append the features of C to the queries and keys, near and far.

    They are (C_i, one-hot of the head in its group) and (1, −C_j of each head of the group). `sums`
    holds C of all tokens, and `rows` are some of the last `num_queries`.
    """
    q, groups = inputs.q, inputs.k.shape[1]
    shared = q.shape[1] // groups
    c_i = sums[:, :, sums.shape[2] - num_queries :][:, :, rows, None]
    c_i = _split_precision(c_i, q.dtype)
    count = c_i.shape[-1]
    eye = torch.eye(shared, dtype=q.dtype, device=q.device).repeat_interleave(count, 1)
    one_hot = eye.repeat(groups, 1)[None, :, None].expand(*q.shape[:3], -1)
    key_sums = sums[:, :, : inputs.v.shape[2]]
    c_j = torch.unflatten(key_sums, 1, (groups, shared)).transpose(2, 3)
    c_j = _split_precision(-c_j, q.dtype)
    q_features = torch.cat((c_i, one_hot), -1)
    k_features = torch.cat((c_j.new_ones(*c_j.shape[:3], count), c_j), -1)
    q = torch.cat((q, q_features), -1)
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
