"""`normattn train`: one causal language model, from a corpus to an exported model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normattn.cli.asking import argument, flag, option
from normattn.cli.values import assignments

EPILOG = """
**Examples**

`normattn train --score KNA-logn --steps 500 --out runs/kna`

`normattn train --corpus books/ --score Baseline --length 128 --dim 256 --out runs/books`

`normattn train mine.toml --set optimiser.lr=1e-3 --set model.tie_head=false --out runs/mine`

`normattn train mine.toml --set parallel=fsdp --plan --gpu h100 --nodes 64 --gpus-per-node 8`

`torchrun --nproc-per-node 2 -m normattn train mine.toml --out runs/two`

Rerun the command to resume a stopped run; other settings that its result depends on are refused.
"""


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Train a causal language model with a chosen attention score.

    Settings are laid over each other: the preset, the file CONFIG, the options, --set. The resolved
    whole is written to OUT/config.json, which is itself a CONFIG.
    """

    config: Path | None = argument(
        None, help="Settings in TOML or JSON; what it leaves out comes from the preset."
    )
    out: Path = option(
        Path("runs/train"), help="The run's directory: settings, metrics, checkpoints, model."
    )
    corpus: str | None = option(
        None,
        setting="data.corpus",
        help="python-source, python-packages-2026, python-packages, a file or folder, hf:NAME, "
        "synthetic:copy.",
    )
    score: str | None = option(
        None, setting="model.score", help="The attention score to train with; see: normattn list."
    )
    steps: int | None = option(None, setting="steps", min=1, help="Optimiser steps.")
    length: int | None = option(
        None, setting="model.train_length", min=2, help="Training length L, in tokens."
    )
    dim: int | None = option(None, setting="model.dim", min=1, help="Width of the model.")
    layers: int | None = option(None, setting="model.layers", min=1, help="Blocks of the model.")
    heads: int | None = option(None, setting="model.heads", min=1, help="Query heads (block mha).")
    block: str | None = option(None, setting="model.block", help="mha or gau.")
    placement: str | None = option(
        None,
        setting="model.placement",
        help="PreLN, PostLN, DeepNorm, ReZero, ReZeroNoNorm or FixedScale.",
    )
    vocab_size: int | None = option(
        None, setting="data.vocab_size", min=2, help="Tokens of the tokeniser; text needs 257."
    )
    batch_size: int | None = option(None, setting="batch_size", min=1, help="Sequences in a step.")
    optimiser: str | None = option(None, setting="optimiser.name", help="adamw, tiger or muon.")
    lr: float | None = option(None, setting="optimiser.lr", help="Peak learning rate.")
    precision: str | None = option(None, setting="precision", help="fp32, bf16 or fp16.")
    seed: int | None = option(None, setting="seed", min=0, help="Of weights, order and dropout.")
    threads: int | None = option(
        None, setting="threads", min=1, help="CPU threads of this process."
    )
    track: str | None = option(
        None,
        setting="track",
        help="Show the curves in tensorboard, trackio or wandb (extra: track).",
    )
    preset: str = option("laptop", help="Where settings come from that nothing else says.")
    changes: dict[str, Any] | None = option(
        None,
        "--set",
        read=assignments,
        typed=list[str] | None,
        metavar="KEY=VALUE",
        help="Any setting, by its dotted name.",
    )
    plan: bool = flag("--plan", "Print size and cost, and train nothing.")
    nodes: int = option(1, min=1, help="With --plan --gpu: machines.")
    gpus_per_node: int = option(1, min=1, help="With --plan --gpu: GPUs of each machine.")
    gpu: str | None = option(
        None, help="With --plan: memory and FLOPs on each a100, h100, h200, or here."
    )
