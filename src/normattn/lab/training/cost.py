"""What a training costs, and whether the machine has the memory for it."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from normattn.errors import InputError
from normattn.lab.training.distribution import World
from normattn.lab.training.loop_config import LoopConfig

BYTES = 4
_CGROUP = Path("/sys/fs/cgroup/memory.max")


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


def least_bytes(cost: Cost, config: LoopConfig, processes: int = 1) -> float:
    """Bytes that a training of this cost cannot do without.

    Four for each weight, its gradient and each of the optimiser's moments, and for every token of a
    micro-batch what enters each block (two under bf16), which the backward pass reads again. What
    is really taken is several times more where activations prevail. Under fsdp a process keeps its
    share of the former, and makes the weights whole before it divides them.
    """
    held = 2.0 + config.optimiser.moments
    if config.parallel == "fsdp":
        held = max(held / processes, 1.0)
    tokens = cost.trained / config.steps / config.accumulate / processes
    activations = tokens * cost.kept * (BYTES // 2 if config.precision == "bf16" else BYTES)
    return cost.parameters * BYTES * held + activations


def check_memory(cost: Cost, config: LoopConfig, world: World) -> None:
    """Raise `InputError` where `least_bytes` is more than the device has."""
    here = 1
    if world.device.type != "cuda":
        # Processes on one machine share its memory; a GPU has one.
        here = min(world.size, int(os.environ.get("LOCAL_WORLD_SIZE", world.size)))
    least, has = here * least_bytes(cost, config, world.size), memory_of(world.device)
    if least > has:
        tokens = round(cost.trained / config.steps / config.accumulate / world.size)
        raise InputError(
            f"this training takes at least {least / 1e9:,.1f} GB of memory ({cost.parameters:,} "
            f"parameters with their gradients and moments, {tokens:,} tokens in a micro-batch), "
            f"and {world.device} has {has / 1e9:,.1f} GB: choose a smaller model or vocabulary, "
            "or a smaller batch_size"
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
        limits.append(int(_CGROUP.read_text()))
    return min(limits)
