"""Estimate parameters, memory and FLOPs of a training before it starts."""

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
    """Cost of a training or evaluation: tokens trained on, tokens scored, FLOPs, parameters.

    `activations` is the least number of activations stored for each token: the inputs of blocks.
    """

    trained: int = 0
    scored: int = 0
    flops: float = 0.0
    parameters: int = 0
    activations: int = 0


@dataclass(frozen=True)
class Plan:
    """A lower bound on what each process of a training needs in a step.

    `tokens`: of a micro-batch. `state`: bytes of weights, gradients and moments. `activations`:
    bytes of the blocks' inputs for a micro-batch; without activation checkpointing a step needs
    several times as much. `flops`: of a step. `checkpoint`: bytes of one, over all processes.
    """

    parameters: int
    tokens: int
    state: float
    activations: float
    flops: float
    checkpoint: float

    @property
    def memory(self) -> float:
        """Least bytes of memory of a process."""
        return self.state + self.activations


def make_plan(config: LoopConfig, cost: Cost, processes: int = 1) -> Plan:
    """Return the plan of a training of this cost on a number of processes.

    The state is four bytes for each weight, its gradient and each of the optimiser's moments. Under
    fsdp a process has 1/N of it, but at least all weights, before it shards them.
    """
    moments = config.optimiser.moments
    copies = 2.0 + moments
    if config.parallel == "fsdp":
        copies = max(copies / processes, 1.0)
    tokens = cost.trained / config.steps / processes / config.accumulate
    activation_bytes = BYTES if config.precision == "fp32" else BYTES // 2
    return Plan(
        cost.parameters,
        round(tokens),
        cost.parameters * BYTES * copies,
        float(tokens * cost.activations * activation_bytes),
        cost.flops / config.steps / processes,
        cost.parameters * BYTES * (1.0 + moments),
    )


def describe_plan(
    config: LoopConfig, cost: Cost, device: str, nodes: int = 1, per_node: int = 1
) -> str:
    """Describe the plan on nodes × per_node devices; `InputError` for an unknown device."""
    if device != HERE and device not in GPU_MEMORY:
        known = ", ".join((*GPU_MEMORY, HERE))
        raise InputError(f"unknown gpu {device!r}; expected one of {known}")
    plan = make_plan(config, cost, nodes * per_node)
    available = GPU_MEMORY.get(device) or float(memory_of(torch.device("cpu")))
    excess = "" if plan.memory <= available else ": more than it has"
    return (
        f"{nodes} × {per_node} {device}: at least {_size(plan.memory)} of {_size(available)} each "
        f"(weights, gradients and moments {_size(plan.state)}, inputs of the blocks "
        f"{_size(plan.activations)}){excess}\n"
        f"a step: {plan.flops:.3g} FLOPs on each; a checkpoint: {_size(plan.checkpoint)}"
    )


def check_memory(cost: Cost, config: LoopConfig, world: World) -> None:
    """Raise `InputError` if a training needs more memory than the device has."""
    processes = 1
    if world.device.type != "cuda":
        # Processes on one machine share its memory; a GPU has one process.
        processes = min(world.size, int(os.environ.get("LOCAL_WORLD_SIZE", world.size)))
    plan, available = make_plan(config, cost, world.size), float(memory_of(world.device))
    if processes * plan.memory > available:
        raise InputError(
            f"this training run takes at least {_size(processes * plan.memory)} of memory "
            f"({plan.parameters:,} parameters with their gradients and moments, {plan.tokens:,} "
            f"tokens in a micro-batch), and {world.device} has {_size(available)}: choose a "
            "smaller model or vocabulary, or a smaller batch_size"
        )


def memory_of(device: torch.device) -> int:
    """Return the memory of a GPU, or the main memory that this process may use, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    limits = [int(psutil.virtual_memory().total)]
    process = psutil.Process()
    if hasattr(process, "rlimit"):  # Not on every system.
        soft = (process.rlimit(kind)[0] for kind in (psutil.RLIMIT_AS, psutil.RLIMIT_DATA))
        limits += [int(limit) for limit in soft if limit != psutil.RLIM_INFINITY]
    # Without a limit the file contains "max", or does not exist.
    with suppress(OSError, ValueError):
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(limits)


def _size(count: float) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.1f} MB"
