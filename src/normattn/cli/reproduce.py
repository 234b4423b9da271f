"""`normattn reproduce keynorm`: eight trained scores, four ways of reading on, one table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from normattn.cli import values

app = typer.Typer(
    no_args_is_help=True,
    help="Run a published experiment from data to table. There is one so far: `keynorm`.",
)

EPILOG = """
**Examples**

`normattn reproduce keynorm --preset smoke` – the whole path in about a minute

`normattn reproduce keynorm` – the table itself, on two cores in about 20 minutes

`normattn reproduce keynorm --variants Baseline,QNA,KNA --seeds 3` – more seeds

`normattn reproduce keynorm --preset gpu-100m --corpus hf:NAME --plan` – its cost

Stop it anywhere and run it again: it goes on, and ends in the same table to the last bit.
"""


@app.callback()
def _group() -> None:
    """Run a published experiment from data to table."""


@app.command(epilog=EPILOG)
def keynorm(
    preset: Annotated[
        str, typer.Option(help="smoke, laptop, gpu-100m, or a TOML file of your own.")
    ] = "laptop",
    variants: Annotated[
        str | None,
        typer.Option(
            help="Trained scores, by commas; any that `normattn list` can name. "
            "[default: Baseline, QNA, KNA, CosA, each with and without -logn]"
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(help="Ways of reading on. [default: as is,NTK,YaRN,ReRoPE]"),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(help="How many (3 means 0, 1, 2), or which (7,8). [default: the preset's]"),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1, help="Children at a time; changes no result. [default: a core each; 1 on a GPU]"
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="[default: runs/keynorm-PRESET]", show_default=False)
    ] = None,
    corpus: Annotated[
        str | None,
        typer.Option(help="Another corpus: a file or folder, hf:NAME. [default: its own]"),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any setting, as training.steps=100."),
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print the plan and stop.")] = False,
) -> None:
    """Train each score, read to 8 times the training length each way, tabulate and plot.

    The plan comes first: runs, tokens, FLOPs, time by a short measurement on this machine, disk.
    Rows are added by running it again with other --variants, --methods or --seeds on the same OUT;
    any other setting that differs is refused.
    """
    assigned = values.assignments(changes or [])

    from normattn.recipes.keynorm import resolve
    from normattn.recipes.studies import Request
    from normattn.recipes.sweep import reproduce

    failed = reproduce(
        resolve,
        Request(
            preset=preset,
            variants=values.names(variants, "--variants"),
            methods=values.names(methods, "--methods"),
            seeds=values.seeds(seeds),
            jobs=jobs,
            out=out,
            changes={**({"training.data.corpus": corpus} if corpus else {}), **assigned},
        ),
        only_plan=plan,
    )
    if failed:
        raise typer.Exit(2)
