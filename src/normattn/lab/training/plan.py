"""What one step of a training takes on so many devices: memory, bytes sent, time, checkpoint.

Nothing of the model is allocated. Memory is the peak of torch's tensors in a step that is run
without its numbers (`dry_step`), beside what is divided, gathered or bucketed between processes.
The time is a roofline (`roofline`): every operation by itself at the device's rates, and messages,
hidden behind each other; real steps take longer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from normattn.errors import InputError
from normattn.lab.training.config import TrainingConfig
from normattn.lab.training.cost import BYTES, Cost, memory_of
from normattn.lab.training.counting import Counted
from normattn.lab.training.dry_step import dry_step
from normattn.lab.training.measured_rates import rates_here
from normattn.lab.training.roofline import Rates

HERE = "here"


@dataclass(frozen=True)
class Device:
    """Rates of its operations, bytes of memory, bytes/s to a peer.

    `inside` is the rate in one direction within a machine, `between` that of one device's share of
    the network between machines.
    """

    rates: Rates
    memory: float
    inside: float
    between: float


DEVICES = {
    "a100": Device(Rates.published(fp32=19.5e12, bf16=312e12, bandwidth=2.0e12), 80e9, 300e9, 25e9),
    "h100": Device(Rates.published(fp32=67e12, bf16=989e12, bandwidth=3.35e12), 80e9, 450e9, 50e9),
    "h200": Device(Rates.published(fp32=67e12, bf16=989e12, bandwidth=4.8e12), 141e9, 450e9, 50e9),
}
"""NVIDIA's data sheets (SXM); between machines one 200 (A100) or 400 Gb/s adapter a device."""


@dataclass(frozen=True)
class Plan:
    """Bytes on each device, bytes that each sends in a step, seconds of a step, and a checkpoint.

    `state`: weights, gradients, moments. `beside`: buckets, or what is gathered. `memory`: the peak
    of all that lives in a step.
    """

    state: float
    beside: float
    memory: float
    sent: float
    computing: float
    sending: float
    checkpoint: float

    @property
    def seconds(self) -> float:
        """A step's time on the roofline."""
        return max(self.computing, self.sending)


def device_named(name: str, threads: int = 1) -> Device:
    """The figures of a device, `here` the measured ones of this machine's processor.

    Its processes share the memory as they share the bandwidth of what one writes and another
    reads. `InputError` for one that is not listed.
    """
    if name == HERE:
        rates = rates_here(threads)
        copied = rates.bandwidth / 2
        return Device(rates, float(memory_of(torch.device("cpu"))), copied, copied)
    if name not in DEVICES:
        raise InputError(f"unknown gpu {name!r}; expected one of {', '.join((*DEVICES, HERE))}")
    return DEVICES[name]


def dry_share(config: TrainingConfig, name: str, processes: int) -> Counted:
    """The step of one of so many devices without its numbers; `InputError` as `dry_step`."""
    divided = config.parallel == "fsdp" and processes > 1
    return dry_step(config, processes, gpu=name != HERE, gathered=divided)


def plan(
    config: TrainingConfig, cost: Cost, counted: Counted, device: Device, nodes: int, per_node: int
) -> Plan:
    """What a step of `config` takes on nodes × per_node devices; `counted` is its `dry_share`.

    With N devices each sends 2·(N − 1)/N of the gradients under ddp (a ring); under fsdp, for each
    micro-batch, (N − 1)/N of the blocks' weights twice, of all others once, and of the gradients.
    """
    n = nodes * per_node
    moments = config.optimiser.moments
    weight = BYTES // 2 if config.precision == "bf16" else BYTES
    whole = float(cost.parameters * BYTES)
    root = config.model.vocab_size * config.model.dim * (1 if config.model.tie_head else 2)
    blocks = max(cost.parameters - root, 0)
    share = (n - 1) / n
    computing = device.rates.seconds(counted)
    if config.parallel == "fsdp" and n > 1:
        state = whole * (2 + moments) / n
        # A block that computes and the next one, each with its gradient; the root with its own,
        # which the counted step has made.
        one = blocks / config.model.layers
        beside = 2 * one * (weight + BYTES) + root * 2 * BYTES
        within = counted.peak - counted.lasting - root * BYTES
        # Parts of gradients come as activations go, but for those of an earlier micro-batch.
        early = state if config.accumulate > 1 else whole * (1 + moments) / n
        memory = max(early + within, state) + beside
        per_micro_batch = share * (2 * blocks * weight + root * BYTES + whole)
        sent = config.accumulate * per_micro_batch
        # Its part of the blocks' update, which the counted step has not taken.
        computing += blocks * BYTES * (3 + 2 * moments) / n / device.rates.bandwidth
    else:
        state = whole * (2 + moments)
        beside = whole if n > 1 else 0.0
        memory = float(counted.peak) + beside
        sent = 2 * share * whole
    sending = sent / (device.between if nodes > 1 else device.inside)
    return Plan(state, beside, memory, sent, computing, sending, whole * (1 + moments))


def described(planned: Plan, device: Device, name: str, nodes: int, per_node: int) -> str:
    """The plan in three lines."""
    room = "" if planned.memory <= device.memory else ": more than it has"
    rest = max(planned.memory - planned.state - planned.beside, 0.0)
    parts = f"state {_gb(planned.state)}, beside it {_gb(planned.beside)}, all else {_gb(rest)}"
    bound = "operations" if planned.computing >= planned.sending else "messages"
    return (
        f"{nodes} × {per_node} {name}: {_gb(planned.memory)} of {_gb(device.memory)} each at the "
        f"peak ({parts}){room}\n"
        f"a step: {_gb(planned.sent)} sent by each; {planned.seconds:.3g} s on the roofline, bound "
        f"by {bound} (operations {planned.computing:.3g} s, messages {planned.sending:.3g} s)\n"
        f"a checkpoint: {_gb(planned.checkpoint)}"
    )


def _gb(count: float) -> str:
    return f"{count / 1e9:,.3g} GB"
