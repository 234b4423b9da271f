"""`normattn score`: the attention score of a model, read off its layers."""

from __future__ import annotations

from typing import Annotated

import typer

EPILOG = """
**Examples**

`normattn score ./my-model` – the score of every layer, as a name that `--score` and
`ScoreSpec.parse` take

`normattn score model.gguf`, `normattn score config.json`, `normattn score Qwen/Qwen3-8B`

`normattn score ./my-model --json` – for a program to read

**How it is read** – a small random model of the configuration reads a few tokens; normalisation,
rotation, scale, window, cap, sink and gate are fitted to what its layers do, and
`normattn.attention` with the score so found is compared with each layer's own attention. A layer
without a name says what is missing, and by how much a score differs that is not the layer's.

**Ends with** 0 where the score of every layer is verified, 1 where one is not, 2 for bad input.
"""


def command(
    model: Annotated[
        str, typer.Argument(help="A folder, a GGUF file, a config.json or a name on the hub.")
    ],
    tokens: Annotated[
        int, typer.Option(min=8, max=4096, help="Tokens that the layers read while listened to.")
    ] = 48,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a record as JSON instead of lines.")
    ] = False,
) -> int:
    """Name the attention score of every layer of a transformers model, and check the name."""
    from normattn.commands.score_reading import read_score

    return read_score(model, tokens, as_json)
