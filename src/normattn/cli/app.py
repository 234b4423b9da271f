"""The `normattn` command: sub-commands and exit codes."""

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
from normattn.cli.parsing import CheckedCommand, make_command
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
    "verify": (model_options.Verify, "engines:verify_engine"),
    "score": (model_options.Score, "engines:name_scores"),
    "generate": (options.Generate, "generate:generate_text"),
    "export": (options.Export, "export:export_run"),
    "inspect": (options.Inspect, "inspect:inspect_model"),
    "report": (options.Report, "report:report_folders"),
    "lm-eval": (model_options.LmEval, "harness:run_harness"),
}
"""The options of each command, and its function, which is imported when called."""

app = typer.Typer(
    name="normattn",
    help=HELP,
    epilog=EPILOG,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(requested: bool) -> bool:
    if requested:
        from normattn import __version__

        print(__version__)
        raise typer.Exit
    return requested


@app.callback(help=HELP)
def _root(
    version: bool = typer.Option(
        False,
        "--version",
        callback=_print_version,
        is_eager=True,
        help="Print the version and exit.",
    ),
) -> None:
    pass


def _add_command(name: str, options_class: type[Any], target: str) -> None:
    """Add a command whose module is imported when it is called, so that `--help` is fast."""

    def run(options: Any) -> Any:
        module_name, _, function_name = target.partition(":")
        module = importlib.import_module(f"normattn.cli.{module_name}")
        return getattr(module, function_name)(options)

    # lm-eval passes its arguments to the harness, which checks them.
    passes_on = options_class is model_options.LmEval
    app.command(
        name,
        epilog=f"\n**Examples**\n{options_class.examples}",
        cls=TyperCommand if passes_on else CheckedCommand,
        context_settings={"ignore_unknown_options": True} if passes_on else None,
    )(make_command(options_class, run))


for _name, _entry in COMMANDS.items():
    _add_command(_name, *_entry)
app.add_typer(reproduce.app, name="reproduce")


@app.command("_cell", hidden=True, cls=CheckedCommand)
def _cell(
    directory: Path,
    study: Annotated[str, typer.Option("--study")],
    parent: Annotated[int, typer.Argument()] = 0,
) -> None:
    """Run the cell of a sweep in `directory`; stop when the process `parent` has ended."""
    from normattn.lab.studies import find_typed
    from normattn.lab.sweep.runner import run_child

    code = run_child(directory, find_typed(study), parent)
    if code:
        raise typer.Exit(code)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 or 2 not done, 3 diverged, 130 stopped.

    2 is bad input or a failed run, 1 any other failure. Bad input is one sentence on stderr; a
    traceback is a bug of normattn. `normattn.stopping` handles signals.
    """
    code = 0
    try:
        result = app(args=arguments, standalone_mode=False)
        code = result if isinstance(result, int) else 0
        sys.stdout.flush()
    except BrokenPipeError:
        code = 1  # The reader of the output (head, less) has exited; no error to report.
    except (Exception, KeyboardInterrupt) as error:
        if asked_to_stop():
            raise  # `normattn.stopping` handles any error that a stop caused.
        error_code = exit_code_of(error)
        if error_code is None:
            raise
        code = error_code
    finally:
        try:
            sys.stdout.flush()
        except OSError:
            # Discard what stdout refuses: Python would retry at exit and print an error.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)
