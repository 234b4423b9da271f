"""CUDA: everything that is not absorbed into q and k, by torch's `flex_attention`.

A mask function says which keys a query sees, a score function caps a score and adds biases. Two
regimes are two calls merged by their log-sum-exp,

    o = o_near + (o_far − o_near) · λ,   λ = 1 / (1 + exp(ℓ_near − ℓ_far)),

and a learned sink, one more logit with value 0, scales the output by 1 / (1 + exp(sink − ℓ)). On
CUDA the calls are compiled. On a CPU they run eagerly with the whole T × S matrix and without
gradients, for tests of the two functions.

Legend: B batch, H query heads, G key heads, T queries, S keys, D score and E value size.

Source: FlexAttention, https://arxiv.org/abs/2412.05496.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.kernels.inputs import AttentionInputs

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query, key) to whether the query sees the key."""
ScoreFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(score, batch, head, query, key) to the score that softmax sees."""


def flex(inputs: AttentionInputs) -> Float[Tensor, "b h t e"]:
    """softmax(score) · v by one call of `flex_attention`, or by two where there are two regimes."""
    p, start = inputs, inputs.near_start
    far = None if p.window is None else False
    out, sums = _call(p, p.q, p.k, p.v[:, :, start:], start, far)
    if p.far_q is not None and p.far_k is not None:
        far_out, far_sums = _call(p, p.far_q, p.far_k, p.v, 0, True)
        # A row that sees no key has −∞ in both, whose difference would be NaN.
        least = torch.finfo(sums.dtype).min / 4
        sums, far_sums = sums.clamp(min=least), far_sums.clamp(min=least)
        share = (far_sums - sums).sigmoid()[..., None].to(out.dtype)
        out, sums = torch.lerp(out, far_out, share), torch.logaddexp(sums, far_sums)
    if p.sink is not None:
        share = (sums - p.sink.to(sums)[None, :, None]).sigmoid()
        out = out * share[..., None].to(out.dtype)
    return out


def mask_function(inputs: AttentionInputs, start: int, far: bool | None) -> MaskFunction:
    """Which keys a query sees; the keys are those from column `start` on.

    `far` confines it to distant pairs or to near ones; None to neither.
    """
    seen, window = inputs.visibility, inputs.window

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        column = key + start
        i, j = _pick(seen.query, batch, query), _pick(seen.key, batch, column)
        sees = column >= 0
        if seen.causal:
            sees = sees & (j <= i)
        if seen.window is not None:
            near = (i - j).abs() < seen.window
            sees = sees & (near | (j < seen.kept) if seen.kept else near)
        if seen.padding is not None:
            sees = sees & ~seen.padding[batch, column]
        if seen.query_documents is not None and seen.key_documents is not None:
            own, other = seen.query_documents[batch, query], seen.key_documents[batch, column]
            sees = sees & (own == other)
        if seen.mask is not None:
            value = _mask_value(seen.mask, batch, head, query, column)
            sees = sees & (value if seen.mask.dtype == torch.bool else value > -torch.inf)
        if far is not None and window is not None:
            sees = sees & ((i - j >= window) if far else (i - j < window))
        return sees

    return visible


def score_function(inputs: AttentionInputs, start: int) -> ScoreFunction | None:
    """Cap, bias and floating mask of a score; None where there are none."""
    seen, cap, bias = inputs.visibility, inputs.cap, inputs.bias
    added = None if seen.mask is None or seen.mask.dtype == torch.bool else seen.mask
    if cap is None and bias is None and added is None:
        return None

    def changed(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        column = key + start
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        if bias is not None:
            distance = _pick(seen.query, batch, query) - _pick(seen.key, batch, column)
            # A distance without a bias occurs only where the key is hidden.
            score = score + bias[head, distance.abs().clamp(max=bias.shape[1] - 1)]
        if added is not None:
            score = score + _mask_value(added, batch, head, query, column)
        return score

    return changed


def _call(
    inputs: AttentionInputs, q: Tensor, k: Tensor, v: Tensor, start: int, far: bool | None
) -> tuple[Float[Tensor, "b h t e"], Float[Tensor, "b h t"]]:
    """Output and log-sum-exp of the keys from `start` on."""
    visible, changed = mask_function(inputs, start, far), score_function(inputs, start)
    attend, make_mask = _functions(q.device.type == "cuda")
    seen = inputs.visibility
    alike = seen.mask is None or seen.mask.dim() < 4 or seen.mask.shape[0] == 1
    positions = seen.query.dim() == seen.key.dim() == 1
    one = seen.padding is None and seen.query_documents is None and alike and positions
    by_head = seen.mask is not None and seen.mask.dim() > 2 and seen.mask.shape[-3] > 1
    # flex_attention counts the arguments of a function, which a wrapper would hide: lambdas.
    blocks = make_mask(
        lambda batch, head, query, key: visible(batch, head, query, key),
        None if one else q.shape[0],
        q.shape[1] if by_head else None,
        q.shape[2],
        k.shape[2],
        device=q.device,
    )
    out, sums = attend(
        q,
        k,
        v,
        score_mod=None
        if changed is None
        else lambda score, batch, head, query, key: changed(score, batch, head, query, key),
        block_mask=blocks,
        scale=1.0,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out, sums


def _pick(positions: Tensor, batch: Tensor, index: Tensor) -> Tensor:
    """The position of a token, by text where texts have their own."""
    return positions[index] if positions.dim() == 1 else positions[batch, index]


def _mask_value(mask: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """One value of a mask that broadcasts to (B, H, T, S)."""
    # An empty index is refused where the function is mapped over indices.
    whole = mask if mask.dim() == 4 else mask[(None,) * (4 - mask.dim())]
    indices = (batch, head, query, key)
    own = (at * (size != 1) for at, size in zip(indices, whole.shape, strict=True))
    return whole[tuple(own)]


@cache
def _functions(compiled: bool) -> tuple[Any, Any]:
    """Attention and the block mask, compiled once for any shapes, or eager."""
    # Imported here because it loads the compiler, which takes longer than torch itself.
    from torch.nn.attention import flex_attention as torch_flex

    kernel: Any = torch_flex.flex_attention

    def attend(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not hasattr(torch_flex, "AuxRequest"):
            # Before torch 2.9.
            both: tuple[Tensor, Tensor] = kernel(*args, **kwargs, return_lse=True)
            return both
        out, more = kernel(*args, **kwargs, return_aux=torch_flex.AuxRequest(lse=True))
        return out, more.lse

    if not compiled:
        return attend, torch_flex.create_block_mask
    return torch.compile(attend), torch.compile(torch_flex.create_block_mask)
