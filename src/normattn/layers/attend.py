"""`attention`: queries, keys, values and a score specification to outputs.

Legend: B batch, H query heads, G key heads, T queries, S keys, D head dimension, E value size.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from normattn.errors import InputError
from normattn.kernels import Problem, Visibility, attend
from normattn.kernels.problem import check_shapes
from normattn.score import Positions, Score, ScoreSpec


def attention(
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b g s d"],
    v: Float[Tensor, "b g s e"],
    score: Score | ScoreSpec | str,
    causal: bool = True,
    attn_mask: Tensor | None = None,
    key_padding: Bool[Tensor, "b s"] | None = None,
    q_positions: Int[Tensor, "*bq t"] | None = None,
    k_positions: Int[Tensor, "*bk s"] | None = None,
    dropout_p: float = 0.0,
    backend: str = "auto",
) -> Float[Tensor, "b h t e"]:
    """o_i = Σ_j softmax_j(s(i, j)) v_j with the score that `score` specifies.

    Args:
        q: queries (B, H, T, D), not yet normalised, scaled or rotated.
        k: keys (B, G, S, D); G divides H.
        v: values (B, G, S, E).
        score: a `Score` (which holds what is learned), or a specification that learns nothing.
        causal: a query sees keys at its own position or before; the queries are the last T of
            the keys unless positions say otherwise.
        attn_mask: broadcastable to (B, H, T, S); boolean (True = seen) or floating (added).
        key_padding: True where a key is padding; positions then count from the first real token.
        q_positions: 0-based positions (T,) or (B, T).
        k_positions: 0-based positions (S,) or (B, S).
        dropout_p: probability of dropping an attention weight.
        backend: auto, fused, chunked or reference (float64-capable, the definition).

    A query that sees no key gets 0. Raises `InputError` for shapes that do not fit, scores that
    cannot be used so, and backends that cannot serve the request.
    """
    check_shapes(q, k, v)
    module = score if isinstance(score, Score) else _without_parameters(score, q, k)
    _check(module, q, k, attn_mask, key_padding, dropout_p)
    _check_positions("q_positions", q_positions, q)
    _check_positions("k_positions", k_positions, k)
    if causal and q_positions is None and key_padding is None and k_positions is None:
        positions = _regular(q.shape[2], k.shape[2], q.device, causal=True)
    else:
        positions = Positions.of(
            q.shape[2], k.shape[2], causal, q.device, key_padding, q_positions, k_positions
        )
    prepared = module(q, k, positions, key_padding)
    visibility = Visibility(
        causal, positions.query, positions.key, positions.regular, key_padding, attn_mask
    )
    far = prepared.far
    problem = Problem(
        prepared.q,
        prepared.k,
        v,
        visibility,
        None if far is None else far.q,
        None if far is None else far.k,
        None if far is None else far.window,
        dropout_p,
    )
    return attend(problem, backend)


@lru_cache(maxsize=64)
def _regular(queries: int, keys: int, device: torch.device, causal: bool) -> Positions:
    with torch.inference_mode(False):
        return Positions.of(queries, keys, causal, device)


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


def _without_parameters(score: ScoreSpec | str, q: Tensor, k: Tensor) -> Score:
    spec = ScoreSpec.parse(score) if isinstance(score, str) else score
    return _built(spec, q.shape[1], q.shape[-1], k.shape[1])


def _check(
    score: Score,
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    padding: Tensor | None,
    dropout: float,
) -> None:
    expected = (score.heads, score.kv_heads, score.head_dim)
    if (q.shape[1], k.shape[1], q.shape[-1]) != expected:
        raise InputError(
            f"the score was built for {expected[0]} query heads, {expected[1]} key heads and "
            f"dimension {expected[2]}, but q is {tuple(q.shape)} and k is {tuple(k.shape)}"
        )
    if padding is not None and (
        padding.shape != (k.shape[0], k.shape[2]) or padding.dtype != torch.bool
    ):
        raise InputError(
            f"key_padding must be boolean (batch, keys) = {(k.shape[0], k.shape[2])}, True where a "
            f"key is padding, but it is {padding.dtype} of {tuple(padding.shape)}"
        )
    if mask is not None:
        full = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        try:
            fits = mask.dim() >= 2 and mask.expand(full).shape == full
        except RuntimeError:
            fits = False
        if not fits or not (mask.dtype == torch.bool or mask.is_floating_point()):
            raise InputError(
                f"attn_mask must be boolean or floating and broadcast to {full}, but it is "
                f"{mask.dtype} of {tuple(mask.shape)}"
            )
    if not 0 <= dropout < 1:
        raise InputError(f"dropout_p must be at least 0 and below 1, but it is {dropout}")


def _check_positions(name: str, positions: Tensor | None, x: Tensor) -> None:
    if positions is None:
        return
    batch, tokens = x.shape[0], x.shape[2]
    shapes = ((tokens,), (1, tokens), (batch, tokens))
    # Differences are taken: an unsigned type would wrap around and show the future.
    if tuple(positions.shape) not in shapes or positions.dtype not in (torch.int32, torch.int64):
        raise InputError(
            f"{name} must be int64 or int32 of shape {(tokens,)} or {(batch, tokens)}, but it is "
            f"{positions.dtype} of {tuple(positions.shape)}"
        )
