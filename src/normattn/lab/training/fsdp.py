"""A model of which every process holds a part (FSDP2), and checkpoints written in parts.

Weights, gradients and moments are divided by axis 0, 1/N each. The weights of a block are gathered
when its turn comes, forward and backward, and let go afterwards; embedding, head and norms stay
gathered through a step. Checkpoints are torch.distributed.checkpoint's with safetensors parts (each
file's header says where its rows are in the whole): torch's own format keeps its index as a
pickle, and to read a pickle is to run what it says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from normattn.io import explain_os_errors
from normattn.lab.runs import Checkpoint, Checkpoints
from normattn.lab.training.distributed import Parallel, World
from normattn.lab.training.sharding import replaced, whole
from normattn.lab.training.state import read_shards
from normattn.models.transformer import Blocks


class Sharded(Parallel):
    """`fsdp`: every process holds a part; a parameter that is one number is held whole by each.

    Under bf16 a block's weights are gathered in bf16, for half the bytes (autocast would keep a
    copy of each until the backward pass), and gradients are summed in fp32; what a process holds
    is fp32.
    """

    searched = False

    def __init__(self, world: World, precision: str) -> None:
        super().__init__(world)
        self._precision = precision
        self._numbers: list[nn.Parameter] = []
        # Of its own: the training's messages do not wait for those of a checkpoint.
        self._group = dist.new_group(backend="gloo")
        self._finisher = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[Any] | None = None

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

    def average(self) -> None:
        """The gradients of single numbers, which FSDP2 does not divide."""
        gradients = [p.grad for p in self._numbers if p.grad is not None]
        if gradients:
            means = self._world.mean(torch.stack(gradients))
            for gradient, mean in zip(gradients, means, strict=True):
                gradient.copy_(mean)

    def due(self, asked: Callable[[], bool]) -> bool:
        """The writing process's clock decides for all."""
        return self._world.any(self._world.main and asked())

    def finite(self, model: nn.Module) -> bool:
        """No process holds a part that is not."""
        return not self._world.any(not super().finite(model))

    def save(
        self,
        checkpoints: Checkpoints,
        step: int,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
    ) -> None:
        """Copy the parts and write them while training goes on; `settle` waits for it.

        One that was begun before is finished first. Nothing is lost by that: a checkpoint gets its
        name only when all of it is on the disk with its checksums, and until then the one before
        it stands.
        """
        self.settle()
        folder = self._world.on_main(lambda: checkpoints.begin(step))
        writing = async_save(
            {name: tensor.detach() for name, tensor in tensors.items()},
            storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True),
            process_group=self._group,
        )
        assert isinstance(writing, Future)
        described = dict(meta)

        def finish() -> None:
            """Wait for all parts, then give the checkpoint its name."""
            with explain_os_errors(folder):
                try:
                    writing.result()
                except CheckpointException as error:
                    # Of the errors of all processes the first one is raised.
                    raise next(iter(error.failures.values()))[0] from error
            checkpoints.finish(folder, step, described)

        self._pending = self._finisher.submit(finish) if self._world.main else writing

    def settle(self) -> None:
        """Wait until what `save` began is in its place; `InputError` on all where it cannot be."""
        pending, self._pending = self._pending, None
        if pending is not None:
            if not self._world.main:
                # What went wrong anywhere, the writing process says.
                pending.exception()
            self._world.on_main(pending.result)

    def load(self, checkpoint: Checkpoint, model: nn.Module) -> Mapping[str, Tensor]:
        """This process's part of each tensor, whoever wrote them."""
        return read_shards(checkpoint, model)

    @contextmanager
    def gathered(self, model: nn.Module) -> Iterator[None]:
        """One parameter after another is put together; the writing process keeps it, on the CPU."""

        def kept(parameter: nn.Parameter) -> Tensor:
            full = whole(parameter.detach())
            return full.cpu() if self._world.main else full.new_empty(0)

        with replaced(model, kept):
            yield
