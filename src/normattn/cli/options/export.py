"""`normattn export`: a finished run as a folder that transformers loads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from normattn.cli.asking import argument, option

EPILOG = """
**Examples**

`normattn export runs/kna exported/kna --license apache-2.0` – model, tokeniser, model card

In Python, `import normattn.hf` makes the model known, then
`AutoModelForCausalLM.from_pretrained("exported/kna")` loads it.
"""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Write RUN's model, tokeniser and a model card to DIR, in Hugging Face's format.

    Causal and masked language models and classifiers. The card says what the run says: data,
    settings, steps, the last metrics, and the table of whatever was evaluated.
    """

    run: Path = argument(help="The directory of a finished run.")
    out: Path = argument(metavar="DIR", help="A new or empty directory.")
    licence: str | None = option(
        None, "--license", help="Licence on the model card. [default: none]"
    )
