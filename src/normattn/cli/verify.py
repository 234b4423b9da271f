"""`normattn verify`: does an engine's configuration give what was meant?"""

from __future__ import annotations

from typing import Annotated

import typer

EPILOG = """
**Examples**

`normattn verify ./extended --against /srv/model/config.json` – a model that
`normattn extend --save` wrote, and what is served

`normattn verify ./my-model --method "YaRN(factor=4)" --against overrides.json` – fields as for
vLLM's `--hf-overrides`, on top of the model's own

`normattn verify ./my-model --method "YaRN(factor=4)" --against serve.sh` – flags of vLLM, SGLang or
llama.cpp; also a GGUF file

**Ends with** 0 where inverse frequencies, attention factor and lengths are as meant, 1 where they
are not, 2 for bad input. The usual mistakes are named, a sentence each.
"""


def command(
    model: Annotated[
        str, typer.Argument(help="What is meant: a folder, a GGUF file, a config.json, a hub name.")
    ],
    against: Annotated[
        str,
        typer.Option(
            help="What the engine was told: a config.json or its folder, a JSON of some fields, a "
            "GGUF file, or a text with the engine's flags."
        ),
    ],
    method: Annotated[
        str | None,
        typer.Option(help="The method that is meant. [default: that which MODEL was saved under]"),
    ] = None,
    train_length: Annotated[
        int | None,
        typer.Option(min=1, help="How far it was trained to read. [default: its configuration's]"),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a record as JSON instead of lines.")
    ] = False,
) -> int:
    """Compare what an engine was told of a model's positions with what is meant."""
    from normattn.commands.verifying import verify_told

    return verify_told(model, against, method, train_length, as_json)
