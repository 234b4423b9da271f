"""One training run by itself, and what it says on the terminal."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from normattn.models.accounting import flops_per_token, parameter_count
from normattn.report.terminal import tell
from normattn.sweep.probes import diagnostics_probes
from normattn.training import TrainingConfig, train_causal
from normattn.training.causal import CausalWorkload


def describe(config: TrainingConfig) -> str:
    """What a run is and costs, in two lines."""
    model = config.model
    tokens = config.steps * config.batch_size * model.train_length
    flops = flops_per_token(model, model.train_length)
    return (
        f"{model.score.name}: {parameter_count(model):,} parameters, {model.layers} layers of "
        f"width {model.dim}, {flops.training:,.0f} FLOPs per trained token\n"
        f"{config.steps:,} steps of {config.batch_size} sequences of {model.train_length} tokens: "
        f"{tokens:,} tokens, {tokens * flops.training:.2g} FLOPs"
    )


def plan_run(config: TrainingConfig, gpu: str, nodes: int, per_node: int) -> str:
    """What a step takes on so many devices; see `normattn.training.plan`."""
    # Tensors without numbers take torch a second to import.
    from normattn.training.plan import described, device_named, dry_share, plan

    device = device_named(gpu, config.threads)
    counted = dry_share(config, gpu, nodes * per_node)
    planned = plan(config, CausalWorkload().cost(config), counted, device, nodes, per_node)
    return described(planned, device, gpu, nodes, per_node)


def training_config(fields: Mapping[str, Any]) -> TrainingConfig:
    """The checked settings of a run; `InputError` names each field that is wrong."""
    return TrainingConfig.parse(fields, "training settings")


def train_run(config: TrainingConfig, out: Path) -> None:
    """Train one run into `out`, or resume it, and say how it ended."""
    # Under torchrun every process comes here; the first one speaks.
    console = Console(highlight=False, quiet=os.environ.get("RANK", "0") != "0")
    tell(describe(config), console)
    result = train_causal(config, out, probes=diagnostics_probes(config, out))
    said = f"loss {result.loss:.4f} after {result.steps:,} steps; the model is in {out / 'model'}"
    tell(said, console)
