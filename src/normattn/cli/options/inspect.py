"""`normattn inspect`: what every layer and head of a trained model attends to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from normattn.cli import values
from normattn.cli.asking import argument, flag, option

EPILOG = """
**Examples**

`normattn inspect runs/kna` – every layer and head, on held-out text of the training length

`normattn inspect runs/kna --length 2048` – beyond it: how much attention goes where training never
was; `--method YaRN` shows what a stretching method changes about that

`normattn inspect runs/kna --text chapter.txt --attention 3,0` – a text of your own, and the
attention of head 0 in layer 3 as an image; `--attention all` draws them all

`normattn inspect runs/kna --cosines --json > kna.json` – for a program to read

`normattn inspect ./my-model --text book.txt --length 2048`, `normattn inspect model.gguf` – any
model of transformers; `--method "YaRN(factor=4)"` under a method

`normattn inspect runs/translation --text sentences.txt` – a translation model: its
encoder, its decoder and the cross attention, while it reads a sentence a line and translates it

`normattn train --score KNA --set inspect_every=50 --out runs/kna` – the same while a model trains:
lines in RUN/diagnostics.jsonl, and a warning when scores concentrate or spread

**What the columns say** – means over the heads of a layer and the queries of all texts

entropy: of attention, in nats; / ln n: 0 looks at one key, 1 at all alike. largest: the largest
logit of any visible pair.

token 0, sink: attention to the first token, and to a learned sink. beyond L: to keys at i − j ≥ L,
the training length. unseen: attention times the share of rotary feature pairs that stand at an
angle which training never had. ‖q‖, ‖k‖: norms as the projections give them.
"""


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """Look into a trained model: entropy, largest logits, sinks and norms of every head.

    Of language models, classifiers, translation models, Vision Transformers, and any model of
    transformers.

    Everything is streamed from the attention kernels, so that long texts need no more memory.
    Prints a table of the layers; OUT gets report.html, table.md, figures/ and measurements.parquet:
    every layer and head, heat maps, curves over position (and over training, where it was probed),
    one head's attention. `normattn report OUT` makes the page again from the measurements alone.
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
        help="Post-hoc method to read with, as in `normattn evaluate`; for a model of transformers "
        "with its parameters: 'YaRN(factor=4)'.",
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
    dtype: Literal["fp32", "bf16"] = option("fp32", read=values.dtype, help="fp32 or bf16.")
    device: str | None = option(
        None,
        help="auto, cpu, cuda or cuda:N. [default: that of the run's training; for a model of "
        "transformers auto]",
    )
    threads: int = option(1, min=1, help="CPU threads of this process.")
