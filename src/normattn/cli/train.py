"""`normattn train`: one causal language model, from a corpus to an exported model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from normattn.cli import values
from normattn.errors import InputError

EPILOG = """
**Examples**

`normattn train --score KNA-logn --steps 500 --out runs/kna`

`normattn train --corpus books/ --score Baseline --length 128 --dim 256 --out runs/books`

`normattn train mine.toml --set optimiser.lr=1e-3 --set model.tie_head=false --out runs/mine`

`normattn train mine.toml --set parallel=fsdp --plan --gpu h100 --nodes 64 --gpus-per-node 8`

`torchrun --nproc-per-node 2 -m normattn train mine.toml --out runs/two`

Rerun the command to resume a stopped run; settings that differ from the run's are refused.
"""

Text = str | None
Number = int | None


def command(
    config: Annotated[
        Path | None,
        typer.Argument(help="Settings in TOML or JSON; what it leaves out comes from the preset."),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="The run's directory: settings, metrics, checkpoints, model.")
    ] = Path("runs/train"),
    corpus: Annotated[
        Text,
        typer.Option(
            help="python-source, python-packages, a file or folder, hf:NAME, synthetic:copy."
        ),
    ] = None,
    score: Annotated[
        Text, typer.Option(help="The attention score to train with; see: normattn list.")
    ] = None,
    steps: Annotated[Number, typer.Option(min=1, help="Optimiser steps.")] = None,
    length: Annotated[Number, typer.Option(min=2, help="Training length L, in tokens.")] = None,
    dim: Annotated[Number, typer.Option(min=1, help="Width of the model.")] = None,
    layers: Annotated[Number, typer.Option(min=1, help="Blocks of the model.")] = None,
    heads: Annotated[Number, typer.Option(min=1, help="Query heads (block mha).")] = None,
    block: Annotated[Text, typer.Option(help="mha or gau.")] = None,
    placement: Annotated[Text, typer.Option(help="PreLN, PostLN, DeepNorm or ReZero.")] = None,
    vocab_size: Annotated[Number, typer.Option(min=257, help="Tokens of the tokeniser.")] = None,
    batch_size: Annotated[Number, typer.Option(min=1, help="Sequences in a step.")] = None,
    optimiser: Annotated[Text, typer.Option(help="adamw, tiger or muon.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    precision: Annotated[Text, typer.Option(help="fp32 or bf16.")] = None,
    seed: Annotated[Number, typer.Option(min=0, help="Of weights, order and dropout.")] = None,
    threads: Annotated[Number, typer.Option(min=1, help="CPU threads of this process.")] = None,
    track: Annotated[
        Text, typer.Option(help="Show the curves in tensorboard, trackio or wandb (extra: track).")
    ] = None,
    preset: Annotated[
        str, typer.Option(help="Where settings come from that nothing else says.")
    ] = "laptop",
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any setting, by its dotted name."),
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Print size and cost, and train nothing.")
    ] = False,
    nodes: Annotated[int, typer.Option(min=1, help="With --plan --gpu: machines.")] = 1,
    gpus_per_node: Annotated[
        int, typer.Option(min=1, help="With --plan --gpu: GPUs of each machine.")
    ] = 1,
    gpu: Annotated[
        Text,
        typer.Option(help="With --plan: what a step takes on a100, h100, h200, or here."),
    ] = None,
) -> None:
    """Train a causal language model with a chosen attention score.

    Settings are laid over each other: the preset, the file CONFIG, the options, --set. The resolved
    whole is written to OUT/config.json, which is itself a CONFIG.
    """
    options = {
        "data.corpus": corpus,
        "model.score": score,
        "steps": steps,
        "model.train_length": length,
        "model.dim": dim,
        "model.layers": layers,
        "model.heads": heads,
        "model.block": block,
        "model.placement": placement,
        "data.vocab_size": vocab_size,
        "batch_size": batch_size,
        "optimiser.name": optimiser,
        "optimiser.lr": lr,
        "precision": precision,
        "seed": seed,
        "threads": threads,
        "track": track,
    }
    given = {key: value for key, value in options.items() if value is not None}
    fields = _fields(config, preset, given, changes or [])

    from normattn.commands.training_run import describe, plan_run, train_run, training_config

    settings = training_config(fields)
    if (gpu is None and (nodes, gpus_per_node) != (1, 1)) or (gpu is not None and not plan):
        raise InputError("--nodes, --gpus-per-node and --gpu say what --plan with --gpu counts")
    if plan:
        counted = None if gpu is None else plan_run(settings, gpu, nodes, gpus_per_node)
        print(*filter(None, (describe(settings), counted)), sep="\n")
    else:
        train_run(settings, out)


def _fields(
    config: Path | None, preset: str, given: dict[str, Any], changes: list[str]
) -> dict[str, Any]:
    """Every setting of the run, each layer over the one before."""
    from normattn.models.block_settings import without_foreign
    from normattn.sweep import presets
    from normattn.sweep.merging import merged
    from normattn.training.config_files import read_settings

    layers: list[dict[str, Any]] = []
    if config is not None:
        layers.append(read_settings(config))
    both = set(given) & set(assigned := values.assignments(changes))
    if both:
        raise InputError(f"{', '.join(sorted(both))} is given both as an option and by --set")
    base = presets.load(preset).training
    asked = merged({}, *layers, given, assigned)
    model = without_foreign(base["model"], _value_at(asked, "model.block"))
    base = {**base, "model": model}
    whole = merged(base, *layers, given, assigned)
    return merged(whole, _short_warmup(base, asked))


def _short_warmup(base: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """A run shorter than the preset's warm-up takes the preset's share, unless one is asked for."""
    warmup, whole = _value_at(base, "schedule.warmup_steps"), base.get("steps")
    steps, own = asked.get("steps"), _value_at(asked, "schedule.warmup_steps")
    numbers = (warmup, whole, steps)
    if own is not None or not all(isinstance(number, int) for number in numbers) or steps >= warmup:
        return {}
    return {"schedule.warmup_steps": warmup * steps // whole}


def _value_at(fields: dict[str, Any], name: str) -> Any:
    """The value at a dotted name; None where there is none."""
    value: Any = fields
    for key in name.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value
