"""The `normattn` command: its sub-commands, and what every one of them does about errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from normattn.cli import demo, reproduce
from normattn.cli.asking import told
from normattn.cli.checked import Commands
from normattn.cli.failures import exit_code_of
from normattn.cli.options import (
    evaluate,
    export,
    extend,
    generate,
    inspect,
    listing,
    lm_eval,
    report,
    score,
    train,
    verify,
)
from normattn.stopping import asked_to_stop

EPILOG = """
**Examples**

`normattn demo` – two small models read past their training length: a collapse and its rescue

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


def _command(name: str, epilog: str, **settings: Any) -> Callable[[Callable[[Any], Any]], Any]:
    """Makes a command of a function that takes the dataclass of its options.

    The functions import what they do only when they are called: `--help` waits for no library.
    """
    return lambda work: app.command(name, epilog=epilog, **settings)(told(work))


@_command("demo", demo.EPILOG)
def _demo(options: demo.DemoOptions) -> None:
    demo.run_demo(options)


@_command("list", listing.EPILOG)
def _list(options: listing.ListOptions) -> None:
    from normattn.cli.listing import show_parts

    show_parts(options.name, options.as_json)


@_command("train", train.EPILOG)
def _train(options: train.TrainOptions) -> None:
    from normattn.cli.training_run import train_or_plan

    train_or_plan(options)


@_command("evaluate", evaluate.EPILOG)
def _evaluate(options: evaluate.EvaluateOptions) -> None:
    from normattn.cli.evaluation_run import evaluate_run

    evaluate_run(options)


@_command("extend", extend.EPILOG)
def _extend(options: extend.ExtendOptions) -> None:
    if options.emit is not None:
        from normattn.cli.emitting import emit_method

        emit_method(options, options.emit)
    else:
        from normattn.cli.extending import extend_model

        extend_model(options)


@_command("verify", verify.EPILOG)
def _verify(options: verify.VerifyOptions) -> int:
    from normattn.cli.verifying import verify_told

    return verify_told(options)


@_command("score", score.EPILOG)
def _score(options: score.ScoreOptions) -> int:
    from normattn.cli.score_reading import read_score

    return read_score(options.model, options.tokens, options.as_json)


@_command("generate", generate.EPILOG)
def _generate(options: generate.GenerateOptions) -> None:
    from normattn.cli.generation import generate_run

    generate_run(options)


@_command("export", export.EPILOG)
def _export(options: export.ExportOptions) -> None:
    from normattn.cli.exporting import export_run

    export_run(options.run, options.out, options.licence)


@_command("inspect", inspect.EPILOG)
def _inspect(options: inspect.InspectOptions) -> None:
    from normattn.cli.inspection import inspect_run, is_foreign
    from normattn.io import expanded

    if is_foreign(expanded(options.run)):
        from normattn.cli.inspection_foreign import inspect_foreign

        inspect_foreign(options)
    else:
        inspect_run(options)


@_command("report", report.EPILOG)
def _report(options: report.ReportOptions) -> None:
    from normattn.cli.reporting import report

    report(options.runs, options.out, options.study)


@_command(
    "lm-eval",
    lm_eval.EPILOG,
    cls=TyperCommand,
    context_settings={"ignore_unknown_options": True},
)
def _lm_eval(options: lm_eval.HarnessOptions) -> None:
    from normattn.cli.harness_command import print_tasks_path, run_harness

    if options.tasks_path:
        print_tasks_path()
    else:
        run_harness(options.arguments or [])


app.add_typer(reproduce.app, name="reproduce")


Parent = Annotated[int, typer.Argument()]
StudyName = Annotated[str, typer.Option("--study")]


def _cell(directory: Path, study: StudyName, parent: Parent = 0) -> None:
    """Train and evaluate the run in `directory`; stop when the process `parent` is gone."""
    from normattn.lab.studies import errors_in, find_typed
    from normattn.lab.sweep.runner import run_child

    found = find_typed(study)
    with errors_in(found):
        code = run_child(directory, found, parent)
    if code:
        raise typer.Exit(code)


app.command("_cell", hidden=True)(_cell)


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
