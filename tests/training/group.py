"""Several processes of one group on this machine, begun without importing torch anew."""

from __future__ import annotations

import itertools
import resource
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import apart
from normattn.errors import NormattnError
from normattn.lab.training import StepReport, TrainingResult, train_model
from normattn.lab.training.distributed import World
from normattn.lab.training.step import TrainStep

from .settings import small
from .toy import ToyTask, run

STEPS = 8
# Single numbers (ReZero), vectors, and matrices whose rows do not divide by four.
MODEL: dict[str, Any] = {"dim": 20, "layers": 2, "heads": 2, "train_length": 16}
MODEL |= {"score": "KNA-logn", "placement": "ReZero"}
CURVE: dict[str, Any] = {"steps": STEPS, "model": MODEL, "clip": 0.5}
FSDP = {**CURVE, "parallel": "fsdp"}


def together(size: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `work(rank, *arguments)` gives on each of `size` processes of a gloo group.

    An error of ours comes back as its class and what it says.
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
            return [end.recv() for end in ends]
        finally:
            for child in children:
                child.join(10)
                child.kill()


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


def go(rank: int, out: Path, changes: Mapping[str, Any], stop: int | None = None) -> TrainingResult:
    """Train on this process of the group; asked to stop after `stop` steps, it says Interrupted."""
    asked = itertools.count(1)
    return train_model(
        small(**changes),
        out,
        show_progress=False,
        should_stop=lambda: next(asked) == stop and rank == 0,
    )


def go_with(rank: int, settings: Any, out: Path) -> None:
    """Train these settings on this process of the group."""
    train_model(settings, out, show_progress=False)


def hold(rank: int, parallel: str) -> tuple[int, list[float]]:
    """Bytes of weights, gradients and moments here after two steps, and the losses of those."""
    size = torch.distributed.get_world_size()
    settings = small(**CURVE, parallel=parallel)
    task = settings.task(settings.prepare(), torch.device("cpu"), size)
    place = World(rank, size, torch.device("cpu"))
    stepper = TrainStep(task, settings, place, lambda: False)
    curve = [stepper.step(step).loss for step in (1, 2)]
    states = stepper.optimiser.state()
    tensors = [t for name, t in states.items() if not name.endswith("/step")]
    for parameter in task.model.parameters():
        assert parameter.grad is not None
        tensors += [parameter, parameter.grad]
    stepper.close()
    return sum(_local(each).numel() * 4 for each in tensors), curve


def _local(tensor: Tensor) -> Tensor:
    return getattr(tensor.detach(), "_local_tensor", tensor)


class Bad(ToyTask):
    """Its loss is no number from step 4 on."""

    def batch(self, step: int, share: int, shares: int) -> Tensor:
        self._factor = 1.0 if step < 4 else float("nan")
        return super().batch(step, share, shares)

    def loss(self, batch: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        loss, metrics = super().loss(batch)
        return loss * self._factor, metrics


def diverge(rank: int, out: Path) -> None:
    run(out, task=Bad, steps=STEPS, parallel="fsdp")


def without_room(rank: int, out: Path) -> TrainingResult:
    """The second process cannot write a file of more than a kilobyte."""
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))
    return go(rank, out, FSDP)


def fail_on_main(rank: int, kind: type[BaseException]) -> tuple[str, str]:
    """The error that each process gets where the first one's work raises `kind`."""

    def fail() -> None:
        raise kind("the disk is gone")

    try:
        World(rank, torch.distributed.get_world_size(), torch.device("cpu")).on_main(fail)
    except BaseException as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def fail_at_three(report: StepReport) -> None:
    """Follow a training on the first process, and end it at step 3."""
    if report.step == 3:
        raise KeyError("the disk is gone")


def fail_while_others_train(rank: int, out: Path, parallel: str) -> tuple[str, str]:
    try:
        train_model(
            small(**CURVE, parallel=parallel), out, show_progress=False, on_step=fail_at_three
        )
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""
