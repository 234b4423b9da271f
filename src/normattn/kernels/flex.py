"""CUDA: everything that is not absorbed into q and k, by torch's `flex_attention`.

A mask function says which keys a query sees, a score function caps a score and adds biases. Two
regimes are two calls merged by their log-sum-exp ℓ, and a learned sink, one more logit with value
0, scales the output by 1 / (1 + exp(sink − ℓ)). The block mask is made once for a shape and a kind
of mask. On CUDA the calls are compiled. On a CPU they run eagerly with the whole T × S matrix and
without gradients, for tests of the two functions.

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
"""(batch, head, query, key) to whether the query sees the key."""
ScoreFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(score, batch, head, query, key) to the score that softmax sees."""


def flex(
    inputs: AttentionInputs,
) -> tuple[Float[Tensor, "b h t e"], Float[Tensor, "b h t"]]:
    """softmax(score) · v by `flex_attention`, and the log-sum-exp of each row's scores."""
    p, start = inputs, inputs.near_start
    far = None if p.window is None else False
    out, lse = _call(p, p.q, p.k, p.v[:, :, start:], start, far)
    if p.far_q is not None and p.far_k is not None:
        out, lse = merge_by_lse(out, lse, *_call(p, p.far_q, p.far_k, p.v, 0, True))
    if p.sink is not None:
        sink = p.sink.to(lse)[None, :, None]
        out = out * (lse - sink).sigmoid()[..., None].to(out.dtype)
        lse = torch.logaddexp(lse, sink.expand(lse.shape))
    return out, lse


def mask_function(inputs: AttentionInputs, start: int, far: bool | None) -> MaskFunction:
    """Which keys a query sees; the keys are those from column `start` on.

    `far` confines it to distant pairs or to near ones; None to neither.
    """
    mask, window = inputs.mask, inputs.window
    positions = _positions(inputs, start)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        column = key + start
        i, j = positions(batch, query, key)
        sees = column >= 0
        if mask.causal:
            sees = sees & (j <= i)
        if mask.window is not None:
            near = (i - j).abs() < mask.window
            sees = sees & (near | (j < mask.sink_tokens) if mask.sink_tokens else near)
        if mask.padding is not None:
            sees = sees & ~mask.padding[batch, column]
        if mask.query_documents is not None and mask.key_documents is not None:
            own, other = mask.query_documents[batch, query], mask.key_documents[batch, column]
            sees = sees & (own == other)
        if mask.attn_mask is not None:
            value = _mask_value(mask.attn_mask, batch, head, query, column)
            sees = sees & (value if mask.attn_mask.dtype == torch.bool else value > -torch.inf)
        if far is not None and window is not None:
            sees = sees & ((i - j >= window) if far else (i - j < window))
        return sees

    return visible


def score_function(inputs: AttentionInputs, start: int) -> ScoreFunction | None:
    """Cap, bias and floating mask of a score; None where there are none."""
    mask, cap, bias = inputs.mask, inputs.cap, inputs.bias
    added = None if mask.attn_mask is None or mask.attn_mask.dtype == torch.bool else mask.attn_mask
    if cap is None and bias is None and added is None:
        return None
    positions = _positions(inputs, start)

    def changed(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        if bias is not None:
            i, j = positions(batch, query, key)
            # A distance without a bias occurs only where the key is hidden.
            score = score + bias[head, (i - j).abs().clamp(max=bias.shape[1] - 1)]
        if added is not None:
            score = score + _mask_value(added, batch, head, query, key + start)
        return score

    return changed


def _positions(
    inputs: AttentionInputs, start: int
) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(batch, query, key) to the positions of both; aligned ones are counted, not looked up."""
    mask, shift = inputs.mask, inputs.v.shape[2] - inputs.q.shape[2]

    def pick(positions: Tensor, batch: Tensor, index: Tensor) -> Tensor:
        return positions[index] if positions.dim() == 1 else positions[batch, index]

    def both(batch: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        if mask.aligned:
            return query + shift, key + start
        return pick(mask.query, batch, query), pick(mask.key, batch, key + start)

    return both


def _mask_value(mask: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """One value of a mask that broadcasts to (B, H, T, S)."""
    # An empty index is refused where the function is mapped over indices.
    whole = mask if mask.dim() == 4 else mask[(None,) * (4 - mask.dim())]
    indices = (batch, head, query, key)
    own = (at * (size != 1) for at, size in zip(indices, whole.shape, strict=True))
    return whole[tuple(own)]


def _call(
    inputs: AttentionInputs, q: Tensor, k: Tensor, v: Tensor, start: int, far: bool | None
) -> tuple[Float[Tensor, "b h t e"], Float[Tensor, "b h t"]]:
    """Output and log-sum-exp of the keys from `start` on."""
    changed = score_function(inputs, start)
    attend, _ = _functions(q.device.type == "cuda")
    # flex_attention counts the arguments of a function, which a wrapper would hide: a lambda.
    out, sums = attend(
        *(q, k, v),
        score_mod=None
        if changed is None
        else lambda score, batch, head, query, key: changed(score, batch, head, query, key),
        block_mask=_block_mask(inputs, start, far),
        scale=1.0,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out, sums


# Block masks by shape and by the tensors of a mask, which an entry keeps alive: so another tensor
# cannot get the number of one that is gone.
_BLOCK_MASKS: OrderedDict[Any, Any] = OrderedDict()
_MOST = 8


def _block_mask(inputs: AttentionInputs, start: int, far: bool | None) -> Any:
    """The block mask of the keys from `start` on, made once for its shapes and its tensors.

    The layers of a model share their mask's tensors, so that one mask serves a forward and its
    backward. A tensor that was written to since is another one.
    """
    mask, q = inputs.mask, inputs.q
    parts = [mask.padding, mask.attn_mask, mask.query_documents, mask.key_documents]
    parts += [] if mask.aligned else [mask.query, mask.key]
    tensors = [x for x in parts if x is not None]
    if torch.compiler.is_compiling() or any(x.is_inference() for x in tensors):
        return _make_block_mask(inputs, start, far)
    name = (
        *(q.device, q.shape[:3], inputs.v.shape[2], start, far, inputs.window),
        *(mask.causal, mask.window, mask.sink_tokens, mask.aligned),
        *((None if x is None else (id(x), x._version)) for x in parts),
    )
    if name not in _BLOCK_MASKS:
        _BLOCK_MASKS[name] = _make_block_mask(inputs, start, far), tensors
        while len(_BLOCK_MASKS) > _MOST:
            _BLOCK_MASKS.popitem(last=False)
    _BLOCK_MASKS.move_to_end(name)
    return _BLOCK_MASKS[name][0]


def _make_block_mask(inputs: AttentionInputs, start: int, far: bool | None) -> Any:
    mask, q = inputs.mask, inputs.q
    # The mask may be kept: it must hold no queries, keys and values.
    q, k, v = (x.detach().new_empty(()).expand(x.shape) for x in (q, inputs.k, inputs.v))
    visible = mask_function(AttentionInputs(q, k, v, mask, window=inputs.window), start, far)
    alike = mask.attn_mask is None or mask.attn_mask.dim() < 4 or mask.attn_mask.shape[0] == 1
    positions = mask.query.dim() == mask.key.dim() == 1
    one = mask.padding is None and mask.query_documents is None and alike and positions
    by_head = (
        mask.attn_mask is not None and mask.attn_mask.dim() > 2 and mask.attn_mask.shape[-3] > 1
    )
    return _functions(q.device.type == "cuda")[1](
        lambda batch, head, query, key: visible(batch, head, query, key),
        *(None if one else q.shape[0], q.shape[1] if by_head else None),
        *(q.shape[2], inputs.v.shape[2] - start),
        device=q.device,
    )


@cache
def _functions(compiled: bool) -> tuple[Any, Any]:
    """Attention and the block mask, compiled once for any shapes, or eager."""
    # Imported here because it loads the compiler, which takes longer than torch itself.
    from torch.nn.attention import flex_attention as torch_flex

    kernel: Any = torch_flex.flex_attention

    def attend(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not hasattr(torch_flex, "AuxRequest"):
            # Before torch 2.9.
            both: tuple[Tensor, Tensor]
            both = kernel(*args, **kwargs, return_lse=True)
            return both
        aux = torch_flex.AuxRequest(lse=True)
        out, more = kernel(*args, **kwargs, return_aux=aux)
        return out, more.lse

    if not compiled:
        return attend, torch_flex.create_block_mask
    return torch.compile(attend), torch.compile(torch_flex.create_block_mask)
