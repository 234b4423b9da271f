"""What a training takes, before it is begun: parameters, memory and FLOPs."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from normattn.errors import InputError
from normattn.lab.training.config import LoopConfig
from normattn.lab.training.distributed import World

BYTES = 4
HERE = "here"
GPU_MEMORY = {"a100": 80e9, "h100": 80e9, "h200": 141e9}
"""Bytes of memory by NVIDIA's data sheets (SXM)."""


@dataclass(frozen=True)
class Cost:
    """Tokens trained on and scored, floating-point operations, and learned numbers of a model.

    `kept` counts the numbers that a token leaves for the backward pass, at least: what enters each
    block.
    """

    trained: int = 0
    scored: int = 0
    flops: float = 0.0
    parameters: int = 0
    kept: int = 0


@dataclass(frozen=True)
class Plan:
    """What each process of a training takes in a step, at least.

    `state`: bytes of weights, gradients and moments. `activations`: bytes of what enters each block
    for every token of a micro-batch, which the backward pass reads again; without activation
    checkpointing a step holds several times as much. `flops` of a step. `checkpoint`: bytes of one.
    """

    parameters: int
    tokens: int
    state: float
    activations: float
    flops: float
    checkpoint: float

    @property
    def memory(self) -> float:
        """Bytes that a process cannot do without."""
        return self.state + self.activations


def make_plan(config: LoopConfig, cost: Cost, processes: int = 1) -> Plan:
    """The plan of a training of this cost on so many processes.

    State is four bytes for each weight, its gradient and each of the optimiser's moments. Under
    fsdp a process keeps its share of them, and makes the weights whole before it divides them.
    """
    moments = config.optimiser.moments
    held = 2.0 + moments
    if config.parallel == "fsdp":
        held = max(held / processes, 1.0)
    tokens = cost.trained / config.steps / processes / config.accumulate
    number = BYTES if config.precision == "fp32" else BYTES // 2
    return Plan(
        cost.parameters,
        round(tokens),
        cost.parameters * BYTES * held,
        float(tokens * cost.kept * number),
        cost.flops / config.steps / processes,
        cost.parameters * BYTES * (1.0 + moments),
    )


def describe_plan(
    config: LoopConfig, cost: Cost, device: str, nodes: int = 1, per_node: int = 1
) -> str:
    """The plan on nodes × per_node devices as two lines; `InputError` for an unknown device."""
    if device != HERE and device not in GPU_MEMORY:
        known = ", ".join((*GPU_MEMORY, HERE))
        raise InputError(f"unknown gpu {device!r}; expected one of {known}")
    plan = make_plan(config, cost, nodes * per_node)
    has = GPU_MEMORY.get(device) or float(memory_of(torch.device("cpu")))
    room = "" if plan.memory <= has else ": more than it has"
    return (
        f"{nodes} × {per_node} {device}: at least {_size(plan.memory)} of {_size(has)} each "
        f"(weights, gradients and moments {_size(plan.state)}, inputs of the blocks "
        f"{_size(plan.activations)}){room}\n"
        f"a step: {plan.flops:.3g} FLOPs on each; a checkpoint: {_size(plan.checkpoint)}"
    )


def check_memory(cost: Cost, config: LoopConfig, world: World) -> None:
    """Raise `InputError` where a training needs more memory than the device has."""
    here = 1
    if world.device.type != "cuda":
        # Processes on one machine share its memory; a GPU has one.
        here = min(world.size, int(os.environ.get("LOCAL_WORLD_SIZE", world.size)))
    plan, has = make_plan(config, cost, world.size), float(memory_of(world.device))
    if here * plan.memory > has:
        raise InputError(
            f"this training run takes at least {_size(here * plan.memory)} of memory "
            f"({plan.parameters:,} parameters with their gradients and moments, {plan.tokens:,} "
            f"tokens in a micro-batch), and {world.device} has {_size(has)}: choose a smaller "
            "model or vocabulary, or a smaller batch_size"
        )


def memory_of(device: torch.device) -> int:
    """Bytes of a GPU, or those of the machine that this process may take."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    limits = [int(psutil.virtual_memory().total)]
    own = psutil.Process()
    if hasattr(own, "rlimit"):  # Not every system has them.
        soft = (own.rlimit(kind)[0] for kind in (psutil.RLIMIT_AS, psutil.RLIMIT_DATA))
        limits += [int(limit) for limit in soft if limit != psutil.RLIM_INFINITY]
    # A container without a limit says "max", or has no such file.
    with suppress(OSError, ValueError):
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(limits)


def _size(count: float) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.1f} MB"
