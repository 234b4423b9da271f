"""Attention on CUDA with masks, biases, caps, sinks and two regimes, by torch's `flex_attention`.

A mask function says which keys a query sees; a score function applies caps and biases. Two regimes
are two calls, merged by their log-sum-exp ℓ. A learned sink, one more logit with value 0, scales
the output by 1 / (1 + exp(sink − ℓ)). Block masks are cached. Calls are compiled on CUDA. On a CPU
they run eagerly with the whole T × S matrix and without gradients, to test the two functions.

Legend: B batch, H query heads, G key heads, T queries, S keys, D score and E value size.

Source: FlexAttention, https://arxiv.org/abs/2412.05496.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.kernels.inputs import AttentionInputs
from normattn.kernels.numerics import merge_by_lse

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query, key) → whether the query sees the key."""
ScoreFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(score, batch, head, query, key) → the score that softmax gets."""


def flex(
    inputs: AttentionInputs,
) -> tuple[Float[Tensor, "b h t e"], Float[Tensor, "b h t"]]:
    """softmax(score) · v by `flex_attention`, and the log-sum-exp of each row's scores."""
    start, far = inputs.near_start, None if inputs.far_from is None else False
    out, lse = _flex_attention(inputs, inputs.q, inputs.k, inputs.v[:, :, start:], start, far)
    if inputs.far_q is not None and inputs.far_k is not None:
        far_part = _flex_attention(inputs, inputs.far_q, inputs.far_k, inputs.v, 0, True)
        out, lse = merge_by_lse(out, lse, *far_part)
    if inputs.sink is not None:
        sink = inputs.sink.to(lse)[None, :, None]
        out = out * (lse - sink).sigmoid()[..., None].to(out.dtype)
        lse = torch.logaddexp(lse, sink.expand(lse.shape))
    return out, lse


def mask_function(inputs: AttentionInputs, start: int, far: bool | None) -> MaskFunction:
    """A mask function for keys from column `start` on; `far` keeps only far or only near pairs."""
    mask, far_from = inputs.mask, inputs.far_from
    positions = _positions(inputs, start)

    def is_visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        column = key + start
        i, j = positions(batch, query, key)
        visible = column >= 0
        if mask.causal:
            visible = visible & (j <= i)
        if mask.window is not None:
            near = (i - j).abs() < mask.window
            visible = visible & (near | (j < mask.sink_tokens) if mask.sink_tokens else near)
        if mask.padding is not None:
            visible = visible & ~mask.padding[batch, column]
        if mask.query_documents is not None and mask.key_documents is not None:
            document = mask.query_documents[batch, query]
            visible = visible & (document == mask.key_documents[batch, column])
        if mask.attn_mask is not None:
            value = _mask_value(mask.attn_mask, batch, head, query, column)
            visible = visible & (
                value if mask.attn_mask.dtype == torch.bool else value > -torch.inf
            )
        if far is not None and far_from is not None:
            visible = visible & ((i - j >= far_from) if far else (i - j < far_from))
        return visible

    return is_visible


def score_function(inputs: AttentionInputs, start: int) -> ScoreFunction | None:
    """A function that applies cap, bias and floating mask to a score; None without any."""
    mask, cap, bias = inputs.mask, inputs.cap, inputs.bias
    added = None if mask.attn_mask is None or mask.attn_mask.dtype == torch.bool else mask.attn_mask
    if cap is None and bias is None and added is None:
        return None
    positions = _positions(inputs, start)

    def modify(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        if bias is not None:
            i, j = positions(batch, query, key)
            # Only hidden keys are further away than the bias reaches.
            score = score + bias[head, (i - j).abs().clamp(max=bias.shape[1] - 1)]
        if added is not None:
            score = score + _mask_value(added, batch, head, query, key + start)
        return score

    return modify


def _positions(
    inputs: AttentionInputs, start: int
) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A function (batch, query, key) → the positions of both, from indices alone if aligned."""
    mask, shift = inputs.mask, inputs.v.shape[2] - inputs.q.shape[2]

    def pick(positions: Tensor, batch: Tensor, index: Tensor) -> Tensor:
        return positions[index] if positions.dim() == 1 else positions[batch, index]

    def query_and_key(batch: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        if mask.aligned:
            return query + shift, key + start
        return pick(mask.query, batch, query), pick(mask.key, batch, key + start)

    return query_and_key


def _mask_value(mask: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """One value of a mask that broadcasts to (B, H, T, S)."""
    mask = mask if mask.dim() == 4 else mask[(None,) * (4 - mask.dim())]
    # vmap needs an index for every axis: 0 for an axis of size 1.
    indices = zip((batch, head, query, key), mask.shape, strict=True)
    return mask[tuple(index * (size != 1) for index, size in indices)]


def _flex_attention(
    inputs: AttentionInputs, q: Tensor, k: Tensor, v: Tensor, start: int, far: bool | None
) -> tuple[Float[Tensor, "b h t e"], Float[Tensor, "b h t"]]:
    """Output and log-sum-exp over the keys from `start` on."""
    modify = score_function(inputs, start)
    attend, _ = _functions(q.device.type == "cuda")
    # flex_attention counts a function's arguments, which jaxtyping's wrapper would hide: a lambda.
    out, lse = attend(
        *(q, k, v),
        score_mod=None
        if modify is None
        else lambda score, batch, head, query, key: modify(score, batch, head, query, key),
        block_mask=_block_mask(inputs, start, far),
        scale=1.0,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out, lse


# Block masks by shape and by the ids of a mask's tensors. An entry keeps its tensors alive, so that
# no other tensor can get their ids.
_BLOCK_MASKS: OrderedDict[Any, Any] = OrderedDict()
_MAX_BLOCK_MASKS = 8


def _block_mask(inputs: AttentionInputs, start: int, far: bool | None) -> Any:
    """The block mask of the keys from `start` on, cached by shapes and tensors.

    All layers of a model share their mask's tensors, so a forward and its backward need one block
    mask. A tensor that was written to gets a new one.
    """
    mask, q = inputs.mask, inputs.q
    fields = [mask.padding, mask.attn_mask, mask.query_documents, mask.key_documents]
    fields += [] if mask.aligned else [mask.query, mask.key]
    tensors = [x for x in fields if x is not None]
    # A compiler would compile again for each id.
    if torch.compiler.is_compiling() or any(x.is_inference() for x in tensors):
        return _make_block_mask(inputs, start, far)
    cache_key = (
        *(q.device, q.shape[:3], inputs.v.shape[2], start, far, inputs.far_from),
        *(mask.causal, mask.window, mask.sink_tokens, mask.aligned),
        *((None if x is None else (id(x), x._version)) for x in fields),
    )
    if cache_key not in _BLOCK_MASKS:
        _BLOCK_MASKS[cache_key] = _make_block_mask(inputs, start, far), tensors
        if len(_BLOCK_MASKS) > _MAX_BLOCK_MASKS:
            _BLOCK_MASKS.popitem(last=False)
    _BLOCK_MASKS.move_to_end(cache_key)
    return _BLOCK_MASKS[cache_key][0]


def _make_block_mask(inputs: AttentionInputs, start: int, far: bool | None) -> Any:
    mask, q = inputs.mask, inputs.q
    # A cached mask must not keep queries, keys and values alive.
    shape_q, k, v = (x.detach().new_empty(()).expand(x.shape) for x in (q, inputs.k, inputs.v))
    shapes = AttentionInputs(shape_q, k, v, mask, far_from=inputs.far_from)
    is_visible = mask_function(shapes, start, far)
    attn_mask = mask.attn_mask
    per_row = mask.padding is not None or mask.query_documents is not None
    per_row = per_row or mask.query.dim() == 2 or mask.key.dim() == 2
    per_row = per_row or (attn_mask is not None and attn_mask.dim() == 4 and len(attn_mask) > 1)
    per_head = attn_mask is not None and attn_mask.dim() > 2 and attn_mask.shape[-3] > 1
    return _functions(q.device.type == "cuda")[1](
        lambda batch, head, query, key: is_visible(batch, head, query, key),
        *(q.shape[0] if per_row else None, q.shape[1] if per_head else None),
        *(q.shape[2], inputs.v.shape[2] - start),
        device=q.device,
    )


@cache
def _functions(compiled: bool) -> tuple[Any, Any]:
    """Functions that compute attention and a block mask; compiled ones work for all shapes."""
    # Imported here because it loads the compiler, which takes longer than torch itself.
    from torch.nn.attention import flex_attention as torch_flex

    kernel: Any = torch_flex.flex_attention

    def attend(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        out, aux = kernel(*args, **kwargs, return_aux=torch_flex.AuxRequest(lse=True))
        return out, aux.lse

    if not compiled:
        return attend, torch_flex.create_block_mask
    return torch.compile(attend), torch.compile(torch_flex.create_block_mask)
