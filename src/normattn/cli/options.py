"""The options of commands on runs, with their help; quick to import, for `--help` needs them all.

`epilog` is what `--help` shows below the options.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from normattn.cli.parsing import argument, flag, integers, names, option, settings_option


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Evaluate two small trained models at eight times their training length, in under a minute.

    Both ship with the package: nothing is downloaded. Each is evaluated unmodified, with YaRN and
    with ReRoPE. The report has the curve where plain RoPE collapses.
    """

    epilog: ClassVar[str] = """
**Examples**

`normattn demo` – plain RoPE and KeyNorm on the Python source that ships with them

`normattn demo --text book.txt --out runs/demo` – on your own text

Then try a real model: `normattn extend HuggingFaceTB/SmolLM2-135M --text book.txt`
"""

    text: Path | None = option(None, help="A text file. [default: one that ships with the models]")
    windows: int = option(24, min=1, help="Windows of 1,024 tokens, at most.")
    out: Path = option(Path("normattn-demo"), help="The folder of the report.")


@dataclass(frozen=True, kw_only=True)
class List:
    """List the components of a score; of a named one, all that is known.

    Names are joined by hyphens into a score: `KNA-logn` is trained, `KNA-logn-YaRN` is that model
    extended after training. Kernels are those that run 2,048 tokens.
    """

    epilog: ClassVar[str] = """
**Examples**

`normattn list` – every component by name, on one page

`normattn list YaRN` – its equation, source, parameters, what it combines with, its kernels

`normattn list KNA-logn-YaRN`, `normattn list gpt-oss` – all components of a score, and of a model's
"""

    name: str | None = argument(
        None, help="A component, a score or a model. [default: all, in short]"
    )
    as_json: bool = flag("--json", "Print everything as one JSON list instead.")


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a causal language model with a chosen attention score.

    Settings are laid over each other: the preset, the file CONFIG, the options, --set. The resolved
    whole is written to OUT/config.json, which is itself a CONFIG.
    """

    epilog: ClassVar[str] = """
**Examples**

`normattn train --score KNA-logn --steps 500 --out runs/kna`

`normattn train --corpus books/ --score Baseline --length 128 --dim 256 --out runs/books`

`normattn train mine.toml --set optimiser.lr=1e-3 --set model.tie_head=false --out runs/mine`

`normattn train mine.toml --set parallel=fsdp --plan --gpu h100 --nodes 64 --gpus-per-node 8`

`torchrun --nproc-per-node 2 -m normattn train mine.toml --out runs/two`

Rerun the command to resume a stopped run; changing a setting that its result depends on raises an
error.
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
        help="python-source, python-packages-2026, a file or folder, hf:NAME, synthetic:copy.",
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
        help="PreLN, PostLN, DeepNorm, ReZero, ReZeroNoNorm, FixedScale or AttnRes.",
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
    preset: str = option("laptop", help="Where all other settings come from.")
    changes: dict[str, Any] | None = settings_option("Any setting, by its dotted name.")
    plan: bool = flag("--plan", "Print size and cost, and train nothing.")
    nodes: int = option(1, min=1, help="With --plan --gpu: machines.")
    gpus_per_node: int = option(1, min=1, help="With --plan --gpu: GPUs of each machine.")
    gpu: str | None = option(
        None, help="With --plan: memory and FLOPs on each a100, h100, h200, or here."
    )


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Evaluate a trained run at and beyond its training length L, by any method.

    The last segment and retrieval are evaluated at every length; repeated, non-repeated and
    by-position text at the longest, which over L is also the factor of NTK, YaRN and PI.
    RUN/evaluations gets the records, RUN/report the page. Records of a study's run go to
    RUN/evaluations/beside, which the study's page leaves out.
    """

    epilog: ClassVar[str] = """
**Examples**

`normattn evaluate runs/kna` – as trained, by the usual protocols, at 1, 2, 4 and 8 times its length

`normattn evaluate runs/kna --methods YaRN,ReRoPE --multiples 1,8`

`normattn evaluate runs/kna --protocols last-segment --lengths 512,1024`

`normattn evaluate runs/kna --protocols by-position,retrieval --methods all --multiples 1,4,16,64`

What was measured before is not measured again. `as is` among the methods is the unmodified model,
`all` is that and every method that the run's score can take.
"""

    run: Path = argument(help="The directory of a finished run.")
    methods: tuple[str, ...] = option(
        "as is",
        read=names,
        help="Methods, by commas: NTK, YaRN, ReRoPE, logn+, PI …; or all.",
    )
    protocols: tuple[str, ...] | None = option(
        None,
        read=names,
        help="Protocols, by commas: train-length, non-repeated, repeated, last-segment, "
        "by-position, retrieval. [default: the first four]",
    )
    multiples: tuple[int, ...] | None = option(
        None, read=integers, help="Tested lengths in units of L. [default: 1,2,4,8]"
    )
    lengths: tuple[int, ...] | None = option(
        None, read=integers, help="Tested lengths in tokens, each a multiple of L."
    )
    max_windows: int = option(
        128, min=1, help="Windows in a set, at most; more means narrower intervals."
    )
    max_tokens: int = option(16384, min=1, help="Tokens in a batch, at most; bounds the memory.")
    seed: int = option(0, min=0, help="Chooses windows and repeated segments.")
    threads: int = option(1, min=1, help="CPU threads of this process.")


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Continue one or more prompts.

    An answer also ends where the model ends a document. A method with an open factor takes the one
    that reaches the end of the longest answer; YaRN(factor=8) gives it.
    """

    epilog: ClassVar[str] = """
**Examples**

`normattn generate runs/kna --prompt "def main("` – always the likeliest token

`normattn generate runs/kna --file chapter.txt --method YaRN --max-new-tokens 500` – from a text
longer than the training length; the factor follows from the length

`normattn generate runs/kna --prompt "import " --temperature 0.8 --top-p 0.95 --seed 7`

`normattn generate runs/kna --prompt "class " --prompt "if " --stop ":"` – each up to a colon

Only the answers go to stdout.
"""

    run: Path = argument(help="The directory of a finished run.")
    prompt: list[str] | None = option(None, help="A prompt; may be repeated.")
    file: list[Path] | None = option(None, help="A file whose text is another prompt.")
    method: str = option("as is", help="Method, as in `normattn evaluate`.")
    max_new_tokens: int = option(128, min=1, help="New tokens, at most.")
    temperature: float = option(0.0, help="0: greedy decoding; above 0: sampling.")
    top_k: int | None = option(None, min=1, help="Sample among the K likeliest tokens.")
    top_p: float | None = option(
        None, help="Sample among the likeliest tokens of this total probability."
    )
    stop: list[str] | None = option(None, help="Stop string; may be repeated.")
    seed: int = option(0, min=0, help="Sampling seed; prompt r takes SEED + r.")
    threads: int = option(1, min=1, help="CPU threads of this process.")


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write RUN's model, tokeniser and a model card to DIR, in Hugging Face's format.

    Causal and masked language models and classifiers. The card has what the run recorded: data,
    settings, steps, the last metrics, and the table of whatever was evaluated.
    """

    epilog: ClassVar[str] = """
**Examples**

`normattn export runs/kna exported/kna --license apache-2.0` – model, tokeniser, model card

In Python, `import normattn.hf` makes the model known, then
`AutoModelForCausalLM.from_pretrained("exported/kna")` loads it.
"""

    run: Path = argument(help="The directory of a finished run.")
    out: Path = argument(metavar="DIR", help="A new or empty directory.")
    licence: str | None = option(
        None, "--license", help="Licence on the model card. [default: none]"
    )


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Inspect a trained model: entropy, largest logits, sinks and norms of every head.

    Of language models, classifiers, translation models, Vision Transformers, and any model of
    transformers. Everything is streamed from the attention kernels: long texts need no more memory.

    Prints a table of the layers. OUT gets report.html, table.md, figures/ and measurements.parquet,
    from which `normattn report OUT` makes the page again.
    """

    epilog: ClassVar[str] = """
**Examples**

`normattn inspect runs/kna` – every layer and head, on held-out text of the training length

`normattn inspect runs/kna --length 2048` – beyond the training length; with `--method YaRN`, what
the method changes there

`normattn inspect runs/kna --text chapter.txt --attention 3,0` – your own text, and the attention of
head 0 in layer 3 as an image; `--attention all` draws all heads

`normattn inspect runs/kna --cosines --json > kna.json` – for a program to read

`normattn inspect ./my-model --text book.txt --length 2048`, `normattn inspect model.gguf` – any
model of transformers; `--method "YaRN(factor=4)"` under a method

`normattn inspect runs/translation --text sentences.txt` – a translation model, a sentence a line

`normattn train --score KNA --set inspect_every=50 --out runs/kna` – the same while a model trains:
lines in RUN/diagnostics.jsonl, and a warning when scores concentrate or spread

**Columns** are means over the heads of a layer and the queries of all texts. entropy: of attention,
in nats; / ln n: 0 attends to one key, 1 to all alike. largest: the largest logit of any visible
pair. token 0, sink: attention to the first token, and to a learned sink. beyond L: to keys at
i − j ≥ L, the training length. unseen: attention times the share of rotary feature pairs at an
angle that training never had. ‖q‖, ‖k‖: norms as the projections give them.
"""

    run: Path = argument(
        help="The directory of a finished run, a folder of transformers or a GGUF file."
    )
    text: Path | None = option(
        None,
        help="A text file to read; of a classifier a text a line, of a translation model a "
        "sentence a line. [default: held-out data of the run's own corpus; for a model of "
        "transformers the standard library's source]",
    )
    method: str = option(
        "as is",
        help="Method, as in `normattn evaluate`; for a model of transformers with its parameters: "
        "'YaRN(factor=4)'.",
    )
    length: int | None = option(
        None,
        min=2,
        help="Tokens of a window or document. [default: those of training; for a model of "
        "transformers 512]",
    )
    windows: int | None = option(
        None,
        min=1,
        help="Windows, texts, pairs or images, at most. [default: 16; for a model of transformers "
        "4]",
    )
    bins: int = option(16, min=1, help="Bins of the query's position.")
    cosines: bool = flag("--cosines", "Also the range of cos(q, k): one more product.")
    attention: str = option(
        "sharpest",
        metavar="LAYER,HEAD",
        help="Whose attention to the first 64 tokens is drawn: LAYER,HEAD (from 0), all, or the "
        "sharpest head.",
    )
    out: Path | None = option(
        None,
        help="Where the page and its measurements go. [default: RUN/inspection; for a model of "
        "transformers runs/inspect-MODEL]",
    )
    as_json: bool = flag("--json", "Print the tables as JSON instead.")
    max_tokens: int = option(8192, min=1, help="Tokens in a batch, at most; bounds the memory.")
    seed: int = option(0, min=0, help="Chooses the windows.")
    dtype: Literal["fp32", "bf16"] = option("fp32", help="Type of the weights.")
    device: str | None = option(
        None,
        help="auto, cpu, cuda or cuda:N. [default: that of the run's training; for a model of "
        "transformers auto]",
    )
    threads: int = option(1, min=1, help="CPU threads of this process.")


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write the page (report.html, table.md, figures) of everything that was measured below RUNS.

    Rows that share documents and seeds are compared in pairs, with confidence intervals. A folder
    that holds measurements.parquet needs nothing else. Folders of one study with other rows or
    seeds are joined; their settings must be the same. Runs of one row are its seeds: name runs that
    were trained differently, as LABEL=RUN.
    """

    epilog: ClassVar[str] = """
**Examples**

`normattn report runs/kna runs/baseline --out runs/report`

`normattn report wide=runs/a narrow=runs/b --out runs/widths` – two trainings of one score

`normattn report runs/keynorm-laptop` – tabulate a sweep again, into its own directory

`normattn report results/keynorm-workstation --out again` – every page from its measurements alone

`normattn report runs/seeds-0-1 runs/seeds-2-4 --out runs/all` – one study, trained in two places

`normattn report runs/extend-a runs/extend-b --out gallery` – models and texts of `normattn extend`
"""

    runs: list[str] = argument(
        metavar="[LABEL=]RUN",
        help="Runs, directories with runs below them, or a folder with measurements.parquet. "
        "LABEL names the row of a run.",
    )
    out: Path | None = option(
        None, help="Where table.md, .csv, .json and figures/ go. [default: the first RUN]"
    )
    study: str | None = option(
        None, help="The FILE.py of your own study. [default: what RUN names]"
    )
