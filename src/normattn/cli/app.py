"""The `normattn` command: its sub-commands, and what every one of them does about errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer
from typer.core import TyperCommand

from normattn.cli import (
    bench,
    evaluate,
    export,
    extend,
    generate,
    hidden,
    inspect,
    listing,
    lm_eval,
    report,
    reproduce,
    score,
    train,
    verify,
)
from normattn.cli.checked import Commands
from normattn.cli.failures import exit_code_of
from normattn.stopping import asked_to_stop

EPILOG = """
**Examples**

`normattn list` – every part a score can be made of; `normattn list YaRN` – all about one

`normattn reproduce keynorm` – train eight scores, read past the training length, tabulate

`normattn train --score KNA-logn --steps 500 --out runs/kna` – train one small model

`normattn evaluate runs/kna --methods YaRN,ReRoPE` – what stretching does to it

`normattn extend ./my-model --text book.txt --lengths 8k,16k --out runs/extend` – an existing model

`normattn verify ./my-model --method "YaRN(factor=4)" --against served.json` – is it served so?

`normattn score ./my-model` – the attention score of each of its layers, by name

`normattn export runs/kna exported` – a folder that transformers loads

`normattn generate runs/kna --prompt "def main("` – continue a prompt

`normattn inspect runs/kna` – what its heads attend to: entropy, logits, sinks, figures

`normattn report runs/kna runs/baseline --out runs/report` – compare runs in one table

`normattn bench` – beside the peers, against goals
"""

app = Commands(
    name="normattn",
    help="The attention score as a value: train with it, stretch it, measure how far it reads.",
    epilog=EPILOG,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> bool:
    if wanted:
        from normattn import __version__

        print(__version__)
        raise typer.Exit
    return wanted


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """The attention score as a value: train with it, stretch it, measure how far it reads."""


app.command("list", epilog=listing.EPILOG)(listing.command)
app.command("train", epilog=train.EPILOG)(train.command)
app.command("evaluate", epilog=evaluate.EPILOG)(evaluate.command)
app.command("extend", epilog=extend.EPILOG)(extend.command)
app.command("verify", epilog=verify.EPILOG)(verify.command)
app.command("score", epilog=score.EPILOG)(score.command)
app.command("generate", epilog=generate.EPILOG)(generate.command)
app.command("export", epilog=export.EPILOG)(export.command)
app.command("inspect", epilog=inspect.EPILOG)(inspect.command)
app.command("report", epilog=report.EPILOG)(report.command)
app.command("bench", epilog=bench.EPILOG)(bench.command)
app.command("lm-eval", cls=TyperCommand, epilog=lm_eval.EPILOG, context_settings=lm_eval.SETTINGS)(
    lm_eval.command
)
app.add_typer(reproduce.app, name="reproduce")
app.command("_cell", hidden=True)(hidden.cell)
app.command("_measure", hidden=True)(hidden.measure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 2 a mistake in the input, 3 diverged, 130 stopped.

    What is wrong with the input is one sentence on stderr; a traceback is always our own bug.
    Signals are answered a floor below, by `normattn.stopping`.
    """
    code = 0
    try:
        result = app(args=arguments, standalone_mode=False)
        code = result if isinstance(result, int) else 0
    except BrokenPipeError:
        # The reader of our output (head, less) has gone: that is not an error of ours.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except (Exception, KeyboardInterrupt) as error:
        if asked_to_stop():
            raise  # The guard in `__main__` answers for whatever a stop ended in.
        known = exit_code_of(error)
        if known is None:
            raise
        code = known
    sys.exit(code)
