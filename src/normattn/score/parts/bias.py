"""Biases: numbers added to a score, from the distance of a pair or the tokens between.

Legend: B batch, H query heads, T queries, S keys, R distances, D head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from normattn.errors import InputError
from normattn.kernels import AttentionMask
from normattn.kernels.inputs import PairBias, PairValues
from normattn.plain import transformed
from normattn.score.parts.base import QUARTER_LENGTH, Part, Parts, Slot, number, register

Learned = Mapping[str, Tensor]
Distances = Float[Tensor, " r"]
Biases = Float[Tensor, "h r"]
Queries = Float[Tensor, "b h t d"]
_ALL = slice(None)


@dataclass(frozen=True)
class BiasPart(Part):
    """A bias b(h, |i − j|) of head h, added to the score."""

    slot = Slot.BIAS

    def learned(self, heads: int, head_dim: int) -> dict[str, Tensor]:
        """The initial values of learned parameters, by name; empty by default."""
        return {}

    def values(self, distance: Distances, heads: int, learned: Learned) -> Biases:
        """b(h, r) for every head and distance."""
        raise InputError(f"{self.name} defines no values")


@dataclass(frozen=True)
class PairBiasPart(BiasPart):
    """A bias b(h, i, j) that depends on both positions; causal unless `needs_causal` is False.

    `reads_queries`: it is computed from λ(i)·N_q(q_i), before the rotation.
    """

    needs_causal = True
    reads_queries: ClassVar[bool] = False

    def conflict(self, parts: Parts) -> str | None:
        """Queries must be normalised before the rotation if they are read."""
        if self.reads_queries and Slot.ORDER in parts:
            why = f"{self.name} reads normalised queries that have no position yet"
            return self.refusal(parts[Slot.ORDER], why)
        return super().conflict(parts)

    def split_query(self, q: Queries, learned: Learned) -> tuple[Queries, Queries]:
        """The queries to multiply with keys, and those of the bias, before rotation and λ."""
        return q, q

    def pairs(self, learned: Learned, dtype: torch.dtype, query: Queries | None) -> PairBias:
        """The bias of all pairs, computed in `dtype`; `query` includes λ, None if not needed."""
        raise InputError(f"{self.name} defines no pairs")

    def pair_values(self) -> PairValues | None:
        """Vectors that are added to the values of pairs; None by default."""
        return None


def require_query(part: PairBiasPart, query: Queries | None) -> Queries:
    """The queries of a bias; `InputError` if they are missing."""
    if query is None:
        raise InputError(f"{part.name} needs the queries, of which its bias is made")
    return query


@register
class ALiBi(BiasPart):
    """A penalty that grows linearly with distance.

    If H is not a power of two, the slopes of the next lower power come first, then every second
    slope of twice that many heads, as in the paper's code.
    """

    equation = "b = −m_h·|i−j|, m_h = 2^(−8h/H), h = 1 … H"
    source = "arXiv 2108.12409"
    used_by = "BLOOM, MPT"

    def values(self, distance: Distances, heads: int, learned: Learned) -> Biases:
        """−m_h·r."""
        power = 1 << (heads.bit_length() - 1)
        first = [2.0 ** (-8 * h / power) for h in range(1, power + 1)]
        between = [2.0 ** (-8 * h / (2 * power)) for h in range(1, 2 * power + 1, 2)]
        return -distance.new_tensor(first + between[: heads - power])[:, None] * distance


@dataclass(frozen=True)
class KERPLE(BiasPart):
    """A penalty with p and a learned per head, from U(0, `initial_max`) as in the authors' code.

    Both are at least 0.01, and a is at most `max_a`. Values that an optimiser moves out of this
    range are clamped, with gradients that lead back.
    """

    source = "arXiv 2205.09921"
    initial_max: ClassVar[Mapping[str, float]]
    max_a: ClassVar[float] = math.inf

    def learned(self, heads: int, head_dim: int) -> dict[str, Float[Tensor, "h"]]:
        """p and a, drawn from torch's global generator."""
        return {name: (x * torch.rand(heads)).clamp(0.01) for name, x in self.initial_max.items()}

    def clamped(self, learned: Learned, distance: Distances) -> tuple[Tensor, Tensor]:
        """p and a (H, 1), clamped to their ranges, in the dtype of the distances."""
        p, a = (learned[name].to(distance.dtype)[:, None] for name in ("p", "a"))
        return _clamp(p, 0.01, math.inf), _clamp(a, 0.01, self.max_a)


class _Clamp(torch.autograd.Function):
    """A clamp that also passes gradients that lead back into the range."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: float, high: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.low, ctx.high = low, high
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        # A step moves against the gradient.
        passes = ((x >= ctx.low) | (grad < 0)) & ((x <= ctx.high) | (grad > 0))
        return torch.where(passes, grad, 0.0), None, None


def _clamp(x: Tensor, low: float, high: float) -> Tensor:
    # torch.func and forward mode do not support autograd functions.
    if transformed() or not torch.is_grad_enabled():
        return x.clamp(low, high)
    y: Tensor = _Clamp.apply(x, low, high)  # type: ignore[no-untyped-call]
    return y


@register
class KERPLELog(KERPLE):
    """A learned penalty that grows with the logarithm of distance."""

    equation = "b = −p_h·ln(1 + a_h·|i−j|)"
    initial_max: ClassVar[Mapping[str, float]] = {"p": 2.0, "a": 1.0}

    def values(self, distance: Distances, heads: int, learned: Learned) -> Biases:
        """−p_h·ln(1 + a_h·r)."""
        p, a = self.clamped(learned, distance)
        return -p * torch.log1p(a * distance)


@register
class KERPLEPower(KERPLE):
    """A learned penalty that grows with a power of distance, at most the square."""

    equation = "b = −p_h·|i−j|^(a_h)"
    initial_max: ClassVar[Mapping[str, float]] = {"p": 1.0, "a": 2.0}
    max_a = 2.0

    def values(self, distance: Distances, heads: int, learned: Learned) -> Biases:
        """−p_h·r^(a_h)."""
        p, a = self.clamped(learned, distance)
        # At distance 0 the second derivative by a would be 0·∞.
        return -p * torch.where(distance > 0, distance.clamp(min=1) ** a, 0.0)


@register
class T5Bias(BiasPart):
    """A learned number for each bucket of distances, wider far away.

    With B buckets the first ⌊B/2⌋ are the distances 0, 1, 2, …; the others grow with the logarithm
    of the distance up to `max_distance`, and all larger distances share the last one. These are the
    buckets of T5's decoder. Here every layer learns its own β, drawn from a normal of deviation
    (H·D)^−½; T5's layers share one.
    """

    equation = "b = β[h, bucket(i−j)]"
    source = "arXiv 1910.10683; transformers, modeling_t5.py"
    used_by = "T5, mT5, UL2"
    needs_causal = True
    buckets: int = number(default=32, least=2)
    max_distance: int = number(default=128, least=2)

    def __post_init__(self) -> None:
        super().__post_init__()
        beyond = self.max_distance > self.buckets // 2
        self.require(beyond, "max_distance", f"above {self.buckets // 2}, half of the buckets")

    def learned(self, heads: int, head_dim: int) -> dict[str, Float[Tensor, "h buckets"]]:
        """β, drawn from torch's global generator."""
        return {"table": torch.randn(heads, self.buckets) * (heads * head_dim) ** -0.5}

    def values(self, distance: Distances, heads: int, learned: Learned) -> Biases:
        """β of every head and distance."""
        return learned["table"].to(distance.dtype)[:, self.bucket(distance)]

    def bucket(self, distance: Distances) -> Int[Tensor, " r"]:
        """The bucket of each distance, computed in float32 as in T5."""
        exact, r = self.buckets // 2, distance.float()
        share = torch.log(r.clamp(min=exact) / exact) / math.log(self.max_distance / exact)
        far = (exact + (share * (self.buckets - exact)).floor()).clamp(max=self.buckets - 1)
        return torch.where(r < exact, r, far).long()


@register
class FIRE(PairBiasPart):
    """A learned function of the distance as a share of the position.

    f is a network of one hidden layer, with `width` ReLUs and an output for each head. |c| and |μ|
    are learned and start at 0.1 and 1. Up to position μ·T, ψ(i − j) is divided by ψ(μ·T), past it
    by ψ(i), so no share exceeds 1. `threshold` T defaults to L // 4; the paper has T = 512 for
    2,048 tokens.
    """

    equation = "b = f_h(ψ(i−j) / ψ(max(μT, i))), ψ(x) = ln(1 + c·x)"
    source = "arXiv 2310.04418"
    threshold: int | None = number(default=None, least=1, fill=QUARTER_LENGTH)
    width: int = number(default=32, least=1)

    def learned(self, heads: int, head_dim: int) -> dict[str, Tensor]:
        """c, μ, and weights drawn as torch draws a linear layer's, from its global generator."""
        bound = 1 / math.sqrt(self.width)
        return {
            "c": torch.tensor(0.1),
            "mu": torch.tensor(1.0),
            "w_in": torch.empty(self.width).uniform_(-1, 1),
            "b_in": torch.empty(self.width).uniform_(-1, 1),
            "w_out": torch.empty(heads, self.width).uniform_(-bound, bound),
            "b_out": torch.empty(heads).uniform_(-bound, bound),
        }

    def pairs(self, learned: Learned, dtype: torch.dtype, query: Queries | None) -> PairBias:
        """f of the share of each pair."""
        order = ("c", "mu", "w_in", "b_in", "w_out", "b_out")
        c, mu, w_in, b_in, w_out, b_out = (learned[name].to(dtype) for name in order)

        def compute(score: Tensor, mask: AttentionMask, _: Any) -> Tensor:
            # Keys after the query are hidden; their distance is set to 0.
            distance = mask.distance(_ALL, _ALL).clamp(min=0).to(c)
            position = mask.query.to(c)[..., None]
            if distance.dim() == 4 and position.dim() == 3:
                position = position[:, None]
            length = torch.maximum(position, (mu * self.required("threshold")).abs())
            # 1e-6 keeps the share finite if c becomes 0.
            share = torch.log1p(c.abs() * distance) / (torch.log1p(c.abs() * length) + 1e-6)
            hidden = torch.relu(share[..., None] * w_in + b_in)
            bias = (hidden @ w_out.t() + b_out).movedim(-1, -3)
            # (B, 1, H, T, S) if batch rows have different positions.
            return bias.squeeze(1) if distance.dim() == 4 else bias

        # Temporary numbers per pair: the hidden layer and the outputs.
        return PairBias(compute, sum(w_out.shape))


@register
class CoPE(PairBiasPart):
    """Positions are sums of gates of the scores, each with an embedding.

    The contextual position of key j is a sum of gates over the keys that the query sees from key j
    on, at most P − 1; e between two whole positions is interpolated. e has `positions` P vectors (0
    … P − 1), shared by the heads, which start at 0. With the same λ as for keys, the score is
    λ·⟨q_i, k_j + e⟩, the default of the authors' code.
    """

    equation = "b = λ·⟨q_i, e[p]⟩, p = Σ_{j≤l≤i} σ(s_il)"
    source = "arXiv 2405.18719; github.com/facebookresearch/RAM"
    reads_queries = True
    positions: int = number(default=64, least=2)

    def learned(self, heads: int, head_dim: int) -> dict[str, Tensor]:
        """e = 0."""
        return {"e": torch.zeros(self.positions, head_dim)}

    def pairs(self, learned: Learned, dtype: torch.dtype, query: Queries | None) -> PairBias:
        """λ·⟨q, e⟩ of each query and integer position, interpolated at sums of gates."""
        table = require_query(self, query).to(dtype) @ learned["e"].to(dtype).t()

        def compute(score: Tensor, mask: AttentionMask, table: Tensor) -> Tensor:
            # Gates are summed from the last visible key down to each key; hidden keys have 0.
            order = mask.position_order(score)
            gate = torch.sigmoid(score.to(table.dtype))
            gate = gate if order is None else gate.gather(-1, order)
            position = gate.flip(-1).cumsum(-1).flip(-1)
            position = position if order is None else position.gather(-1, order.argsort(-1))
            last = table.shape[-1] - 1
            position = position.clamp(max=last)
            floor = position.detach().floor()
            # NaN is not a valid index. It reaches the result through the interpolation weight.
            low = floor.nan_to_num(0.0).long()
            below, above = (table.gather(-1, index) for index in (low, (low + 1).clamp(max=last)))
            return torch.lerp(below, above, position - floor)

        # Per head: gates, positions, two indices of eight bytes, and the numbers they select.
        return PairBias(compute, 8 * table.shape[0] * table.shape[1], table)


@register
class XLNet(PairBiasPart):
    """Queries meet keys and learned sinusoids of the distance, each with a vector added.

    That is Transformer-XL's score, λ·⟨q_i + u_h, k_j⟩ + λ·⟨q_i + v_h, W_h·e(i−j)⟩, with the sines
    and cosines of r·10000^(−2m/E), E = H·D, as e(r). u, v and W are drawn with the deviation 0.02,
    as in XLNet. It is computed as a product of features of i with features of j, so that it works
    with a cache and any positions.
    """

    equation = "s = λ·⟨q_i + u_h, k_j⟩ + b, b = λ·⟨q_i + v_h, W_h·e(i−j)⟩"
    source = "arXiv 1901.02860, 1906.08237; transformers, modeling_xlnet.py"
    used_by = "Transformer-XL, XLNet"
    needs_causal = False
    reads_queries = True

    def learned(self, heads: int, head_dim: int) -> dict[str, Tensor]:
        """u, v and W, drawn from torch's global generator."""
        waves = -(-heads * head_dim // 2) * 2
        shapes = {"u": (heads, head_dim), "v": (heads, head_dim), "w": (heads * head_dim, waves)}
        return {name: 0.02 * torch.randn(shape) for name, shape in shapes.items()}

    def split_query(self, q: Queries, learned: Learned) -> tuple[Queries, Queries]:
        """q + u and q + v."""
        u, v = (learned[name].to(q.dtype)[:, None] for name in ("u", "v"))
        return q + u, q + v

    def pairs(self, learned: Learned, dtype: torch.dtype, query: Queries | None) -> PairBias:
        """λ·W_hᵀ(q + v) times sines and cosines of i − j, as features of i times features of j."""
        q = require_query(self, query).to(dtype)
        table = q @ learned["w"].to(dtype).reshape(q.shape[1], q.shape[-1], -1)

        def waves(positions: Tensor) -> tuple[Tensor, Tensor]:
            half = table.shape[-1] // 2
            exponent = torch.arange(half, dtype=torch.float64, device=positions.device) / half
            angle = positions.double()[..., None] * 10000.0**-exponent
            angle = angle[:, None] if positions.dim() == 2 else angle
            return angle.sin().to(dtype), angle.cos().to(dtype)

        def compute(score: Tensor, mask: AttentionMask, table: Tensor) -> Tensor:
            sines, cosines = table.chunk(2, -1)
            (sin_i, cos_i), (sin_j, cos_j) = waves(mask.query), waves(mask.key)
            query_features = (cosines * sin_i - sines * cos_i, sines * sin_i + cosines * cos_i)
            return torch.cat(query_features, -1) @ torch.cat((sin_j, cos_j), -1).mT

        # The bias of each head.
        return PairBias(compute, table.shape[0] * table.shape[1], table)


@register
class ScaleInvariant(PairBiasPart):
    """Scores of distant pairs are widened and lowered, by the logarithm of the distance.

    a grows and m falls, so that keys about 10, 100 or 1,000 tokens back get about the same share of
    attention. Up to `tau` tokens little changes. Nothing is learned. It is the only position unless
    another one is named; the paper uses `PRoPE`.
    """

    equation = "s ← a·s + m, a² = 1 + 2·ln(1 + (i−j)/τ), m = 1 − a²"
    source = "arXiv 2505.17083"
    tau: float = number(default=10.0, above=0)

    def pairs(self, learned: Learned, dtype: torch.dtype, query: Queries | None) -> PairBias:
        """(a − 1)·s + m: the change of each score."""

        def compute(score: Tensor, mask: AttentionMask, _: Any) -> Tensor:
            distance = mask.distance(_ALL, _ALL).clamp(min=0).to(score.dtype)
            growth = 2 * torch.log1p(distance / self.tau)
            # Hidden keys have the score −∞.
            finite = score.masked_fill(score == -math.inf, 0.0)
            return ((growth + 1).sqrt() - 1) * finite - growth

        # The distance, its logarithm, a.
        return PairBias(compute, 3)


@register
class FoX(Part):
    """A penalty summed over the tokens between, each with a gate computed from its input.

    It encodes position, so RoPE is off unless it is named. It is computed with additional features
    of queries and keys: with C_j = Σ_{l≤j} ln σ(…) the score is ⟨(q, C_i, 1), (k, 1, −C_j)⟩. w and
    c belong to the layers `Attention` and `GatedAttentionUnit`; `attention` takes w_h·x_l + c_h as
    its argument `forget`, where x is the layer's input.
    """

    slot = Slot.BIAS
    equation = "b = Σ_{j<l≤i} ln σ(w_h·x_l + c_h)"
    source = "arXiv 2503.02130; github.com/zhixuan-lin/forgetting-transformer"
    needs_causal = True
    excludes: ClassVar[Mapping[Slot, str]] = {
        Slot.CAP: "the bias would be capped with the product it is folded into",
        Slot.RESIDUAL: "what is added up through the layers would hold the bias of those below",
    }
