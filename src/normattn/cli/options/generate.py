"""`normattn generate`: a trained run continues a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from normattn.cli.asking import argument, option

EPILOG = """
**Examples**

`normattn generate runs/kna --prompt "def main("` – always with the likeliest token

`normattn generate runs/kna --file chapter.txt --method YaRN --max-new-tokens 500` – from a text
longer than the model was trained to read; the stretch is taken from the length

`normattn generate runs/kna --prompt "import " --temperature 0.8 --top-p 0.95 --seed 7`

`normattn generate runs/kna --prompt "class " --prompt "if " --stop ":"` – each up to a colon

The answer alone goes to stdout, so that it can be piped on.
"""


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Continue one or more prompts; an answer appears as it is made.

    An answer also ends where the model ends a document. Of several prompts the first is answered
    before your eyes, the others, made at the same time, follow with their prompts. Methods that
    stretch by a factor take the one that reaches the end of the longest answer, unless METHOD says
    it: YaRN(factor=8).
    """

    run: Path = argument(help="The directory of a finished run.")
    prompt: list[str] | None = option(None, help="A prompt; may be repeated.")
    file: list[Path] | None = option(None, help="A file whose text is another prompt.")
    method: str = option("as is", help="Post-hoc method to read with, as in `normattn evaluate`.")
    max_new_tokens: int = option(128, min=1, help="New tokens, at most.")
    temperature: float = option(0.0, help="0: greedy decoding; above 0: sampling.")
    top_k: int | None = option(None, min=1, help="Sample among the K likeliest tokens.")
    top_p: float | None = option(
        None, help="Sample among the likeliest tokens of this total probability."
    )
    stop: list[str] | None = option(None, help="Stop string; may be repeated.")
    seed: int = option(0, min=0, help="Sampling seed; prompt r takes SEED + r.")
    threads: int = option(1, min=1, help="CPU threads of this process.")
