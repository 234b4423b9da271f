"""Softmax and its variants: caps, sinks, other normalisers, differential pairs, output gates.

Legend: B batch, H heads, P pairs of heads, T queries, S keys, D head dimension, E value size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from normattn.errors import InputError
from normattn.kernels import AttentionMask
from normattn.kernels.numerics import at_least_float32
from normattn.score.parts.base import TRAIN_LENGTH, Part, Parts, Slot, number, one_of, register
from normattn.score.parts.long_context import blockwise

Scores = Float[Tensor, "b h t s"]
Outputs = Float[Tensor, "b h t e"]
PairOutputs = Float[Tensor, "b p t e"]


@register
class SoftCap(Part):
    """Scores are bounded smoothly, before bias and mask."""

    slot = Slot.CAP
    equation = "s ← cap·tanh(s/cap)"
    source = "Gemma 2, arXiv 2408.00118"
    used_by = "Gemma 2"
    cap: float = number(default=50.0, above=0)


@register
class Sink(Part):
    """One more learned logit per head in the denominator of softmax.

    z_h starts at 0, which is "softmax off by one". Without it the first tokens act as attention
    sinks (arXiv 2309.17453).
    """

    slot = Slot.SINK
    equation = "o = Σ_j e^{s_j} v_j / (e^{z_h} + Σ_j e^{s_j})"
    source = "arXiv 2508.10925 (gpt-oss); evanmiller.org/attention-is-off-by-one.html"
    used_by = "gpt-oss"


@dataclass(frozen=True)
class NormaliserPart(Part):
    """A function from rows of scores to weights, in place of softmax."""

    slot = Slot.NORMALISER
    excludes: ClassVar[Mapping[Slot, str]] = {Slot.SINK: "a sink is a logit of softmax"}

    def weights(self, score: Scores, mask: AttentionMask) -> Scores:
        """The weights of whole rows; a score is −∞, and its weight 0, where a key is hidden."""
        raise InputError(f"{self.name} defines no weights")


@register
class Sigmoid(NormaliserPart):
    """A sigmoid of each score instead of a softmax over the row.

    With −ln n, where n = `tokens` is L by default, the weights of a row add up to about 1 at first,
    as those of softmax do. Without it, large outputs make training unstable. n is the same in every
    row, so that a cache or a longer text changes nothing.
    """

    equation = "o = Σ_j σ(s_j − ln n) v_j, n = L"
    source = "arXiv 2409.04431"
    tokens: int | None = number(default=None, least=1, fill=TRAIN_LENGTH)

    def weights(self, score: Scores, mask: AttentionMask) -> Scores:
        """σ(s − ln n)."""
        return torch.sigmoid(score - math.log(self.required("tokens")))


@register
class StickBreaking(NormaliserPart):
    """Each key takes a share of what nearer keys leave, instead of softmax.

    The keys between it and the query first break their shares off a stick of length 1. The query's
    own key gets none, so the first token's output is 0; with `current` it takes the first share.
    The rest of the stick is unused. The order of keys encodes position: the paper's score has NoPE.
    """

    equation = "A(i,j) = σ(s_ij) · Π_{j<l<i} (1 − σ(s_il)), j < i"
    source = "arXiv 2410.17980"
    needs_causal = True
    current: bool = False

    def weights(self, score: Scores, mask: AttentionMask) -> Scores:
        """Sums of logarithms from each key up to the query."""
        if not self.current:
            own_key = mask.distance(slice(None), slice(None)) == 0
            score = score.masked_fill(own_key, -float("inf"))
        # Keys between i and j are those with positions in between.
        order = mask.position_order(score)
        ordered = score if order is None else score.gather(-1, order)
        ordered = ordered.float() if ordered.element_size() == 2 else ordered
        log_left = F.logsigmoid(-ordered).flip(-1).cumsum(-1).flip(-1)
        # The sum from the last key down to each key, without the key itself.
        between = F.pad(log_left[..., 1:], (0, 1))
        weight = (F.logsigmoid(ordered) + between).exp().to(score.dtype)
        return weight if order is None else weight.gather(-1, order.argsort(-1))


@register
class Entmax(NormaliserPart):
    """Weights that are exactly 0 for keys far below the best ones.

    τ makes the weights of a row add up to 1. α = 2 is sparsemax, α → 1 softmax. τ is found by
    Newton's method from the left. Gradients go through the last step, which is exact for first
    derivatives only. It needs whole rows, a strip of queries at a time.
    """

    equation = "a_j = max(0, (α − 1)·s_j − τ)^(1/(α−1)), Σ_j a_j = 1"
    source = "arXiv 1905.05702, 2506.16640"
    alpha: float = number(default=1.5, above=1, most=2)

    def weights(self, score: Scores, mask: AttentionMask) -> Scores:
        """Solve Σ_j a_j = 1 for τ in each row; a row without keys gets weights 0."""
        if score.shape[-1] == 0:
            return score
        power = 1 / (self.alpha - 1)
        dtype = torch.promote_types(score.dtype, torch.float32)
        x = (self.alpha - 1) * score.to(dtype)
        highest = x.detach().amax(-1, keepdim=True)
        x = x - torch.where(highest == -math.inf, 0.0, highest)
        tau = torch.full_like(highest, -1.0)
        with torch.no_grad():
            for _ in range(_NEWTON_STEPS):
                tau = tau + self._step(x, tau, power)
        tau = tau + self._step(x, tau, power)
        return _above(x, tau, power).to(score.dtype)

    def _step(self, x: Scores, tau: Tensor, power: float) -> Tensor:
        """The step of Newton's method for τ in Σ_j a_j = 1."""
        slope = power * _above(x, tau, power - 1).detach().sum(-1, keepdim=True)
        excess = _above(x, tau, power).sum(-1, keepdim=True) - 1
        return torch.where(slope > 0, excess / torch.where(slope > 0, slope, 1.0), 0.0)


# A step multiplies the error by 1 − 1/power, and N keys need an error of N^(−1/power): about ln N
# steps, and a few more.
_NEWTON_STEPS = 24


def _above(x: Scores, tau: Tensor, power: float) -> Scores:
    """max(0, x − τ)^power, which is 0 where x ≤ τ even if the power is 0."""
    above = x > tau
    return torch.where(above, torch.where(above, x - tau, 1.0) ** power, 0.0)


@register
class Selective(Part):
    """Tokens that earlier queries selected, by head 0, get less attention.

    s₀ is the score of head 0, which decides for all heads which keys later queries attend to less;
    nothing is learned. No query selects its own key or the first token of a text (position 0). A
    selection has effect from the next query on. F depends on every earlier query, so there must be
    as many queries as keys, or a cache, which keeps F of each key (`kernels.Selection`).
    """

    slot = Slot.NORMALISER
    equation = "softmax(s − F), F(i,j) = Σ_{j<l<i} max(0, s₀(l,j))"
    source = "arXiv 2410.02703; github.com/lucidrains/x-transformers"
    needs_causal = True

    def conflict(self, parts: Parts) -> str | None:
        """The selection needs all rows in their order."""
        blocks, why = blockwise(parts), "it computes rows in blocks, and a selection sums over rows"
        return None if blocks is None else self.refusal(blocks, why)


def _default_init(layer: int) -> float:
    """λ₀ of a layer (0-based)."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer)


@register
class Differential(Part):
    """Heads in pairs: one softmax minus λ times another, then normalised.

    λ = exp(⟨λ_q1, λ_k1⟩) − exp(⟨λ_q2, λ_k2⟩) + λ₀, one for each layer; the four vectors start at
    N(0, 0.1²). λ₀, `init`, defaults to 0.8 − 0.6·exp(−0.3·(l − 1)) in layer l = 1, 2, … of a model,
    and to 0.2, as in the first layer, elsewhere. A pair has two queries, two keys, and the
    concatenated values of both heads, whose RMS norm has a gain and `eps`. Where H query heads
    share G keys, heads (2·g)·H/G + r and (2·g + 1)·H/G + r are a pair.
    """

    slot = Slot.NORMALISER
    equation = "o = (1 − λ₀)·RMSNorm((softmax(s₁) − λ·softmax(s₂))·[v₁, v₂])"
    source = "arXiv 2410.05258; github.com/microsoft/unilm"
    init: float | None = number(default=None, least=0, below=1, optional=True)
    eps: float = number(default=1e-5, least=0)

    def for_layer(self, layer: int) -> Differential:
        """This part with λ₀ of the layer, unless `init` was given."""
        return self if self.init is not None else replace(self, init=_default_init(layer))

    def learned(self, head_dim: int) -> dict[str, Tensor]:
        """λ_q1, λ_k1, λ_q2, λ_k2, drawn from torch's global generator, and the gain of the norm."""
        vectors = {name: 0.1 * torch.randn(head_dim) for name in ("q1", "k1", "q2", "k2")}
        return {**vectors, "gain": torch.ones(2 * head_dim)}

    def joined(
        self, first: PairOutputs, second: PairOutputs, learned: Mapping[str, Tensor]
    ) -> PairOutputs:
        """The norm of first − λ·second of P pairs of heads, in float32 or wider."""
        dtype, names = at_least_float32(first.dtype), ("q1", "k1", "q2", "k2", "gain")
        q1, k1, q2, k2, gain = (learned[name].to(dtype) for name in names)
        init = _default_init(0) if self.init is None else self.init
        factor = (q1 * k1).sum().exp() - (q2 * k2).sum().exp() + init
        difference = first.to(dtype) - factor * second.to(dtype)
        normed = F.rms_norm(difference, gain.shape, (1 - init) * gain, self.eps)
        return normed.to(first.dtype)


@dataclass(frozen=True)
class GatePart(Part):
    """A gate of the heads' outputs, with logits W_g x from the layer's input x.

    W_g belongs to the layers `Attention` and `GatedAttentionUnit`; `attention` takes `gate`, W_g x.
    """

    slot = Slot.GATE

    def outputs(self, heads: int) -> int:
        """The number of outputs for `heads` heads."""
        return heads

    def logits(self, heads: int, size: int) -> int:
        """The number of logits of a token, for heads with `size` output features."""
        return heads

    def gated(self, o: Outputs, logits: Float[Tensor, "b out t _"]) -> Float[Tensor, "b out t e"]:
        """The gated outputs."""
        raise InputError(f"{self.name} defines no outputs")


@register
class Gate(GatePart):
    """Each head's output is gated by the layer's input x, before the output projection.

    With `per=feature` W_g x has H·E features, with `per=head` H. Sigmoid after softmax·V is the
    form that the paper recommends (G1) and Qwen3-Next uses; `act=softplus` takes ln(1 + eˣ) instead
    of σ, as Laguna does, and may also enlarge an output.
    """

    equation = "o_h ← σ(W_g x) ⊙ o_h"
    source = "arXiv 2505.06708; act=softplus: transformers: laguna"
    used_by = "Qwen3-Next; act=softplus: Laguna"
    per: Literal["feature", "head"] = one_of("feature", "head", default="feature")
    act: Literal["sigmoid", "softplus"] = one_of("sigmoid", "softplus", default="sigmoid")

    def logits(self, heads: int, size: int) -> int:
        """H·E, or H per head."""
        return heads * size if self.per == "feature" else heads

    def gated(self, o: Outputs, logits: Float[Tensor, "b h t _"]) -> Outputs:
        """σ(W_g x) ⊙ o, or ln(1 + e^(W_g x)) ⊙ o."""
        return o * (torch.sigmoid(logits) if self.act == "sigmoid" else F.softplus(logits))


@register
class DifferentialV2(GatePart):
    """The output of one query head minus a share of another's, both with one key head.

    Heads 2·p and 2·p + 1 make output p, so H query heads have H/2 outputs: use twice as many heads.
    λ, one for each token and output, is a projection of the layer's input. Unlike `Differential`,
    it has no norm, and values are those of one head.
    """

    equation = "o_p = o_2p − σ(λ_p)·o_2p+1, λ = W_g x"
    source = "github.com/microsoft/unilm, Diff-Transformer-V2"

    def conflict(self, parts: Parts) -> str | None:
        """Both differential components pair heads."""
        pairs = parts.get(Slot.NORMALISER)
        if isinstance(pairs, Differential):
            return self.refusal(pairs, "each makes one output of two heads")
        return super().conflict(parts)

    def outputs(self, heads: int) -> int:
        """H/2."""
        return heads // 2

    def logits(self, heads: int, size: int) -> int:
        """H/2."""
        return heads // 2

    def gated(self, o: Outputs, logits: Float[Tensor, "b p t 1"]) -> PairOutputs:
        """o₁ − σ(λ)·o₂."""
        return o[:, 0::2] - torch.sigmoid(logits) * o[:, 1::2]
