"""Cross-attention: queries of one sequence, keys and values of another, with any score."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

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
from normattn.layers.gates import shrink_heads
from normattn.layers.plan import build_plan
from normattn.layers.residual_scores import ResidualLayer
from normattn.score import Score, ScoreSpec
from normattn.score.spec import as_spec


class Memory(NamedTuple):
    """Keys and values of a source, for the queries of one layer.

    `keys` are normalised and rotated by the layer's score; `raw` keys are only projected.
    `positions` are None where the score has none.
    """

    keys: Float[Tensor, "b g s d"]
    raw: Float[Tensor, "b g s d"]
    values: Float[Tensor, "b g s d"]
    padding: Bool[Tensor, "b s"] | None
    positions: Int[Tensor, "*bk s"] | None

    def choose(self, rows: Int[Tensor, " r"]) -> Memory:
        """Source i becomes the old source rows[i]; sources may repeat or be left out."""
        # A tensor with one axis belongs to all sources.
        return Memory._make(x[rows] if x is not None and x.dim() > 1 else x for x in self)


class CrossAttention(nn.Module):
    """softmax(s(q, k)) v with q = x W_q and k, v = m W_kv of a source m.

    Shapes: x (B, T, dim), m (B, S, dim) → (B, T, dim). `remember` computes keys and values of a
    source once, for any number of calls of `forward`. Every query sees every source token except
    padding, so n of log-n scaling is the unpadded length of the source. With rotary positions, a
    bias or a window, `score` needs the positions of both sequences. The weight of `kv` holds the
    rows of k, then v, each head by head; other arguments are as for `Attention`. Raises
    `InputError` also for scores that are defined within one sequence only.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int | None = None,
        score: ScoreSpec | str = "Baseline-NoPE",
        *,
        head_dim: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.dim, self.heads = dim, heads
        self.kv_heads = heads if kv_heads is None else kv_heads
        self.head_dim = checked_head_dim(dim, heads, head_dim)
        self.dropout = checked_probability(dropout)
        spec = as_spec(score)
        refuse_across(spec)
        self.score = Score(spec, heads=heads, head_dim=self.head_dim, kv_heads=self.kv_heads)
        self.q = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.kv = nn.Linear(dim, 2 * self.kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(heads * self.head_dim, dim, bias=False)

    def remember(
        self,
        source: Float[Tensor, "b s dim"],
        padding: Bool[Tensor, "b s"] | None = None,
        positions: Int[Tensor, "*bk s"] | None = None,
    ) -> Memory:
        """Compute keys and values of a source; `padding` is True where a token is padding.

        `positions` (S,) or (B, S) are required where the score has positions, else ignored.
        """
        check_input("source", source, self.dim)
        check_tensor("padding", padding, "boolean", tuple(source.shape[:2]))
        kv = self.kv(source).unflatten(-1, (2 * self.kv_heads, self.head_dim)).transpose(1, 2)
        k, v = kv[:, : self.kv_heads], kv[:, self.kv_heads :]
        positions = _checked_positions(positions, self.score.spec, *source.shape[:2])
        counted = torch.arange(k.shape[2], device=k.device) if positions is None else positions
        keys = self.score.cache_keys(k, counted, padding=padding)
        return Memory(keys, k, v, padding, positions)

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
        """Attend from every position of `x` to its source; arguments are as in `attention`.

        Each source serves r consecutive rows of `x` (the beams of a search), which share statistics
        over queries (BatchNorm, InstanceNorm). `positions` (T,) or (B·r, T) are those of `x`.
        """
        check_input("x", x, self.dim)
        if not isinstance(memory, Memory):
            raise InputError(f"memory is what remember returns, not a {type(memory).__name__}")
        spec, rows, sources = self.score.spec, x.shape[0], memory.keys.shape[0]
        check_residual(spec, residual)
        if sources == 0 or rows % sources:
            raise InputError(f"{rows} rows cannot be shared evenly by {sources} sources")
        check_tensor("query_padding", query_padding, "boolean", tuple(x.shape[:2]))
        if query_padding is not None:
            query_padding = query_padding.reshape(sources, -1)
        q = self.q(x).reshape(sources, -1, self.heads, self.head_dim).transpose(1, 2)
        positions = _checked_positions(positions, spec, *x.shape[:2])
        if positions is not None:
            own = positions.dim() == 2
            positions = positions.reshape(sources, -1) if own else positions.repeat(rows // sources)
        args = AttentionArguments(
            *(False, backend, None, memory.padding, query_padding, positions, memory.positions),
            dropout_p=self.dropout if self.training else 0.0,
            residual=residual,
        )
        plan = build_plan(spec, q, memory.keys.shape[2], args, cached=True)
        padding, attended = (query_padding, memory.padding), plan.positions
        announce_layer(self.score, q, memory.raw, padding, (attended.query, attended.key))
        kernel = partial(attend, backend=backend)
        o = plan.attend(self.score, q, memory.keys, memory.values, args, kernel)
        y: Tensor = self.out(o.transpose(1, 2).reshape(*x.shape[:2], self.out.in_features))
        return y

    def shrink(self, factor: Float[Tensor, " h"]) -> None:
        """Multiply the logits of each query head by its factor, through the weights of q and k."""
        shrink_heads(factor, self.kv_heads, self.q, self.kv)

    def extra_repr(self) -> str:
        """Name the settings in the printed module."""
        return f"heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}"


def refuse_across(spec: ScoreSpec) -> None:
    """Raise `InputError` for a score that is defined within one sequence only."""
    pairs_or_gate = spec.gate is not None or spec.difference is not None
    if spec.needs_causal or pairs_or_gate or spec.values is not None or spec.documents is not None:
        raise InputError(
            f"{spec.name} is defined within one sequence: cross attention has no causality, "
            "documents, gates, pairs of heads or changed values"
        )


def _checked_positions(
    positions: Tensor | None, spec: ScoreSpec, rows: int, tokens: int
) -> Int[Tensor, "*br t"] | None:
    """Checked positions, (1, T) as (T,); None for a score without positions."""
    limited = spec.window[0] is not None or spec.chunk is not None
    if not (spec.position.rotary or spec.bias is not None or limited):
        return None
    if positions is None:
        raise InputError(
            f"{spec.name} has positions, which two sequences do not share: give positions=…, or "
            "add NoPE to the score"
        )
    check_positions("positions", positions, rows, tokens)
    return positions[0] if positions.dim() == 2 and len(positions) == 1 else positions
