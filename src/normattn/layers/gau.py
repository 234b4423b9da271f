"""The gated attention unit: attention and feed-forward as one sub-layer with one head."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from normattn.errors import InputError, require_sizes
from normattn.layers.attention import Operands, SelfAttention
from normattn.layers.checks import checked_probability
from normattn.layers.gates import gate_projections
from normattn.score import Score, ScoreSpec
from normattn.score.spec import as_spec


class GatedAttentionUnit(SelfAttention):
    """Gated attention unit: out = (u ⊙ softmax(s(q, k)) v) W_out.

    [u, v, z] = swish(x W) in one matmul, u and v of width expansion · dim, z of width `key_size`;
    q = γ_q ⊙ z (+ β_q), k = γ_k ⊙ z (+ β_k); one head. Shapes: (B, T, dim) → (B, T, dim).

    The defaults are GAU-α. `offset=True` adds β_q and β_k, initially 0, `bias=True` the biases of
    the two matmuls. γ starts at 1: q = k, so a token first attends mostly to itself. (A model's
    `gamma_std` draws γ; the paper's deviation is 0.02.) `separate_qk=True` gives q and k their own
    linear projections, without swish, γ and β. The weight of `expand` holds the rows of u, v, z, or
    of u, v, q, k. `dropout` is the probability of dropping an attention weight in training. Raises
    `InputError` for a size below 1, and for `offset` with `separate_qk`. Source: arXiv 2202.10447;
    kexue 8934, 9052.
    """

    def __init__(
        self,
        dim: int,
        key_size: int = 128,
        expansion: int = 2,
        score: ScoreSpec | str = "Baseline",
        *,
        offset: bool = False,
        separate_qk: bool = False,
        bias: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        require_sizes("gated attention unit", dim=dim, key_size=key_size, expansion=expansion)
        if offset and separate_qk:
            raise InputError("offset adds β to a shared z, which does not exist with separate_qk")
        self.dim, self.key_size, self.value_size = dim, key_size, expansion * dim
        self.separate_qk = separate_qk
        self.dropout = checked_probability(dropout)
        spec = as_spec(score)
        self.score = Score(spec, heads=1, head_dim=key_size)
        self.expand = nn.Linear(dim, sum(self.widths), bias=bias)
        self.gate, self.forget = gate_projections(spec, dim, 1, self.value_size)
        self.out = nn.Linear(self.value_size, dim, bias=bias)
        # Row 0 makes the query, row 1 the key: one multiplication for both.
        self.gamma = None if separate_qk else nn.Parameter(torch.ones(2, key_size))
        self.beta = nn.Parameter(torch.zeros(2, key_size)) if offset else None

    @property
    def widths(self) -> list[int]:
        """The sizes of the outputs of `expand`: u, v, and z or q and k."""
        return [self.value_size, self.value_size, *[self.key_size] * (1 + self.separate_qk)]

    def operands(self, x: Float[Tensor, "b t dim"]) -> Operands:
        """Project x to q, k, v and u."""
        if self.separate_qk:
            u, v, q, k = torch.split(self.expand(x), self.widths, dim=-1)
            return q.unsqueeze(1), k.unsqueeze(1), F.silu(v).unsqueeze(1), F.silu(u)
        u, v, z = torch.split(F.silu(self.expand(x)), self.widths, dim=-1)
        assert self.gamma is not None
        gamma = self.gamma.to(z.dtype)
        q, k = z * gamma[0], z * gamma[1]
        if self.beta is not None:
            beta = self.beta.to(z.dtype)
            q, k = q + beta[0], k + beta[1]
        return q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), u

    def output(self, o: Float[Tensor, "b 1 t e"], u: Tensor | None) -> Float[Tensor, "b t dim"]:
        """(u ⊙ o) W_out."""
        assert u is not None
        y: Tensor = self.out(u * o.squeeze(1))
        return y

    @torch.no_grad()
    def shrink(self, factor: Float[Tensor, " 1"]) -> None:
        """Multiply the logits q·k by a factor, through γ and β or the projections of q and k."""
        if self.gamma is None:
            weights = [x for x in (self.expand.weight, self.expand.bias) if x is not None]
            scaled = [rows for x in weights for rows in torch.split(x, self.widths)[2:]]
        else:
            scaled = [x for x in (self.gamma, self.beta) if x is not None]
        for weight in scaled:
            weight.mul_(factor.sqrt())

    def extra_repr(self) -> str:
        """Name the settings in the printed module."""
        return f"key_size={self.key_size}, value_size={self.value_size}"
