"""`normattn score`: the attention score of a model, read off its layers."""

from __future__ import annotations

from dataclasses import dataclass

from normattn.cli.asking import argument, flag, option

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


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """Name the attention score of every layer of a transformers model, and check the name."""

    model: str = argument(help="A folder, a GGUF file, a config.json or a name on the hub.")
    tokens: int = option(
        48, min=8, max=4096, help="Tokens that the layers read while they are recorded."
    )
    as_json: bool = flag("--json", "Print a record as JSON instead of lines.")
