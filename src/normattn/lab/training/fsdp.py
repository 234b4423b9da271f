"""Sharded training with FSDP2, and sharded checkpoints.

Weights, gradients and moments are sharded along axis 0. The weights of a block are gathered for its
forward and backward passes and freed afterwards; embedding, head and norms stay gathered through a
step. Checkpoints are torch.distributed.checkpoint's, with safetensors shards: the default format
has a pickled index, and unpickling executes code.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
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
from torch.distributed.fsdp import (
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from normattn.io import explain_os_errors
from normattn.lab.runs import Checkpoints
from normattn.lab.training.distributed import Meta, Parallel, World
from normattn.lab.training.sharding import full_tensor, replace_sharded_parameters
from normattn.models.transformer import Blocks


class Sharded(Parallel):
    """`fsdp`: every process holds a shard of each parameter; scalars are replicated.

    Under bf16 a block's weights are gathered in bf16, for half the bytes (autocast would keep a
    copy of each until the backward pass). Gradients are summed in fp32, and shards are fp32.
    """

    sharded = True

    def __init__(self, world: World, precision: str) -> None:
        super().__init__(world)
        self._precision = precision
        self._scalars: list[nn.Parameter] = []
        # A separate group: training does not wait for the messages of a checkpoint.
        self._group = dist.new_group(backend="gloo")
        self._executor = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[Any] | None = None

    def wrap(self, objective: nn.Module) -> nn.Module:
        """Shard the parameters: those of each block together, then all others."""
        # As in DistributedDataParallel, all start with the main process's values.
        for tensor in (*objective.parameters(), *objective.buffers()):
            dist.broadcast(tensor.detach(), src=0)
        mesh = init_device_mesh(self._world.device.type, (self._world.size,))
        self._scalars = [p for p in objective.parameters() if p.ndim == 0]
        scalars = set(self._scalars)
        half = torch.bfloat16 if self._precision == "bf16" else None
        policy = MixedPrecisionPolicy(half, torch.float32, cast_forward_inputs=False)
        for module in objective.modules():
            if isinstance(module, Blocks):
                for block in module:
                    fully_shard(block, mesh=mesh, mp_policy=policy, ignored_params=scalars)
                    register_fsdp_forward_method(block, "remember")
        fully_shard(objective, mesh=mesh, ignored_params=scalars)
        return objective

    def average_unwrapped(self) -> None:
        """Average the gradients of scalars, which FSDP2 does not shard."""
        gradients = [p.grad for p in self._scalars if p.grad is not None]
        if gradients:
            means = self._world.mean(torch.stack(gradients))
            for gradient, mean in zip(gradients, means, strict=True):
                gradient.copy_(mean)

    def save(
        self, checkpoints: Checkpoints, step: int, tensors: Mapping[str, Tensor], meta: Meta
    ) -> None:
        """Copy the shards and write them in the background; `wait` waits for the end.

        An earlier save is finished first. A checkpoint gets its name only when all of it is on the
        disk with its checksums. Until then the previous one is the latest.
        """
        self.wait()
        folder = self._world.on_main(lambda: checkpoints.begin(step))
        writing = async_save(
            {name: tensor.detach() for name, tensor in tensors.items()},
            storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True),
            process_group=self._group,
        )
        assert isinstance(writing, Future)
        meta = dict(meta)

        def finish() -> None:
            with explain_os_errors(folder):
                try:
                    writing.result()
                except CheckpointException as error:
                    shutil.rmtree(folder, ignore_errors=True)  # All processes have ended writing.
                    # Raise the first error of all processes.
                    raise next(iter(error.failures.values()))[0] from error
            checkpoints.finish(folder, step, meta)

        self._pending = self._executor.submit(finish) if self._world.main else writing

    def wait(self) -> None:
        """Wait until `save` has finished; raise its error on all processes."""
        pending, self._pending = self._pending, None
        if pending is not None:
            if not self._world.main:
                # The main process raises the errors of all processes.
                pending.exception()
            self._world.on_main(pending.result)

    @contextmanager
    def full_parameters(self, model: nn.Module) -> Iterator[None]:
        """Gather one parameter after another; the main process keeps it on the CPU."""

        def gather(parameter: nn.Parameter) -> Tensor:
            full = full_tensor(parameter.detach())
            return full.cpu() if self._world.main else full.new_empty(0)

        with replace_sharded_parameters(model, gather):
            yield
