"""Every operation of a step as it passes: bytes that live, and work by kind.

Memory is what torch's tensors hold, storage by storage: from the operation that makes one until
nothing refers to it. What an operation takes for itself and gives back before it returns is not
seen, nor what an allocator keeps or rounds up to.
"""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

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
)


class Work(NamedTuple):
    """One operation: products in which type, bytes read and written, exponentials taken."""

    half: bool
    flops: float
    moved: float
    exponentials: float


@dataclass
class Counted:
    """What one step held and did: `peak` bytes, `lasting` ones before it, operations by `work`."""

    peak: int = 0
    lasting: int = 0
    work: Counter[Work] = field(default_factory=Counter)

    @property
    def operations(self) -> int:
        """How many there were."""
        return self.work.total()


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what is computed inside, with tensors that hold no numbers (torch's FakeTensorMode).

    Where a number would be read, it is 0 (so everything is finite), a truth value `truth`; where
    places would be looked for, there are none.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.truth = False
        self.counted = Counted()
        self._held: dict[int, weakref.ref[Any]] = {}

    def begin(self) -> None:
        """Count from here; what lives now lasts."""
        self.counted = Counted(self.live, self.live)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        try:
            out = func(*args, **given)
        except DataDependentOutputException:
            return self.truth if args[0].dtype == torch.bool else 0.0
        except DynamicOutputShapeException:
            out = args[0].new_empty((0, args[0].dim()), dtype=torch.int64)
        made = [tensor for tensor in tree_leaves(out) if isinstance(tensor, Tensor)]
        for tensor in made:
            self._see(tensor.untyped_storage())
        if not func.is_view:
            taken = [tensor for tensor in tree_leaves(args) if isinstance(tensor, Tensor)]
            self.counted.work[_work(func, args, given, taken, made, out)] += 1
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._held:
            return
        self.live += size
        self.counted.peak = max(self.counted.peak, self.live)

        def gone(_: Any) -> None:
            self.live -= size
            del self._held[key]

        self._held[key] = weakref.ref(storage, gone)


def _work(
    func: Any, args: Any, given: dict[str, Any], taken: list[Tensor], made: list[Tensor], out: Any
) -> Work:
    packet = func.overloadpacket
    half = bool(made) and made[0].dtype in (torch.bfloat16, torch.float16)
    if packet in _FLASH:
        flops, pairs = _attention(packet, args)
        return Work(half, flops, sum(map(_bytes, [*taken, *made])), pairs)
    if packet in (ATEN.empty, ATEN.new_empty, ATEN.empty_like, ATEN.empty_strided):
        return Work(False, 0.0, 0.0, 0.0)
    flops = 0.0
    if packet in flop_registry:
        flops = float(flop_registry[packet](*args, **{**given, "out_val": out}))
    exponentials = float(sum(tensor.numel() for tensor in made)) if packet in _EXPONENTIAL else 0.0
    return Work(half, flops, sum(map(_bytes, [*taken, *made])), exponentials)


def _attention(packet: Any, args: Any) -> tuple[float, float]:
    """Products over the pairs that are seen, half of them if causal, and those pairs."""
    forward = packet is ATEN._scaled_dot_product_flash_attention_for_cpu
    q, k = (args[0], args[1]) if forward else (args[1], args[2])
    causal = args[4] if forward and len(args) > 4 else (args[7] if not forward else False)
    pairs = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * (0.5 if causal else 1.0)
    return float(_FLASH[packet] * 2 * pairs * q.shape[3]), float(pairs)


def _bytes(x: Tensor) -> float:
    """What is read or written of it: an axis that is only repeated is there once."""
    return float(min(x.numel() * x.element_size(), x.untyped_storage().nbytes()))
