"""Cross attention: queries of one sequence, keys and values of another, and any score.

Legend: B sources, r rows of queries for each, T queries, S source tokens, H query heads, G key
heads, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.kernels import attend
from normattn.kernels.stats import announce_layer
from normattn.layers.checks import (
    AttentionArguments,
    check_input,
    check_positions,
    check_residual,
    check_tensor,
    checked_head_dim,
    checked_probability,
)
from normattn.layers.gates import scale_heads, share_factor
from normattn.layers.plan import place
from normattn.layers.residual_scores import ResidualLayer
from normattn.score import Score, ScoreSpec
from normattn.score.spec import as_spec


@dataclass(frozen=True)
class Memory:
    """A source as one layer's queries read it: its keys normalised and rotated, and its values.

    `raw` are the keys as projected, `spec` the score that made `keys` of them. `positions` are None
    where the score has none.
    """

    keys: Float[Tensor, "b g s d"]
    raw: Float[Tensor, "b g s d"]
    values: Float[Tensor, "b g s d"]
    padding: Bool[Tensor, "b s"] | None
    positions: Int[Tensor, "*bk s"] | None
    spec: ScoreSpec

    def choose(self, rows: Int[Tensor, " r"]) -> Memory:
        """Source i becomes the old source rows[i]; sources may repeat or lack."""
        # What has one axis is of all sources.
        tensors: dict[str, Any] = {
            name: x[rows] for name, x in vars(self).items() if isinstance(x, Tensor) and x.dim() > 1
        }
        return replace(self, **tensors)


class CrossAttention(nn.Module):
    """softmax(s(q, k)) v with q = x W_q of the reader and k, v = m W_kv of the source m.

    Every query sees every real source token: n, which log-n scaling reads, is the unpadded length
    of the source. `remember` makes keys and values of a source once, `forward` reads them as often
    as wanted: x (B, T, dim), m (B, S, source_dim) → (B, T, dim). `score` is a `ScoreSpec` or its
    name; one with rotary positions, a bias or a window needs the positions of both sides.
    `source_dim` defaults to `dim`, `head_dim` to dim / heads; `dropout` is the probability with
    which an attention weight is dropped in training. The weight of `kv` holds the rows of k, then
    v, each head by head. Raises `InputError` for sizes that do not divide and for scores that are
    for causal attention or packed documents only. Source: arXiv 1706.03762.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int | None = None,
        score: ScoreSpec | str = "Baseline-NoPE",
        *,
        source_dim: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.dim, self.heads = dim, heads
        self.kv_heads = heads if kv_heads is None else kv_heads
        self.head_dim = checked_head_dim(dim, heads, self.kv_heads, head_dim)
        self.dropout = checked_probability(dropout)
        spec = as_spec(score)
        refuse_across(spec)
        self.score = Score(spec, heads=heads, head_dim=self.head_dim, kv_heads=self.kv_heads)
        self.q = nn.Linear(dim, heads * self.head_dim, bias=bias)
        source = dim if source_dim is None else source_dim
        self.kv = nn.Linear(source, 2 * self.kv_heads * self.head_dim, bias=bias)
        self.out = nn.Linear(heads * self.head_dim, dim, bias=bias)

    def remember(
        self,
        source: Float[Tensor, "b s source_dim"],
        padding: Bool[Tensor, "b s"] | None = None,
        positions: Int[Tensor, "*bk s"] | None = None,
    ) -> Memory:
        """Keys and values of a source; `padding` is True where a token is padding.

        `positions` (S,) or (B, S) are needed where the score has positions, and ignored where it
        has none.
        """
        check_input("source", source, self.kv.in_features)
        check_tensor("padding", padding, "boolean", tuple(source.shape[:2]))
        kv = self.kv(source).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        k, v = kv[:, : self.kv_heads], kv[:, self.kv_heads :]
        spec, places = self.score.spec, torch.arange(k.shape[2], device=k.device)
        positions = _checked_positions(positions, spec, *source.shape[:2])
        keys = self.score.cache_keys(k, places if positions is None else positions, padding=padding)
        return Memory(keys, k, v, padding, positions, spec)

    def forward(
        self,
        x: Float[Tensor, "br t dim"],
        memory: Memory,
        *,
        positions: Int[Tensor, "*bq t"] | None = None,
        query_padding: Bool[Tensor, "br t"] | None = None,
        residual: ResidualLayer | None = None,
        backend: str = "auto",
    ) -> Float[Tensor, "br t dim"]:
        """Every position of `x` attends to a source.

        There may be r rows of `x` for each source, one after another (the beams of a search): they
        read the same keys. `positions` (T,) or (B·r, T) are those of `x`, for a score that has
        any. `query_padding` matters to statistics over the queries only (BatchNorm, InstanceNorm),
        which the r rows of a source then share. `residual` and `backend` are as in `attention`.
        """
        spec, rows, sources = self.score.spec, x.shape[0], memory.keys.shape[0]
        check_input("x", x, self.dim)
        check_residual(spec, residual)
        if sources == 0 or rows % sources:
            raise InputError(f"{rows} rows cannot be shared evenly by {sources} sources")
        if memory.spec != spec:
            raise InputError(
                f"this memory holds keys of {memory.spec}, which {spec} cannot use: encode the "
                "source again after switching methods"
            )
        check_tensor("query_padding", query_padding, "boolean", tuple(x.shape[:2]))
        if query_padding is not None:
            query_padding = query_padding.reshape(sources, -1)
        q = self.q(x).reshape(sources, -1, self.heads, self.head_dim).transpose(1, 2)
        positions = _checked_positions(positions, spec, *x.shape[:2])
        if positions is not None:
            repeats = rows // sources
            one = positions.dim() == 1
            positions = positions.repeat(repeats) if one else positions.reshape(sources, -1)
        given = AttentionArguments(
            *(False, backend, None, memory.padding, query_padding, positions, memory.positions),
            dropout_p=self.dropout if self.training else 0.0,
            residual=residual,
        )
        plan = place(spec, q, memory.keys.shape[2], given, cached=True)
        at = plan.positions
        announce_layer(self.score, q, memory.raw, query_padding, memory.padding, at.query, at.key)
        kernel = partial(attend, backend=backend)
        o = plan.attend(self.score, q, memory.keys, memory.values, given, kernel)
        y: Tensor = self.out(o.transpose(1, 2).reshape(rows, x.shape[1], -1))
        return y

    @torch.no_grad()
    def shrink(self, factor: Float[Tensor, " h"]) -> None:
        """Multiply the logits q·k of each query head by its factor, by the weights of q and k."""
        query, key = share_factor(factor, self.kv_heads)
        scale_heads(self.q, query)
        scale_heads(self.kv, torch.cat((key, torch.ones_like(key))))

    def extra_repr(self) -> str:
        """Name the settings in the printed module."""
        return f"heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}"


def refuse_across(spec: ScoreSpec) -> None:
    """Raise `InputError` for a score that has no meaning between two sequences."""
    reasons = (
        (spec.needs_causal, "is defined for causal attention only, not between sequences"),
        (
            spec.values is not None,
            "takes a query's own value or position, which another sequence lacks",
        ),
        (spec.gate is not None, "gates its output, which cross attention does not"),
        (spec.difference is not None, "joins pairs of heads, which cross attention does not"),
        (spec.documents is not None, "keeps documents of one sequence apart, and here are two"),
    )
    for refused, why in reasons:
        if refused:
            raise InputError(f"{spec.name} {why}")


def _checked_positions(
    positions: Tensor | None, spec: ScoreSpec, rows: int, tokens: int
) -> Int[Tensor, "*br t"] | None:
    """The positions, those of one row for all as (T,); None for a score without positions."""
    visible = spec.window[0] is not None or spec.chunk is not None
    if not (spec.position.rotary or spec.bias is not None or visible):
        return None
    if positions is None:
        raise InputError(
            f"{spec.name} has positions, which two sequences do not share: give positions=…, or "
            "add NoPE to the score"
        )
    check_positions("positions", positions, rows, tokens)
    return positions[0] if positions.dim() == 2 and len(positions) == 1 else positions
