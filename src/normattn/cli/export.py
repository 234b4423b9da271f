"""`normattn export`: a finished run as a folder that transformers loads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EPILOG = """
**Examples**

`normattn export runs/kna exported/kna --license apache-2.0` – model, tokeniser, model card

In Python, `import normattn.hf` makes the model known, then
`AutoModelForCausalLM.from_pretrained("exported/kna")` loads it.
"""


def command(
    run: Annotated[Path, typer.Argument(help="The directory of a finished run.")],
    out: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty directory.")],
    licence: Annotated[
        str | None,
        typer.Option("--license", help="Licence on the model card. [default: none]"),
    ] = None,
) -> None:
    """Write RUN's model, tokeniser and a model card to DIR, in Hugging Face's format.

    Causal and masked language models and classifiers. The card says what the run says: data,
    settings, steps, the last metrics, and the table of whatever was evaluated.
    """
    from normattn.commands.exporting import export_run

    export_run(run, out, licence)
