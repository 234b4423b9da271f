"""Distributed training: the process group of torchrun, collectives, and DDP.

Every rank reads the same run directory, on one machine or a shared file system. Rank 0 writes.
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
Meta = Mapping[str, Any]


@dataclass(frozen=True)
class World:
    """This process in its group: `rank` of `size`, computing on `device`."""

    rank: int
    size: int
    device: torch.device

    @property
    def main(self) -> bool:
        """Whether this is rank 0, which writes files."""
        return self.rank == 0

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean of `values` over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.SUM)
            values /= self.size
        return values

    def max(self, values: Tensor) -> Tensor:
        """Return the elementwise maximum of `values` over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    def on_main(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0; return its (picklable) result, or raise its error, on every rank.

        Other ranks raise an `InputError` with the same message for a `NormattnError`, and a
        `RuntimeError` for any other exception.
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
        result, remote_failure = pickle.loads(outcome[0])  # From the same process group.
        if remote_failure is not None:
            dist.barrier()
            raise failure or remote_failure
        value: T = result
        return value

    def on_all(self, work: Callable[[], T]) -> T:
        """Run `work` on each rank; where it fails on one, the others raise a `NormattnError`."""
        failure: Exception | None = None
        try:
            result = work()
        except Exception as error:
            failure = error
        said = self.first_not_none(None if failure is None else str(failure) or repr(failure))
        if said is not None:
            if self.size > 1:
                dist.barrier()
            raise failure or NormattnError(f"another process of the group failed: {said}")
        return result

    def first_not_none(self, value: str | None) -> str | None:
        """Return the first value that is not None, in order of rank."""
        if self.size == 1:
            return value
        values: list[str | None] = [None] * self.size
        dist.all_gather_object(values, value)
        return next((v for v in values if v is not None), None)

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is true on any rank."""
        if self.size == 1:
            return flag
        return bool(self.mean(torch.tensor(float(flag), device=self.device)) > 0.0)


@contextmanager
def process_group(device: str = "auto") -> Iterator[World]:
    """Join torchrun's process group inside, if there is one, and destroy it afterwards.

    An existing group is used and not destroyed. `device` is "auto" (CUDA if available), "cpu",
    "cuda" or "cuda:N". Raises `NormattnError` if another process ends before its work is done.
    """
    try:
        with _joined_group(device) as world:
            yield world
    except RuntimeError as error:
        # gloo's errors have no class of their own; they name its source file.
        if not (isinstance(error, dist.DistError) or "gloo/transport" in str(error)):
            raise
        raise NormattnError(
            "another process of the group ended: see what it printed; rerun the command to resume"
        ) from error


@contextmanager
def _joined_group(device: str) -> Iterator[World]:
    if dist.is_available() and dist.is_initialized():
        yield World(dist.get_rank(), dist.get_world_size(), choose_device(device))
        return
    chosen, size = choose_device(device), os.environ.get("WORLD_SIZE", "1")
    if size == "1":
        yield World(0, 1, chosen)
        return
    try:
        backend = "nccl" if chosen.type == "cuda" else "gloo"
        if os.environ.get("GROUP_WORLD_SIZE") == "1":
            # torchrun's store survives a restart and still has the addresses of the former
            # processes (pytorch#135712). Agents of several machines count restarts separately;
            # there, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 gives a new store each time.
            store, rank, ranks = next(rendezvous("env://"))
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = PrefixStore(f"attempt-{attempt}", store)
            dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
        else:
            dist.init_process_group(backend)
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"WORLD_SIZE is {size}, but the processes cannot be joined: {reason}; start them with "
            "torchrun, or unset WORLD_SIZE"
        ) from error
    try:
        yield World(dist.get_rank(), dist.get_world_size(), chosen)
        dist.barrier()
    except (DivergedError, Interrupted):
        # Every rank raises these at the same step.
        dist.barrier()
        raise
    finally:
        # Without the barriers, destroying a gloo group under load aborts ranks still communicating.
        dist.destroy_process_group()


def choose_device(name: str) -> torch.device:
    """Return the torch device for `name`; `InputError` if the machine does not have it."""
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
    """Distributes a model over processes; saves and loads its state.

    Here every process holds the full model and optimiser (`ddp`, or one process). All processes
    call each method together.
    """

    sharded = False
    """Whether each process holds and writes only its shards of the parameters and moments."""

    def __init__(self, world: World) -> None:
        self._world = world

    @property
    def writes(self) -> bool:
        """Whether this process writes to checkpoints."""
        return self.sharded or self._world.main

    def wrap(self, objective: nn.Module) -> nn.Module:
        """Wrap a module so that its backward pass averages gradients over processes."""
        return DistributedDataParallel(objective) if self._world.size > 1 else objective

    def no_sync(self, wrapped: nn.Module) -> AbstractContextManager[object]:
        """Skip averaging for all micro-batches of a step but the last.

        Sharded gradients are exchanged each time, because accumulating them needs full gradients.
        """
        return wrapped.no_sync() if isinstance(wrapped, DistributedDataParallel) else nullcontext()

    def average_unwrapped(self) -> None:
        """Average the gradients of parameters that the wrapper leaves out."""

    def decide(self, condition: Callable[[], bool]) -> bool:
        """Return the main process's answer to `condition` on the processes that write."""
        answer = self._world.main and condition()
        return self._world.any(answer) if self.sharded else answer

    def is_finite(self, model: nn.Module) -> bool:
        """Return whether all parameters are finite on the processes that write."""
        # A process has only its shard of a DTensor.
        local = (getattr(p.detach(), "_local_tensor", p.detach()) for p in model.parameters())
        finite = all(bool(torch.isfinite(tensor).all()) for tensor in local)
        return not self._world.any(not finite) if self.sharded else finite

    def save(
        self, checkpoints: Checkpoints, step: int, tensors: Mapping[str, Tensor], meta: Meta
    ) -> None:
        """Write a checkpoint, or start to; the tensors may change as soon as this returns."""
        checkpoints.save(step, tensors, meta)

    def wait(self) -> None:
        """Wait until `save` has finished; raise its error on all processes."""

    def load(self, checkpoint: Checkpoint, model: nn.Module) -> Mapping[str, Tensor]:
        """Return the tensors of a checkpoint as this process holds them, whatever wrote it."""
        if self.sharded or checkpoint.sharded:
            return read_shards(checkpoint, model)
        return checkpoint.tensors

    def full_parameters(self, model: nn.Module) -> AbstractContextManager[object]:
        """Inside, the main process holds all parameters of `model` in full."""
        return nullcontext()
