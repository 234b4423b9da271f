"""What one step of a training takes on so many devices: memory, bytes sent, time, checkpoint.

Counted, not measured. Memory is what cannot be less: state (weights, gradients, moments), what is
gathered or bucketed beside it, and what enters each block. The time is a roofline: products at the
device's published peak and messages at its published rate, each hidden behind the other; real
steps take longer.
"""

from __future__ import annotations

from dataclasses import dataclass

from normattn.errors import InputError
from normattn.training.config import TrainingConfig
from normattn.training.cost import BYTES, Cost


@dataclass(frozen=True)
class Device:
    """Published figures: FLOP/s of dense products, bytes of memory, bytes/s to a peer.

    `inside` is the rate in one direction within a machine, `between` that of one device's share of
    the network between machines.
    """

    bf16: float
    fp32: float
    memory: float
    inside: float
    between: float


DEVICES = {
    "a100": Device(312e12, 19.5e12, 80e9, 300e9, 25e9),
    "h100": Device(989e12, 67e12, 80e9, 450e9, 50e9),
    "h200": Device(989e12, 67e12, 141e9, 450e9, 50e9),
}
"""NVIDIA's data sheets (SXM); between machines one 200 (A100) or 400 Gb/s adapter a device."""


@dataclass(frozen=True)
class Plan:
    """Bytes on each device, bytes that each sends in a step, seconds of a step, and a checkpoint.

    `state`: weights, gradients, moments. `beside`: buckets, or what is gathered. `activations`: at
    least.
    """

    state: float
    beside: float
    activations: float
    sent: float
    computing: float
    sending: float
    checkpoint: float

    @property
    def memory(self) -> float:
        """Bytes that each device must have, at least."""
        return self.state + self.beside + self.activations

    @property
    def seconds(self) -> float:
        """A step's time on the roofline."""
        return max(self.computing, self.sending)


def device_named(name: str) -> Device:
    """The figures of a device; `InputError` for one that is not listed."""
    if name not in DEVICES:
        raise InputError(f"unknown gpu {name!r}; expected one of {', '.join(DEVICES)}")
    return DEVICES[name]


def plan(config: TrainingConfig, cost: Cost, device: Device, nodes: int, per_node: int) -> Plan:
    """What a step of `config` takes on nodes × per_node devices.

    With N devices each sends 2·(N − 1)/N of the gradients under ddp (a ring); under fsdp, for each
    micro-batch, (N − 1)/N of the blocks' weights twice, of all others once, and of the gradients.
    Raises `InputError` where the batch does not divide.
    """
    n = nodes * per_node
    if config.batch_size % (n * config.accumulate):
        raise InputError(
            f"batch_size {config.batch_size} does not divide into {n * config.accumulate} "
            "micro-batches (devices × accumulate)"
        )
    moments = config.optimiser.moments
    half = config.precision == "bf16"
    weight = BYTES // 2 if half else BYTES
    whole = float(cost.parameters * BYTES)
    root = config.model.vocab_size * config.model.dim * (1 if config.model.tie_head else 2)
    blocks = max(cost.parameters - root, 0)
    share = (n - 1) / n
    if config.parallel == "fsdp" and n > 1:
        state = whole * (2 + moments) / n
        # A block that computes and the next one, each with its gradient; the root with its own.
        one = blocks / config.model.layers
        beside = 2 * one * (weight + BYTES) + root * 2 * BYTES
        each = share * (2 * blocks * weight + root * BYTES + whole)
        sent = config.accumulate * each
    else:
        state = whole * (2 + moments)
        beside = whole if n > 1 else 0.0
        sent = 2 * share * whole
    tokens = cost.trained / config.steps / config.accumulate / n
    return Plan(
        state,
        beside,
        tokens * cost.kept * weight,
        sent,
        cost.flops / config.steps / n / (device.bf16 if half else device.fp32),
        sent / (device.between if nodes > 1 else device.inside),
        whole * (1 + moments),
    )


def described(found: Plan, device: Device, name: str, nodes: int, per_node: int) -> str:
    """The plan in three lines."""
    room = "" if found.memory <= device.memory else ": more than it has"
    parts = f"state {_gb(found.state)}, beside it {_gb(found.beside)}"
    bound = "products" if found.computing >= found.sending else "messages"
    return (
        f"{nodes} × {per_node} {name}: at least {_gb(found.memory)} of {_gb(device.memory)} each "
        f"({parts}, inputs of blocks {_gb(found.activations)}){room}\n"
        f"a step: {_gb(found.sent)} sent by each; {found.seconds:.3g} s at the peak, bound by "
        f"{bound} (products {found.computing:.3g} s, messages {found.sending:.3g} s)\n"
        f"a checkpoint: {_gb(found.checkpoint)}"
    )


def _gb(count: float) -> str:
    return f"{count / 1e9:,.3g} GB"
