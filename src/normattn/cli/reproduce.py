"""`normattn reproduce STUDY`: a published experiment, from data to table and figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from normattn.cli import values

app = typer.Typer(
    no_args_is_help=True,
    help="Run a published experiment from data to table: keynorm, window, continue, mechanism.",
)

GOES_ON = (
    "Stop it anywhere and run it again: it goes on, and ends in the same table to the last bit."
)

KEYNORM = f"""
**Examples**

`normattn reproduce keynorm --preset smoke` – the whole path in about a minute

`normattn reproduce keynorm` – the table itself, on two cores in about 20 minutes

`normattn reproduce keynorm --variants Baseline,QNA,KNA --seeds 3` – more seeds

`normattn reproduce keynorm --methods all` – every method, a row for every trained-in part

`normattn reproduce keynorm --preset gpu-100m --corpus hf:NAME --plan` – its cost

{GOES_ON}
"""

WINDOW = f"""
**Examples**

`normattn reproduce window --preset smoke` – the whole path, small

`normattn reproduce window` – the study itself, on two cores in about 6 minutes

`normattn reproduce window --seeds 3` – with intervals over three trained models

`normattn reproduce window --set "window.shares=[0.25,0.5,1,2]"` – other windows

{GOES_ON}
"""

CONTINUE = f"""
**Examples**

`normattn reproduce continue --preset smoke` – the whole path, small

`normattn reproduce continue` – the study itself; `--plan` says how long it takes here

`normattn reproduce continue --seeds 3` – with intervals over three trained models of each kind

`normattn reproduce continue --set continued.multiple=8 --plan` – at 8 training lengths: its cost

{GOES_ON}
"""

MECHANISM = f"""
**Examples**

`normattn reproduce mechanism --preset smoke` – the whole path, small

`normattn reproduce mechanism` – the study itself; `--plan` says how long it takes here

`normattn reproduce mechanism --variants Baseline,KNA --seeds 3` – two scores, three models each

`normattn reproduce mechanism --set mechanism.multiple=16 --plan` – read to 16 L: its cost

{GOES_ON}
"""

Preset = Annotated[str, typer.Option(help="smoke, laptop, gpu-100m, or a TOML file of your own.")]
Seeds = Annotated[
    str | None,
    typer.Option(help="How many (3 means 0, 1, 2), or which (7,8). [default: the preset's]"),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        min=1, help="Children at a time; changes no result. [default: a core each; 1 on a GPU]"
    ),
]
Out = Annotated[Path | None, typer.Option(help="[default: runs/STUDY-PRESET]", show_default=False)]
Corpus = Annotated[
    str | None,
    typer.Option(help="Another corpus: a file or folder, hf:NAME. [default: its own]"),
]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any setting, as training.steps=100."),
]
Plan = Annotated[bool, typer.Option("--plan", help="Print the plan and stop.")]


@app.callback()
def _group() -> None:
    """Run a published experiment from data to table."""


@app.command(epilog=KEYNORM)
def keynorm(
    preset: Preset = "laptop",
    variants: Annotated[
        str | None,
        typer.Option(
            help="Trained scores, by commas; any that `normattn list` can name; or `all`. "
            "[default: Baseline, QNA, KNA, CosA, each with and without -logn]"
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Ways of reading on, or `all`: every one that a score can take, and a row for "
            "every part that can be trained in. [default: as is,NTK,YaRN,ReRoPE]"
        ),
    ] = None,
    seeds: Seeds = None,
    jobs: Jobs = None,
    out: Out = None,
    corpus: Corpus = None,
    changes: Changes = None,
    plan: Plan = False,
) -> None:
    """Train each score, read to 8 times the training length each way, tabulate and plot.

    The plan comes first: runs, tokens, FLOPs, time by a short measurement on this machine, disk.
    Rows are added by running it again with other --variants, --methods or --seeds on the same OUT;
    any other setting that differs is refused.
    """
    _reproduce(
        "keynorm",
        plan,
        preset=preset,
        variants=values.names(variants, "--variants"),
        methods=values.names(methods, "--methods"),
        seeds=values.seeds(seeds),
        jobs=jobs,
        out=out,
        changes=_changes(corpus, changes),
    )


@app.command(epilog=WINDOW)
def window(
    preset: Preset = "laptop",
    seeds: Seeds = None,
    jobs: Jobs = None,
    out: Out = None,
    corpus: Corpus = None,
    changes: Changes = None,
    plan: Plan = False,
) -> None:
    """Read with ReRoPE at windows of ⅛ to 1 training lengths, without log-n, with it and log-n†.

    Trains Baseline and Baseline-logn, reads to 8 times the training length, and writes one table
    and one figure: accuracy against the window, a line for each form of log-n.
    """
    _reproduce(
        "window",
        plan,
        preset=preset,
        seeds=values.seeds(seeds),
        jobs=jobs,
        out=out,
        changes=_changes(corpus, changes),
    )


@app.command("continue", epilog=CONTINUE)
def continue_(
    preset: Preset = "laptop",
    seeds: Seeds = None,
    jobs: Jobs = None,
    out: Out = None,
    corpus: Corpus = None,
    changes: Changes = None,
    plan: Plan = False,
) -> None:
    """Train at L, go on at 4 L: KeyNorm as it is, Baseline as it is, with PI and with ABF.

    Each model is read at L (what is forgotten), 4 L and 16 L before and along the continued
    training; tables and a figure of loss and accuracy by continued steps. The settings of the
    continued training are said once, in the preset, for all scores.
    """
    _reproduce(
        "continue",
        plan,
        preset=preset,
        seeds=values.seeds(seeds),
        jobs=jobs,
        out=out,
        changes=_changes(corpus, changes),
    )


@app.command(epilog=MECHANISM)
def mechanism(
    preset: Preset = "laptop",
    variants: Annotated[
        str | None,
        typer.Option(
            help="Trained scores, by commas. [default: Baseline, KNA, KNA-NoPE, and QKLayerNorm "
            "and QKRMSNorm with and without gain]"
        ),
    ] = None,
    seeds: Seeds = None,
    jobs: Jobs = None,
    out: Out = None,
    corpus: Corpus = None,
    changes: Changes = None,
    plan: Plan = False,
) -> None:
    """Test the source's explanation: key norms against attention, and cosines at L and 8 L.

    Trains each score and counts, by hooks on the trained model: the rank correlation of ‖k_j‖ with
    the attention that key j receives, and the range of cos(q, k) at L and at 8 L. A table and two
    figures, with intervals over documents (and seeds).
    """
    _reproduce(
        "mechanism",
        plan,
        preset=preset,
        variants=values.names(variants, "--variants"),
        seeds=values.seeds(seeds),
        jobs=jobs,
        out=out,
        changes=_changes(corpus, changes),
    )


def _changes(corpus: str | None, changes: list[str] | None) -> dict[str, Any]:
    assigned = values.assignments(changes or [])
    return {**({"training.data.corpus": corpus} if corpus else {}), **assigned}


def _reproduce(study: str, only_plan: bool, **request: Any) -> None:
    from importlib import import_module

    from normattn.recipes.studies import Request
    from normattn.recipes.sweep import reproduce

    # The modules are named after what they do: `continue` is a word of Python.
    module = {"continue": "continued"}.get(study, study)
    resolve = import_module(f"normattn.recipes.{module}").resolve
    if reproduce(resolve, Request(**request), only_plan=only_plan):
        raise typer.Exit(2)
