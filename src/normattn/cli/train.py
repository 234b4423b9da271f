"""`normattn train`: one training run, or its plan."""

from __future__ import annotations

import os
from typing import Any

from normattn.cli import options
from normattn.cli.parsing import settings
from normattn.errors import InputError
from normattn.lab.report.terminal import tell
from normattn.lab.runs.environment import keep_pages
from normattn.lab.studies import preset as presets
from normattn.lab.sweep.config import merged, value_at
from normattn.lab.sweep.run import diagnostics_probes
from normattn.lab.training import TrainingConfig, train_model
from normattn.lab.training.config import read_settings
from normattn.lab.training.planning import describe_plan
from normattn.models.config import without_foreign
from normattn.models.flops import flops_per_token, parameter_count
from normattn.terminal import Console


def train_or_plan(asked: options.Train) -> None:
    """Train a run into `asked.out`, or resume it; with `--plan` print its size and cost.

    Raises `InputError` for settings that are wrong, and a plan's options without a plan.
    """
    config = TrainingConfig.parse(_fields(asked), "training settings")
    machines = (asked.nodes, asked.gpus_per_node)
    if (asked.gpu is None and machines != (1, 1)) or (asked.gpu and not asked.plan):
        raise InputError("--nodes, --gpus-per-node and --gpu need --plan, the first two --gpu")
    lines = [*config.data.plan_notes(), *_described(config)]
    if asked.plan and asked.gpu is not None:
        lines.append(describe_plan(config, config.cost(), asked.gpu, *machines))
    # Under torchrun every process comes here; the first one speaks.
    console = Console(highlight=False, quiet=os.environ.get("RANK", "0") != "0")
    for line in lines:
        tell(line, console)
    if asked.plan:
        return
    with keep_pages():
        result = train_model(config, asked.out, probes=diagnostics_probes(config))
    ended = f"loss {result.loss:.4f} after {result.steps:,} steps"
    tell(f"{ended}; the model is in {asked.out / 'model'}", console)


def _fields(asked: options.Train) -> dict[str, Any]:
    """Every setting of the run: preset, file, options and --set, each over the one before."""
    layers = [] if asked.config is None else [read_settings(asked.config)]
    given = settings(asked)
    base = presets.load(asked.preset).training
    own = merged({}, *layers, given)
    base = {**base, "model": without_foreign(base["model"], value_at(own, "model.block"))}
    whole = merged(base, *layers, given)
    return merged(whole, _short_warmup(base, own))


def _short_warmup(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """A run shorter than the preset's warm-up takes the preset's share, unless one is given."""
    name, whole, steps = "schedule.warmup_steps", base.get("steps"), own.get("steps")
    warmup = value_at(base, name)
    known = all(isinstance(number, int) for number in (warmup, whole, steps))
    if value_at(own, name) is not None or not known:
        return {}
    return {name: warmup * steps // whole} if steps < warmup else {}


def _described(config: TrainingConfig) -> list[str]:
    """What a run is and costs, in two lines."""
    model = config.model
    tokens = config.steps * config.batch_size * model.train_length
    flops = flops_per_token(model, model.train_length)
    return [
        f"{model.score.name}: {parameter_count(model):,} parameters, {model.layers} layers of "
        f"width {model.dim}, {flops.training:,.0f} FLOPs per trained token",
        f"{config.steps:,} steps of {config.batch_size} sequences of {model.train_length} tokens: "
        f"{tokens:,} tokens, {tokens * flops.training:.2g} FLOPs",
    ]
