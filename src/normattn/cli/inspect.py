"""`normattn inspect`: what every layer and head of a trained model attends to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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


def command(
    run: Annotated[
        Path,
        typer.Argument(
            help="The directory of a finished run, a folder of transformers or a GGUF file."
        ),
    ],
    text: Annotated[
        Path | None,
        typer.Option(
            help="A text file to read; of a classifier a text a line, of a translation model a "
            "sentence a line. [default: held-out data of the run's own corpus; for a model of "
            "transformers the standard library's source]"
        ),
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            help="Post-hoc method to read with, as in `normattn evaluate`; for a model of "
            "transformers with its parameters: 'YaRN(factor=4)'."
        ),
    ] = "as is",
    length: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Tokens of a window or document. [default: those of training; for a model of "
            "transformers 512]",
        ),
    ] = None,
    windows: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Windows, texts, pairs or images, at most. [default: 16; for a model of "
            "transformers 4]",
        ),
    ] = None,
    bins: Annotated[int, typer.Option(min=1, help="Bins of the query's position.")] = 16,
    cosines: Annotated[
        bool, typer.Option("--cosines", help="Also the range of cos(q, k): one more product.")
    ] = False,
    attention: Annotated[
        str,
        typer.Option(
            metavar="LAYER,HEAD",
            help="Whose attention to the first 64 tokens is drawn: LAYER,HEAD (from 0), all, or "
            "the sharpest head.",
        ),
    ] = "sharpest",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Where the page and its measurements go. [default: RUN/inspection; for a model of "
            "transformers runs/inspect-MODEL]"
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the tables as JSON instead.")
    ] = False,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens in a batch, at most; bounds the memory.")
    ] = 8192,
    seed: Annotated[int, typer.Option(min=0, help="Chooses the windows.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of this process.")] = 1,
) -> None:
    """Look into a trained model: entropy, largest logits, sinks and norms of every head.

    Of language models, classifiers, translation models, Vision Transformers, and any model of
    transformers.

    Everything is streamed from the attention kernels, so that long texts need no more memory.
    Prints a table of the layers; OUT gets report.html, table.md, figures/ and measurements.parquet:
    every layer and head, heat maps, curves over position (and over training, where it was probed),
    one head's attention. `normattn report OUT` makes the page again from the measurements alone.
    """
    from normattn.commands.inspection import Shown, inspect_run, is_foreign
    from normattn.files import expanded

    asked = Shown(
        model=run,
        text=text,
        method=method,
        length=length,
        windows=windows,
        bins=bins,
        cosines=cosines,
        attention=attention,
        out=out,
        as_json=as_json,
        max_tokens=max_tokens,
        seed=seed,
        threads=threads,
    )
    if is_foreign(expanded(run)):
        from normattn.commands.inspection_foreign import inspect_foreign

        inspect_foreign(asked)
    else:
        inspect_run(asked)
