"""One training run by itself, and what it says on the terminal."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from normattn.cli.asking import settings
from normattn.cli.options.train import TrainOptions
from normattn.errors import InputError
from normattn.lab.report.terminal import tell
from normattn.lab.runs.environment import keep_pages
from normattn.lab.studies import preset as presets
from normattn.lab.sweep.config import merged, value_at
from normattn.lab.sweep.run import diagnostics_probes
from normattn.lab.training import TrainingConfig, train_causal
from normattn.lab.training.config import read_settings
from normattn.lab.training.planning import describe_plan
from normattn.lab.training.tasks.text import CausalWorkload
from normattn.models.config import without_foreign
from normattn.models.flops import flops_per_token, parameter_count
from normattn.terminal import Console


def train_or_plan(options: TrainOptions) -> None:
    """Train what `normattn train` was told to, or print its size and cost.

    Raises `InputError` for settings that are wrong, and a plan's options without a plan.
    """
    config = training_config(_fields(options))
    gpu, counted = options.gpu, (options.nodes, options.gpus_per_node)
    if (gpu is None and counted != (1, 1)) or (gpu is not None and not options.plan):
        raise InputError("--nodes, --gpus-per-node and --gpu say what --plan with --gpu counts")
    if options.plan:
        cost = CausalWorkload().cost(config)
        planned = None if gpu is None else describe_plan(config, cost, gpu, *counted)
        notes = CausalWorkload().look(config)
        print(*filter(None, (*notes, describe(config), planned)), sep="\n")
    else:
        train_run(config, options.out)


def _fields(options: TrainOptions) -> dict[str, Any]:
    """Every setting of the run, each layer over the one before."""
    layers = [] if options.config is None else [read_settings(options.config)]
    given, assigned = settings(options), options.changes or {}
    both = set(given) & set(assigned)
    if both:
        raise InputError(f"{', '.join(sorted(both))} is given both as an option and by --set")
    base = presets.load(options.preset).training
    asked = merged({}, *layers, given, assigned)
    model = without_foreign(base["model"], value_at(asked, "model.block"))
    base = {**base, "model": model}
    whole = merged(base, *layers, given, assigned)
    return merged(whole, _short_warmup(base, asked))


def _short_warmup(base: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """A run shorter than the preset's warm-up takes the preset's share, unless one is asked for."""
    warmup, whole = value_at(base, "schedule.warmup_steps"), base.get("steps")
    steps, own = asked.get("steps"), value_at(asked, "schedule.warmup_steps")
    numbers = (warmup, whole, steps)
    if own is not None or not all(isinstance(number, int) for number in numbers) or steps >= warmup:
        return {}
    return {"schedule.warmup_steps": warmup * steps // whole}


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


def training_config(fields: Mapping[str, Any]) -> TrainingConfig:
    """The checked settings of a run; `InputError` names each field that is wrong."""
    return TrainingConfig.parse(fields, "training settings")


def train_run(config: TrainingConfig, out: Path) -> None:
    """Train one run into `out`, or resume it, and say how it ended."""
    # Under torchrun every process comes here; the first one speaks.
    console = Console(highlight=False, quiet=os.environ.get("RANK", "0") != "0")
    for line in (*CausalWorkload().look(config), describe(config)):
        tell(line, console)
    with keep_pages():
        result = train_causal(config, out, probes=diagnostics_probes(config, out))
    said = f"loss {result.loss:.4f} after {result.steps:,} steps; the model is in {out / 'model'}"
    tell(said, console)
