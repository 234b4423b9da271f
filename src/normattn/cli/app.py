"""The `normattn` command: its sub-commands, and its exit codes."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from normattn.cli import model_options, options, reproduce
from normattn.cli.failures import exit_code_of
from normattn.cli.parsing import CheckedCommand, command_of
from normattn.stopping import asked_to_stop

HELP = "Train, extend and evaluate Transformers with different attention scores."
EPILOG = """
**Examples**

`normattn demo` – two small models past their training length: a collapse and its rescue

`normattn reproduce keynorm` – train eight scores, evaluate them past the training length

`normattn extend ./my-model --text book.txt --lengths 8k,16k` – find a method for a pretrained model

`normattn COMMAND --help` has examples of each command.
"""
COMMANDS: dict[str, tuple[type[Any], str]] = {
    "demo": (options.Demo, "demo:run_demo"),
    "list": (options.List, "listing:show_components"),
    "train": (options.Train, "train:train_or_plan"),
    "evaluate": (options.Evaluate, "evaluate:evaluate_run"),
    "extend": (model_options.Extend, "extend:extend_model"),
    "verify": (model_options.Verify, "score:verify_engine"),
    "score": (model_options.Score, "score:name_scores"),
    "generate": (options.Generate, "generate:generate_text"),
    "export": (options.Export, "export:export_run"),
    "inspect": (options.Inspect, "inspect:inspect_model"),
    "report": (options.Report, "report:report_folders"),
    "lm-eval": (model_options.LmEval, "harness:run_harness"),
}
"""The options of each command, and the function that runs it, which is imported when called."""

app = typer.Typer(
    name="normattn",
    help=HELP,
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


@app.callback(help=HELP)
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    pass


def _add(name: str, kind: type[Any], target: str) -> None:
    """Add a command; `--help` waits for no library, for the function is imported when called."""
    module, _, function = target.partition(":")

    def work(given: Any) -> int | None:
        found: int | None = getattr(importlib.import_module(f"normattn.cli.{module}"), function)(
            given
        )
        return found

    # Arguments of lm-eval are the harness's own, which has its own checks.
    foreign = kind is model_options.LmEval
    app.command(
        name,
        epilog=kind.epilog,
        cls=TyperCommand if foreign else CheckedCommand,
        context_settings={"ignore_unknown_options": True} if foreign else None,
    )(command_of(kind, work))


for _name, (_kind, _target) in COMMANDS.items():
    _add(_name, _kind, _target)
app.add_typer(reproduce.app, name="reproduce")


@app.command("_cell", hidden=True, cls=CheckedCommand)
def _cell(
    directory: Path,
    study: Annotated[str, typer.Option("--study")],
    parent: Annotated[int, typer.Argument()] = 0,
) -> None:
    """Run the part of a sweep in `directory`; stop when the process `parent` is gone."""
    from normattn.lab.studies import errors_in, find_typed
    from normattn.lab.sweep.runner import run_child

    found = find_typed(study)
    with errors_in(found):
        code = run_child(directory, found, parent)
    if code:
        raise typer.Exit(code)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 2 a mistake in the input, 3 diverged, 130 stopped.

    What is wrong with the input is one sentence on stderr; a traceback is always our own bug.
    Signals are handled by `normattn.stopping`.
    """
    code = 0
    try:
        result = app(args=arguments, standalone_mode=False)
        code = result if isinstance(result, int) else 0
        sys.stdout.flush()
    except BrokenPipeError:
        code = 1  # The reader of our output (head, less) has gone: that is not an error of ours.
    except (Exception, KeyboardInterrupt) as error:
        if asked_to_stop():
            raise  # `normattn.stopping` answers whatever error a stop ended in.
        known = exit_code_of(error)
        if known is None:
            raise
        code = known
    finally:
        _let_go_of_stdout()
    sys.exit(code)


def _let_go_of_stdout() -> None:
    """Drop what stdout does not take: Python would write it once more at its end, and complain."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
