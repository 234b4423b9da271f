"""The options of commands on runs, with their help. Fast to import, because `--help` needs all.

`--help` shows `examples` below the options.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from normattn.cli.parsing import argument, flag, integers, names, option, setting, settings_option


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Evaluate two small trained models at eight times their training length, in under a minute.

    Both ship with the package: nothing is downloaded. Each is evaluated unmodified, with YaRN and
    with ReRoPE. The report has the curve where plain RoPE collapses.
    """

    examples: ClassVar[str] = """
`normattn demo --text book.txt --out runs/demo` – on your own text
"""

    text: Path | None = option(None, "A text file. [default: one that ships with the models]")
    windows: int = option(24, "Windows of 1,024 tokens, at most.", min=1)
    out: Path = option(Path("normattn-demo"), "The folder of the report.")


@dataclass(frozen=True, kw_only=True)
class List:
    """List the components of a score, or describe one in detail.

    Hyphens join names into a score: `KNA-logn` is trained, `KNA-logn-YaRN` is that model
    extended after training. The kernels shown are those for 2,048 tokens.
    """

    examples: ClassVar[str] = """
`normattn list` – every component by name, on one page

`normattn list YaRN` – equation, source, parameters, what it cannot be combined with, kernels

`normattn list KNA-logn-YaRN`, `normattn list gpt-oss` – a score's, a model's
"""

    name: str | None = argument(
        None,
        help="A component, score, model, residual connection or norm. [default: all, in short]",
    )
    as_json: bool = flag("--json", "Print the components as JSON.")


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a causal language model with a chosen attention score.

    Options and --set override the file CONFIG, which overrides the preset. All settings
    are written to OUT/config.json, which can be given as CONFIG.
    """

    examples: ClassVar[str] = """
`normattn train --score KNA-logn --steps 500 --out runs/kna`

`normattn train mine.toml --set optimiser.lr=1e-3 --set model.tie_head=false --out runs/mine`

`normattn train mine.toml --set parallel=fsdp --plan --gpu h100 --nodes 64 --gpus-per-node 8`

`torchrun --nproc-per-node 2 -m normattn train mine.toml --out runs/two`

Rerun the command to resume a run that was stopped. Changing a setting that affects its result
raises an error.
"""

    config: Path | None = argument(
        None, help="Settings in TOML or JSON; the preset gives the rest."
    )
    out: Path = option(
        Path("runs/train"), "The run's directory: settings, metrics, checkpoints, model."
    )
    corpus: str | None = setting(
        "data.corpus",
        "python-source, python-packages-2026, a file or folder, hf:NAME, synthetic:copy.",
    )
    score: str | None = setting(
        "model.score", "The attention score to train with; see: normattn list."
    )
    steps: int | None = setting("steps", "Optimiser steps.", min=1)
    length: int | None = setting("model.train_length", "Training length L, in tokens.", min=2)
    dim: int | None = setting("model.dim", "Width of the model.", min=1)
    layers: int | None = setting("model.layers", "Blocks of the model.", min=1)
    heads: int | None = setting("model.heads", "Query heads (block mha).", min=1)
    placement: str | None = setting(
        "model.placement",
        "PreLN, PostLN, DeepNorm, ReZero, ReZeroNoNorm, FixedScale, AttnRes or nGPT.",
    )
    batch_size: int | None = setting("batch_size", "Sequences in a step.", min=1)
    optimiser: str | None = setting("optimiser.name", "adamw, tiger or muon.")
    lr: float | None = setting("optimiser.lr", "Peak learning rate.")
    precision: str | None = setting("precision", "fp32, bf16 or fp16.")
    seed: int | None = setting("seed", "Seed of weights, order and dropout.", min=0)
    track: str | None = setting(
        "track", "Log curves to tensorboard, trackio or wandb (needs the extra track)."
    )
    preset: str = option("laptop", "Gives all other settings.")
    changes: dict[str, Any] | None = settings_option("Change any setting by its dotted name.")
    plan: bool = flag("--plan", "Print size and cost without training.")
    nodes: int = option(1, "Number of machines (with --plan --gpu).", min=1)
    gpus_per_node: int = option(1, "GPUs per machine (with --plan --gpu).", min=1)
    gpu: str | None = option(
        None, "Show memory and FLOPs per device: a100, h100, h200 or here (with --plan)."
    )


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Evaluate a trained run at and past its training length L, with any inference-time method.

    Last-segment and retrieval are evaluated at every length, train-length at L, the others at the
    longest. The longest length / L is also the factor of NTK, YaRN and PI. Measurements go to
    RUN/evaluations (of a study's run: RUN/evaluations/beside), the report to RUN/report.
    """

    examples: ClassVar[str] = """
`normattn evaluate runs/kna` – the usual protocols, at 1, 2, 4 and 8 times its training length

`normattn evaluate runs/kna --protocols by-position,retrieval --methods all --multiples 1,4,16,64`

Results are kept and not measured again. `--methods unmodified` is the model as trained, `all` adds
every method that its score supports.
"""

    run: Path = argument(help="The directory of a finished run.")
    methods: tuple[str, ...] = option(
        "unmodified",
        "Inference-time methods, separated by commas: NTK, YaRN, ReRoPE, logn+, PI …; or all.",
        read=names,
    )
    protocols: tuple[str, ...] | None = option(
        None,
        "Protocols, separated by commas: train-length, non-repeated, repeated, last-segment, "
        "by-position, retrieval. [default: the first four]",
        read=names,
    )
    multiples: tuple[int, ...] | None = option(
        None, "Tested lengths in units of L. [default: 1,2,4,8]", read=integers
    )
    max_windows: int = option(128, "Windows per length, at most; more narrow the intervals.", min=1)
    max_tokens: int = option(16384, "Tokens per batch, at most; bounds the memory.", min=1)
    seed: int = option(0, "Chooses windows and repeated segments.", min=0)
    threads: int = option(1, "CPU threads of this process.", min=1, max=1024)


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Continue one or more prompts.

    Generation also stops where the model ends a document. Without a factor, a method is stretched
    to the end of the longest answer; `YaRN(factor=8)` sets it.
    """

    examples: ClassVar[str] = """
`normattn generate runs/kna --prompt "def main("` – greedy decoding

`normattn generate runs/kna --file chapter.txt --method YaRN --max-new-tokens 500` – a prompt
longer than the training length

`normattn generate runs/kna --prompt "class " --prompt "if " --stop ":"` – stop at a colon

Only the answers go to stdout; of several prompts, each after its prompt.
"""

    run: Path = argument(help="The directory of a finished run.")
    prompt: list[str] | None = option(None, "A prompt; may be repeated.")
    file: list[Path] | None = option(None, "A file with a prompt; may be repeated.")
    method: str = option("unmodified", "Inference-time method, e.g. YaRN.")
    max_new_tokens: int = option(128, "New tokens, at most.", min=1)
    temperature: float = option(0.0, "0 decodes greedily; above 0 samples.")
    top_k: int | None = option(None, "Sample from the K most likely tokens.", min=1)
    top_p: float | None = option(
        None, "Sample from the most likely tokens of this total probability."
    )
    stop: list[str] | None = option(None, "Stop string; may be repeated.")
    seed: int = option(0, "Sampling seed; prompt r uses SEED + r.", min=0)
    threads: int = option(1, "CPU threads of this process.", min=1, max=1024)


@dataclass(frozen=True, kw_only=True)
class Export:
    """Export a run's model, tokeniser and model card to a Hugging Face folder.

    Works for causal and masked language models and text classifiers. The card holds corpus,
    settings, steps, last loss and, for a causal model, a table of comparable evaluations.
    """

    examples: ClassVar[str] = """
`normattn export runs/kna exported/kna --license apache-2.0` – model, tokeniser, model card

In Python, `import normattn.hf` registers the model type, then
`AutoModelForCausalLM.from_pretrained("exported/kna")` loads it.
"""

    run: Path = argument(help="The directory of a finished run.")
    out: Path = argument(metavar="DIR", help="A new or empty directory.")
    licence: str | None = option(
        None, "Licence on the model card. [default: none]", flag="--license"
    )


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Inspect a trained model: entropy, largest logits, sinks and norms of every head.

    Works for language models, classifiers, translation models, Vision Transformers, and causal
    language models of transformers. Long texts need little memory: no attention matrix is stored.

    Prints a table with a row per layer. Writes report.html, table.md, figures/ and
    measurements.parquet to OUT; `normattn report OUT` makes the report again.
    """

    examples: ClassVar[str] = """
`normattn inspect runs/kna` – every layer and head, on held-out text of the training length

`normattn inspect runs/kna --length 2048 --method YaRN` – past the training length, under a method

`normattn inspect runs/kna --text chapter.txt --attention 3,0` – your own text; draw that head

`normattn inspect ./my-model --text book.txt --length 2048 --method "YaRN(factor=4)"`,
`normattn inspect model.gguf` – a model of transformers

`normattn train --score KNA --set inspect_every=50 --out runs/kna` – the same during training

The columns are explained in the report, and in docs/diagnostics.md.
"""

    run: Path = argument(
        help="The directory of a finished run, a transformers model folder or a GGUF file."
    )
    text: Path | None = option(
        None,
        "A text file, for a language model. [default: the run's held-out data; for a model of "
        "transformers the standard library's source]",
    )
    method: str = option(
        "unmodified",
        "Inference-time method, also with parameters: 'YaRN(factor=4)'. Of a run, causal "
        "language models only.",
    )
    length: int | None = option(
        None,
        "Tokens per window or document. [default: the training length; for a model of "
        "transformers 512]",
        min=2,
    )
    windows: int | None = option(
        None,
        "Windows, texts, pairs or images, at most. [default: 16; for a model of transformers 4]",
        min=1,
    )
    bins: int = option(16, "Number of position bins.", min=1)
    cosines: bool = flag("--cosines", "Also measure the range of cos(q, k).")
    attention: str = option(
        "sharpest",
        "Which head's attention among the first 64 tokens is drawn: LAYER,HEAD (from 0), or "
        "the sharpest.",
        metavar="LAYER,HEAD",
    )
    out: Path | None = option(
        None,
        "Folder of the report and its measurements. [default: RUN/inspection; for a model of "
        "transformers runs/inspect-MODEL]",
    )
    max_tokens: int = option(8192, "Tokens per batch, at most; bounds the memory.", min=1)
    seed: int = option(0, "Chooses the windows.", min=0)
    dtype: Literal["fp32", "bf16"] = option("fp32", "Type of the weights; of a run, autocast.")
    device: str | None = option(
        None,
        "auto, cpu, cuda or cuda:N. [default: that of the run's training; for a model of "
        "transformers auto]",
    )
    threads: int = option(1, "CPU threads of this process.", min=1, max=1024)


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write a report (report.html, table.md, figures) on one or more runs.

    Configurations that share documents and seeds are compared in pairs, with confidence intervals.
    A folder with measurements.parquet needs nothing else. Runs of one score count as its seeds;
    label runs that were trained differently: LABEL=RUN.
    """

    examples: ClassVar[str] = """
`normattn report runs/kna runs/baseline --out runs/report`

`normattn report wide=runs/a narrow=runs/b --out runs/widths` – two training runs of one score

`normattn report runs/keynorm-laptop` – make the report of a study again

`normattn report results/keynorm-workstation --out again` – a published report

`normattn report runs/extend-a runs/extend-b --out gallery` – compare models or texts
"""

    runs: list[str] = argument(
        metavar="[LABEL=]RUN",
        help="Runs, directories with runs below them, or a folder with measurements.parquet. "
        "LABEL names a run in the tables.",
    )
    out: Path | None = option(None, "Folder of the report. [default: the first RUN]")
    study: str | None = option(
        None, "The FILE.py of your own study. [default: the study named in RUN]"
    )
