"""`normattn list`: what a score can be made of."""

from __future__ import annotations

from dataclasses import dataclass

from normattn.cli.asking import argument, flag

EPILOG = """
**Examples**

`normattn list` – every part by name, on one page

`normattn list YaRN` – its equation, source, parameters, what goes with it, its kernels

`normattn list KNA-logn-YaRN`, `normattn list gpt-oss` – of all parts of a score, and of a model's
"""


@dataclass(frozen=True, kw_only=True)
class ListOptions:
    """List the parts of a score; of one that is named, all that is known.

    Names are joined by hyphens into a score: `KNA-logn` is trained, `KNA-logn-YaRN` is that model
    stretched afterwards. What goes together is found by trying, and portable kernels by asking
    the dispatcher about 2048 tokens.
    """

    name: str | None = argument(None, help="A part, a score or a model. [default: all, in short]")
    as_json: bool = flag("--json", "Print everything as one JSON list instead.")
