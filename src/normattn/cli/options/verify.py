"""`normattn verify`: does an engine's configuration give what was meant?"""

from __future__ import annotations

from dataclasses import dataclass

from normattn.cli.asking import argument, flag, option

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


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Compare what an engine was told of a model's positions with what is meant."""

    model: str = argument(help="What is meant: a folder, a GGUF file, a config.json, a hub name.")
    against: str = option(
        help="What the engine was told: a config.json or its folder, a JSON of some fields, a GGUF "
        "file, or a text with the engine's flags."
    )
    method: str | None = option(
        None, help="The method that is meant. [default: that which MODEL was saved under]"
    )
    train_length: int | None = option(
        None, min=1, help="How far it was trained to read. [default: its configuration's]"
    )
    as_json: bool = flag("--json", "Print a record as JSON instead of lines.")
