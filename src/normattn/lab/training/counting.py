"""Every operation of a step as it passes: bytes that live, and work by kind.

Memory is what torch's tensors hold, storage by storage: from the operation that makes one until
nothing refers to it. What an operation takes for itself and gives back before it returns is not
seen, nor what an allocator keeps or rounds up to.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from normattn.lab.training.work import Touch, Work, is_free, tensors_touched, work_of


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
        self._clock = 0.0
        self._touched: dict[int, float] = {}
        self._given_back: defaultdict[int, list[float]] = defaultdict(list)
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
        taken = [tensor for tensor in tree_leaves((args, given)) if isinstance(tensor, Tensor)]
        if is_free(func, taken, made):
            self.counted.work[Work()] += 1
            return out
        touches = tuple(self._touch(*touched) for touched in tensors_touched(func, taken, made))
        self.counted.work[work_of(func, args, given, out, (taken, made), touches)] += 1
        return out

    def _touch(self, tensor: Tensor, size: int) -> Touch:
        """Bytes of a tensor, and those touched since this storage was last."""
        key = tensor.untyped_storage()._cdata
        since = self._clock - self._touched.get(key, -math.inf)
        self._clock += size
        self._touched[key] = self._clock
        # To a power of two, so that operations of one kind are counted together.
        power = math.ceil(math.log2(max(since, size, 1.0))) if since < math.inf else math.inf
        return Touch(size, 2.0**power)

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._held:
            return
        # An allocator gives out again what was given back last.
        if again := self._given_back[size]:
            self._touched[key] = again.pop()
        self.live += size
        self.counted.peak = max(self.counted.peak, self.live)

        def gone(_: Any) -> None:
            self.live -= size
            del self._held[key]
            if key in self._touched:
                self._given_back[size].append(self._touched.pop(key))

        self._held[key] = weakref.ref(storage, gone)
