"""A model of which every process holds a part (FSDP2): weights, gradients and moments, each 1/N.

Every axis 0 is divided. The weights of a block are gathered when its turn comes, forward and
backward, and let go afterwards; embedding, head and norms stay gathered through a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from normattn.lab.runs import Checkpoint, Checkpoints
from normattn.lab.training.distribution import World
from normattn.lab.training.parallel import Parallel
from normattn.lab.training.shards import ShardWriter, read_shards
from normattn.lab.training.state import all_finite
from normattn.models.transformer import Blocks


class Sharded(Parallel):
    """`fsdp`: see the top. A parameter that is one number is held whole by every process.

    Under bf16 a block's weights are gathered in bf16, for half the bytes (autocast would keep a
    copy of each until the backward pass), and gradients are summed in fp32; what a process holds
    is fp32.
    """

    searched = False

    def __init__(self, world: World, precision: str) -> None:
        super().__init__(world)
        self._precision = precision
        self._numbers: list[nn.Parameter] = []
        self._writer = ShardWriter(world)

    @property
    def writes(self) -> bool:
        """Each its part."""
        return True

    def wrap(self, objective: nn.Module) -> nn.Module:
        """Divide the parameters: those of each block together, then all others."""
        # As DistributedDataParallel does: all begin with what the main process drew.
        for tensor in (*objective.parameters(), *objective.buffers()):
            dist.broadcast(tensor.detach(), src=0)
        mesh = init_device_mesh(self._world.device.type, (self._world.size,))
        self._numbers = [p for p in objective.parameters() if p.ndim == 0]
        whole = set(self._numbers)
        half = torch.bfloat16 if self._precision == "bf16" else None
        policy = MixedPrecisionPolicy(half, torch.float32, cast_forward_inputs=False)
        for module in objective.modules():
            if isinstance(module, Blocks):
                for block in module:
                    fully_shard(block, mesh=mesh, mp_policy=policy, ignored_params=whole)
        fully_shard(objective, mesh=mesh, ignored_params=whole)
        return objective

    def unsynchronised(self, wrapped: nn.Module) -> AbstractContextManager[object]:
        """Every micro-batch is exchanged: to wait would hold all gradients whole."""
        return nullcontext()

    def average(self) -> None:
        """The gradients of single numbers, which FSDP2 does not divide."""
        gradients = [p.grad for p in self._numbers if p.grad is not None]
        if gradients:
            for gradient, mean in zip(
                gradients, self._world.mean(torch.stack(gradients)), strict=True
            ):
                gradient.copy_(mean)

    def whole(self, value: Tensor) -> Tensor:
        """The value of all parts."""
        return value.full_tensor() if isinstance(value, DTensor) else value

    def due(self, asked: Callable[[], bool]) -> bool:
        """The writing process's clock decides for all."""
        return self._world.any(self._world.main and asked())

    def finite(self, model: nn.Module) -> bool:
        """No process holds a part that is not."""
        return not self._world.any(not all_finite(model))

    def save(
        self,
        checkpoints: Checkpoints,
        step: int,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
    ) -> None:
        """Copy the parts and write them while training goes on; `settle` waits for it."""
        self._writer.begin(checkpoints, step, tensors, meta)

    def settle(self) -> None:
        """Wait for what `save` began."""
        self._writer.settle()

    def load(self, checkpoint: Checkpoint, model: nn.Module) -> Mapping[str, Tensor]:
        """This process's part of each tensor, whoever wrote them."""
        return read_shards(checkpoint, model)

    @contextmanager
    def gathered(self, model: nn.Module) -> Iterator[None]:
        """One parameter after another is put together; the writing process keeps it, on the CPU."""
        held = [
            (module, name, parameter)
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if isinstance(parameter, nn.Parameter) and isinstance(parameter.data, DTensor)
        ]
        made: dict[Tensor, nn.Parameter] = {}
        for module, name, parameter in held:
            if parameter not in made:
                full = self.whole(parameter.detach())
                kept = full.cpu() if self._world.main else full.new_empty(0)
                made[parameter] = nn.Parameter(kept, parameter.requires_grad)
            module._parameters[name] = made[parameter]
        try:
            yield
        finally:
            for module, name, parameter in held:
                module._parameters[name] = parameter
