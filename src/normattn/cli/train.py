"""`normattn train`: train a run, or print its plan."""

from __future__ import annotations

import os
from typing import Any

from normattn.cli.options import Train
from normattn.cli.parsing import settings
from normattn.errors import InputError
from normattn.lab.report.terminal import print_line
from normattn.lab.runs.environment import keep_pages
from normattn.lab.studies import preset as presets
from normattn.lab.sweep.config import merged, value_at
from normattn.lab.sweep.run import diagnostics_probes
from normattn.lab.training import TrainingConfig, train_model
from normattn.lab.training.config import read_settings
from normattn.lab.training.planning import describe_plan
from normattn.models.flops import flops_per_token, parameter_count
from normattn.terminal import Console


def train_or_plan(options: Train) -> None:
    """Train or resume a run in `options.out`; with `--plan` print its size and cost."""
    config = TrainingConfig.parse(_merge_settings(options), "training settings")
    machines = (options.nodes, options.gpus_per_node)
    if (options.gpu is None and machines != (1, 1)) or (options.gpu and not options.plan):
        raise InputError("--nodes, --gpus-per-node and --gpu need --plan, the first two --gpu")
    model, length = config.model, config.model.train_length
    tokens, flops = config.steps * config.batch_size * length, flops_per_token(model, length)
    lines = [
        *config.data.plan_notes(),
        f"{model.score.name}: {parameter_count(model):,} parameters, {model.layers} layers of "
        f"width {model.dim}, {flops.training:,.0f} FLOPs per trained token",
        f"{config.steps:,} steps of {config.batch_size} sequences of {length} tokens: "
        f"{tokens:,} tokens, {tokens * flops.training:.2g} FLOPs",
    ]
    if options.plan and options.gpu is not None:
        lines.append(describe_plan(config, config.cost(), options.gpu, *machines))
    # Under torchrun only the first process prints.
    console = Console(highlight=False, quiet=os.environ.get("RANK", "0") != "0")
    for line in lines:
        print_line(line, console)
    if options.plan:
        return
    with keep_pages():
        result = train_model(config, options.out, probes=diagnostics_probes(config))
    summary = f"loss {result.loss:.4f} after {result.steps:,} steps"
    print_line(f"{summary}; the model is in {options.out / 'model'}", console)


def _merge_settings(options: Train) -> dict[str, Any]:
    """Merge the settings of the preset, the file, and options and --set; later ones win.

    The preset's warm-up is scaled for a run shorter than it, unless a warm-up is set.
    """
    layers = [] if options.config is None else [read_settings(options.config)]
    layers.append(settings(options))
    preset, changes = presets.load(options.preset).training, merged({}, *layers)
    name, preset_steps, steps = "schedule.warmup_steps", preset.get("steps"), changes.get("steps")
    warmup = value_at(preset, name)
    valid = all(isinstance(number, int) for number in (warmup, preset_steps, steps))
    if valid and value_at(changes, name) is None and steps < warmup:
        layers.append({name: warmup * steps // preset_steps})
    return presets.overridden(preset, *layers)
