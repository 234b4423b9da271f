"""One process or many: torchrun's environment, values shared by all ranks, and DDP.

Every rank reads the same run directory (one machine, or a shared file system); rank 0 writes.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from normattn.errors import DivergedError, InputError, Interrupted, NormattnError
from normattn.lab.runs import Checkpoint, Checkpoints
from normattn.lab.training.state import read_shards

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process's place: `rank` of `size`, computing on `device`."""

    rank: int
    size: int
    device: torch.device

    @property
    def main(self) -> bool:
        """Whether this process writes."""
        return self.rank == 0

    def mean(self, values: Tensor) -> Tensor:
        """The mean of `values` over all ranks; the same tensor when there is one."""
        if self.size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.SUM)
            values /= self.size
        return values

    def largest(self, values: Tensor) -> Tensor:
        """The largest of each of `values` over all ranks; the same tensor when there is one."""
        if self.size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    def on_main(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 and give every rank its (picklable) result or its error.

        Whatever rank 0 raises, the other ranks raise too: an `InputError` of the same words for an
        error of ours, else a `RuntimeError` that names it.
        """
        if self.size == 1:
            return work()
        outcome: list[Any] = [None]
        failure: BaseException | None = None
        if self.main:
            try:
                outcome = [pickle.dumps((work(), None))]
            except BaseException as error:
                failure = error
                if isinstance(error, NormattnError):
                    copy: Exception = InputError(str(error))
                else:
                    copy = RuntimeError(f"the first process failed: {error!r}")
                outcome = [pickle.dumps((None, copy))]
        dist.broadcast_object_list(outcome, src=0)
        result, problem = pickle.loads(outcome[0])  # Of our own process group.
        if problem is not None:
            dist.barrier()
            raise failure or problem
        value: T = result
        return value

    def first_of(self, value: str | None) -> str | None:
        """The first value that is not None, in order of rank."""
        if self.size == 1:
            return value
        values: list[str | None] = [None] * self.size
        dist.all_gather_object(values, value)
        return next((gathered for gathered in values if gathered is not None), None)

    def any(self, flag: bool) -> bool:
        """Whether `flag` holds on any rank."""
        if self.size == 1:
            return flag
        return bool(self.mean(torch.tensor(float(flag), device=self.device)) > 0.0)

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.size > 1:
            dist.barrier()


@contextmanager
def world(device: str = "auto") -> Iterator[World]:
    """Join the process group that torchrun describes, if any, and leave it in order.

    A group that exists already is used and left alone. `device` is "auto" (CUDA where there is
    one), "cpu", "cuda" or "cuda:N".
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if dist.is_available() and dist.is_initialized():
        yield World(dist.get_rank(), dist.get_world_size(), choose_device(device))
        return
    if size == 1:
        yield World(0, 1, choose_device(device))
        return
    chosen = choose_device(device)
    _meet("nccl" if chosen.type == "cuda" else "gloo")
    try:
        yield World(dist.get_rank(), dist.get_world_size(), chosen)
        dist.barrier()
    except (DivergedError, Interrupted):
        # Every rank raises these at the same step.
        dist.barrier()
        raise
    finally:
        # Without the barriers, destroying a gloo group under load aborts ranks that still talk.
        dist.destroy_process_group()


def _meet(backend: str) -> None:
    """Join the group that torchrun describes.

    torchrun's store outlives a restart of the processes and still tells where those before it
    listened (pytorch#135712), so each attempt takes a part of its own. Agents of several machines
    count attempts apart; there TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 gives each a new store.
    """
    if os.environ.get("GROUP_WORLD_SIZE") != "1":
        dist.init_process_group(backend)
        return
    store, rank, size = next(rendezvous("env://"))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    own = PrefixStore(f"attempt-{attempt}", store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=size)


def choose_device(name: str) -> torch.device:
    """The torch device for `name`; `InputError` where the machine lacks it."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(f"unknown device {name!r}; expected auto, cpu, cuda or cuda:N") from error
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = device.index if device.index is not None else int(os.environ.get("LOCAL_RANK", "0"))
    if index >= count:
        raise InputError(f"device {name!r} asked for, but this machine offers {count} CUDA devices")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


class Parallel:
    """How a model lies on the processes, and how its state is written and read there.

    This one leaves the whole model and optimiser with each process (`ddp`, or one process).
    `searched`: whether a forward pass can be repeated outside the wrapper, module by module.
    Every method is called by all processes together.
    """

    searched = True

    def __init__(self, world: World) -> None:
        self._world = world

    @property
    def writes(self) -> bool:
        """Whether this process takes part in writing a checkpoint."""
        return self._world.main

    def wrap(self, objective: nn.Module) -> nn.Module:
        """A module whose backward pass leaves the mean of the processes' gradients."""
        return DistributedDataParallel(objective) if self._world.size > 1 else objective

    def unsynchronised(self, wrapped: nn.Module) -> AbstractContextManager[object]:
        """For micro-batches before the step's last one: gradients are exchanged once a step.

        Divided gradients are exchanged each time: to wait would hold all of them whole.
        """
        return wrapped.no_sync() if isinstance(wrapped, DistributedDataParallel) else nullcontext()

    def average(self) -> None:
        """Exchange the gradients that the wrapper leaves out."""

    def due(self, asked: Callable[[], bool]) -> bool:
        """Whether to save now, by what the main process answers."""
        return self.writes and asked()

    def finite(self, model: nn.Module) -> bool:
        """Whether what this process holds of every parameter are finite numbers only."""
        # Of a divided parameter (a DTensor) a process holds its part.
        held = (getattr(p.detach(), "_local_tensor", p.detach()) for p in model.parameters())
        return all(bool(torch.isfinite(part).all()) for part in held)

    def save(
        self,
        checkpoints: Checkpoints,
        step: int,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
    ) -> None:
        """Write a checkpoint, or begin to; the tensors may change as soon as this returns."""
        checkpoints.save(step, tensors, meta)

    def settle(self) -> None:
        """Wait until what `save` began is in its place; `InputError` where it cannot be."""

    def load(self, checkpoint: Checkpoint, model: nn.Module) -> Mapping[str, Tensor]:
        """The tensors of a checkpoint, whoever wrote it, each as this process holds it."""
        return read_shards(checkpoint, model) if checkpoint.sharded else checkpoint.tensors

    def gathered(self, model: nn.Module) -> AbstractContextManager[object]:
        """Within it, the main process holds every parameter of `model` whole."""
        return nullcontext()
