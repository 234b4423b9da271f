"""`normattn generate`: a trained run continues a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EPILOG = """
**Examples**

`normattn generate runs/kna --prompt "def main("` – always with the likeliest token

`normattn generate runs/kna --file chapter.txt --method YaRN --max-new-tokens 500` – from a text
longer than the model was trained to read; the stretch is taken from the length

`normattn generate runs/kna --prompt "import " --temperature 0.8 --top-p 0.95 --seed 7`

`normattn generate runs/kna --prompt "class " --prompt "if " --stop ":"` – each up to a colon

The answer alone goes to stdout, so that it can be piped on.
"""


def command(
    run: Annotated[Path, typer.Argument(help="The directory of a finished run.")],
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be repeated.")] = None,
    file: Annotated[
        list[Path] | None, typer.Option(help="A file whose text is another prompt.")
    ] = None,
    method: Annotated[
        str, typer.Option(help="Post-hoc method to read with, as in `normattn evaluate`.")
    ] = "as is",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="New tokens, at most.")] = 128,
    temperature: Annotated[
        float, typer.Option(help="0: greedy decoding; above 0: sampling.")
    ] = 0.0,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Sample among the K likeliest tokens.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Sample among the likeliest tokens of this total probability."),
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be repeated.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Sampling seed; prompt r takes SEED + r.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of this process.")] = 1,
) -> None:
    """Continue one or more prompts; an answer appears as it is made.

    An answer also ends where the model ends a document. Of several prompts the first is answered
    before your eyes, the others, made at the same time, follow with their prompts. Methods that
    stretch by a factor take the one that reaches the end of the longest answer, unless METHOD says
    it: YaRN(factor=8).
    """
    from normattn.commands.generation import generate_run

    generate_run(
        run,
        prompts=prompt or [],
        files=file or [],
        method=method,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop=stop or [],
        seed=seed,
        threads=threads,
    )
