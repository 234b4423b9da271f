"""Several processes of one group on this machine, begun without importing torch anew."""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import apart
from normattn.errors import InputError, NormattnError
from normattn.lab.training import MaskedConfig, StepReport, TrainingConfig
from normattn.lab.training.distributed import World
from normattn.lab.training.step import TrainStep

from .settings import changed, run, small

STEPS = 8


def curve(**changes: Any) -> TrainingConfig:
    """Of single numbers (ReZero), vectors, and matrices whose rows do not divide by four."""
    model = {"dim": 20, "placement": "ReZero"}
    return small(**{"steps": STEPS, "model": model, "clip": 0.5, **changes})


def together(size: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `work(rank, *arguments)` gives on each of `size` processes of a gloo group.

    An error of ours comes back as its class and what it says, and nothing of a process that died.
    """
    context = apart.context()
    with tempfile.TemporaryDirectory() as folder:
        ends, children = [], []
        for rank in range(size):
            mine, its = context.Pipe(duplex=False)
            child = context.Process(target=_join, args=(its, rank, size, folder, work, arguments))
            child.start()
            its.close()
            ends.append(mine)
            children.append(child)
        try:
            assert all(end.poll(60) for end in ends), "a process of the group hangs"
            return [_received(end) for end in ends]
        finally:
            for child in children:
                child.join(10)
                child.kill()


def _received(end: Any) -> Any:
    try:
        return end.recv()
    except EOFError:
        return None


def _join(
    end: Any, rank: int, size: int, folder: str, work: Callable[..., Any], arguments: Any
) -> None:
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    try:
        end.send(work(rank, *arguments))
    except NormattnError as error:
        end.send((type(error), str(error)))
    dist.barrier()
    dist.destroy_process_group()


def go(rank: int, out: Path, settings: Any, stop: int | None = None) -> None:
    """Train on this process of the group, the first of which is asked to stop after `stop` steps.

    Its `Interrupted` then comes back from all of them.
    """
    run(settings, out, stop if rank == 0 else None)


def hold(rank: int, parallel: str) -> tuple[int, list[float]]:
    """Bytes of weights, gradients and moments here after two steps, and the losses of those."""
    settings, size = curve(parallel=parallel), torch.distributed.get_world_size()
    place = World(rank, size, torch.device("cpu"))
    task = settings.task(settings.prepare(), place.device, size)
    stepper = TrainStep(task, settings, place, lambda: False)
    losses = [stepper.step(step).loss for step in (1, 2)]
    states = stepper.optimiser.state()
    tensors = [t for name, t in states.items() if not name.endswith("/step")]
    for parameter in task.model.parameters():
        assert parameter.grad is not None
        tensors += [parameter, parameter.grad]
    stepper.close()
    return sum(_local(each).numel() * 4 for each in tensors), losses


def _local(tensor: Tensor) -> Tensor:
    return getattr(tensor.detach(), "_local_tensor", tensor)


def diverge_on_the_second(rank: int, out: Path) -> None:
    """From step 3 the second process's loss is NaN; BatchNorm's statistics are of both."""
    calls = []

    class Bad(MaskedConfig):
        def loss(self, model: Any, batch: Any, shards: int) -> Any:
            loss, metrics = super().loss(model, batch, shards)
            calls.append(loss)
            return loss * (float("nan") if rank == 1 and len(calls) > 4 else 1.0), metrics

    run(Bad.parse(changed(accumulate=2, model={"score": "QKBatchNorm"})), out)


def without_data_on_the_second(rank: int, out: Path) -> None:
    """The second process cannot read its data."""

    class Unreadable(TrainingConfig):
        def prepare(self) -> Any:
            if rank == 1:
                raise InputError("there is no such text")
            return super().prepare()

    run(Unreadable.parse(changed(parallel="fsdp")), out)


def die_in_a_step(rank: int, out: Path, parallel: str) -> None:
    """The second process dies while the first one is in a step."""
    calls = []

    class Dying(TrainingConfig):
        def loss(self, model: Any, batch: Any, shards: int) -> Any:
            calls.append(batch)
            if rank == 1 and len(calls) == 3:
                os._exit(9)
            return super().loss(model, batch, shards)

    run(Dying.parse(changed(parallel=parallel)), out)


def without_room(rank: int, out: Path) -> None:
    """The second process cannot write a file of more than a kilobyte."""
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))
    run(curve(parallel="fsdp"), out)


def caught(call: Callable[[], object]) -> tuple[str, str]:
    try:
        call()
    except BaseException as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def fail_on_main(rank: int, kind: type[BaseException], out: Path) -> tuple[str, str]:
    """The error that each process gets where the first one's work raises `kind`."""

    def fail() -> None:
        raise kind("the disk is gone")

    size = torch.distributed.get_world_size()
    return caught(lambda: World(rank, size, torch.device("cpu")).on_main(fail))


def fail_at_three(report: StepReport) -> None:
    """Follow a training on the first process, and end it at step 3."""
    if report.step == 3:
        raise KeyError("the disk is gone")


def fail_while_others_train(rank: int, parallel: str, out: Path) -> tuple[str, str]:
    return caught(lambda: run(curve(parallel=parallel), out, on_step=fail_at_three))
