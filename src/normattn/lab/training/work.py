"""What one operation of a step does: products, memory touched, exponentials.

Operations are torch's, as its dispatcher sees them. Products are counted by torch's own formulas,
in place as out of it, and attention's on a CPU by ours.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

SHORT_RUN = 64
ATEN = torch.ops.aten
# Attention of a CPU, which torch's registry lacks: products of the forward and of the backward.
_FLASH = {
    ATEN._scaled_dot_product_flash_attention_for_cpu: 2,
    ATEN._scaled_dot_product_flash_attention_for_cpu_backward: 5,
}
# The exponentials of a softmax and its like take longer than their bytes.
_EXPONENTIAL = frozenset(
    {ATEN.exp, ATEN.exp_, ATEN._softmax, ATEN.silu, ATEN.silu_backward, ATEN.sigmoid, ATEN.tanh}
    | {ATEN.gelu, ATEN.gelu_backward, ATEN.exp2, ATEN.softplus, ATEN.log_sigmoid_forward}
    | {ATEN.softmax, ATEN._log_softmax, ATEN.log_softmax, ATEN.logsumexp, ATEN.silu_}
)
_COPIES = frozenset({ATEN.copy_, ATEN._to_copy})
_NOTHING = frozenset({ATEN.empty, ATEN.new_empty, ATEN.empty_like, ATEN.empty_strided})
# Of the tensor that they look up, or add to, they touch as much as they take or give.
_LOOKS_UP = frozenset(
    {ATEN.embedding, ATEN.gather, ATEN.index, ATEN.index_select}
    | {ATEN.scatter_add_, ATEN.scatter_, ATEN.index_put_, ATEN.index_add_}
)

Form = Literal["matrix", "batched", "attention"]
"""How products come: one of two matrices, many small ones, or fused in attention."""
Layout = Literal["whole", "scattered", "mixed"]
"""How the tensors of an operation without products lie: in long runs; in runs of fewer than
`SHORT_RUN` neighbours; or they have several types, and are converted on the way."""


class Touch(NamedTuple):
    """Bytes of one tensor that an operation reads or writes, and how long ago they were touched.

    `since`: bytes that operations touched in between; infinite where it was never touched.
    """

    size: float
    since: float


class Work(NamedTuple):
    """One operation. `half`: in half precision. `side`: of its products, (m·n·k)^(1/3)."""

    half: bool = False
    flops: float = 0.0
    touched: tuple[Touch, ...] = ()
    exponentials: float = 0.0
    form: Form = "matrix"
    side: float = 0.0
    layout: Layout = "whole"

    @property
    def moved(self) -> float:
        """Bytes read and written."""
        return sum((touch.size for touch in self.touched), 0.0)


def is_free(func: Any, taken: list[Tensor], made: list[Tensor]) -> bool:
    """Whether an operation moves nothing: a view by any name, no memory of its own."""
    if func.is_view or func.overloadpacket in _NOTHING:
        return True
    if func.overloadpacket is ATEN.copy_ and _stored_at(taken[0]) == _stored_at(taken[-1]):
        return True
    held = {_key(tensor) for tensor in taken}
    return not func._schema.is_mutable and bool(made) and all(_key(x) in held for x in made)


def tensors_touched(func: Any, taken: list[Tensor], made: list[Tensor]) -> list[tuple[Tensor, int]]:
    """The tensors that an operation reads and writes, each once, and how many bytes of each."""
    once = {_stored_at(tensor): tensor for tensor in (*taken, *made)}
    sizes = [(tensor, _bytes(tensor)) for tensor in once.values()]
    if func.overloadpacket in _LOOKS_UP and len(sizes) > 1:
        (table, size), *others = sizes
        return [(table, min(size, max(other for _, other in others))), *others]
    return sizes


def work_of(
    func: Any,
    args: Any,
    given: dict[str, Any],
    out: Any,
    tensors: tuple[list[Tensor], list[Tensor]],
    touches: tuple[Touch, ...],
) -> Work:
    """What an operation that is not free did.

    `tensors`: those it took and made; `touches` as `tensors_touched` has them, with their past.
    """
    taken, made = tensors
    packet = func.overloadpacket
    half = bool(made) and made[0].dtype in (torch.bfloat16, torch.float16)
    exponentials = float(sum(tensor.numel() for tensor in made)) if packet in _EXPONENTIAL else 0.0
    if packet in _FLASH:
        flops, side = _attention(packet, args)
        return Work(half, flops, touches, 0.0, "attention", side)
    flops = _products(packet, args, given, out)
    if not flops:
        layout = _layout([*taken, *made])
        if packet not in _COPIES and len({x.dtype for x in taken if x.is_floating_point()}) > 1:
            layout = "mixed"
        return Work(half, 0.0, touches, exponentials, layout=layout)
    many = made[0].shape[0] if made[0].ndim == 3 else 1
    form: Form = "batched" if many > 1 else "matrix"
    return Work(half, flops, touches, 0.0, form, (flops / 2 / many) ** (1 / 3))


def _products(packet: Any, args: Any, given: dict[str, Any], out: Any) -> float:
    """By torch's formulas, which know no operation in place."""
    known = packet
    if packet not in flop_registry:
        known = getattr(ATEN, packet.__name__.rstrip("_"), packet)
    if known not in flop_registry:
        return 0.0
    return float(flop_registry[known](*args, **{**given, "out_val": out}))


def _attention(packet: Any, args: Any) -> tuple[float, float]:
    """Products over the pairs that are seen, half of them if causal, and a head's side."""
    forward = packet is ATEN._scaled_dot_product_flash_attention_for_cpu
    q, k = (args[0], args[1]) if forward else (args[1], args[2])
    causal = args[4] if forward and len(args) > 4 else (args[7] if not forward else False)
    heads = q.shape[0] * q.shape[1]
    pairs = heads * q.shape[2] * k.shape[2] * (0.5 if causal else 1.0)
    flops = float(_FLASH[packet] * 2 * pairs * q.shape[3])
    return flops, (pairs * q.shape[3] / heads) ** (1 / 3)


def _layout(tensors: list[Tensor]) -> Layout:
    """In which runs those of the largest shape lie together.

    As torch's loops see it: axes in the order of the last one's (the result's) strides, joined as
    long as they follow each other in every tensor.
    """
    shape = max((x.shape for x in tensors), key=lambda shape: shape.numel(), default=torch.Size())
    strides = [x.stride() for x in tensors if x.shape == shape]
    axes = [axis for axis in range(len(shape)) if shape[axis] > 1]
    if not axes:
        return "whole"
    axes.sort(key=lambda axis: strides[-1][axis])
    run = shape[axes[0]]
    for inner, outer in pairwise(axes):
        if any(stride[outer] != stride[inner] * shape[inner] for stride in strides):
            break
        run *= shape[outer]
    jumps = any(stride[axes[0]] > 1 for stride in strides)
    short = jumps or run < SHORT_RUN
    return "scattered" if short and run < shape.numel() else "whole"


def _bytes(x: Tensor) -> int:
    """What is read or written of it: an axis that is only repeated is there once."""
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())


def _key(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _stored_at(x: Tensor) -> tuple[int, int, int]:
    return _key(x), int(x.storage_offset()), x.numel()
