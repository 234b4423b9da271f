"""The command of lm-evaluation-harness, started with our model and our tasks."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from normattn.errors import InputError

TASKS = Path(__file__).parent / "tasks"
_INCLUDE = "--include_path"


def print_tasks_path() -> None:
    """Print the folder of our tasks."""
    sys.stdout.write(f"{TASKS}\n")


def run_harness(arguments: Sequence[str]) -> None:
    """`lm_eval ARGUMENTS…`, which knows `--model normattn` and the tasks `normattn…`.

    Raises `InputError` where the harness is not installed or finds no such task or model.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise InputError("this needs lm-evaluation-harness: pip install normattn[lm-eval]")
    given = list(arguments)
    if not given:
        raise InputError(
            "there is nothing to evaluate: give --model normattn --model_args run=RUN --tasks TASKS"
        )
    if not any(argument.split("=")[0] == _INCLUDE for argument in given):
        given += [_INCLUDE, str(TASKS)]
    from lm_eval.__main__ import cli_evaluate

    import normattn.cli.harness  # noqa: F401  # It registers the model.

    before = sys.argv
    sys.argv = ["lm_eval", *given]
    try:
        cli_evaluate()
    except ValueError as error:
        # The harness has no errors of its own for what a user mistyped.
        if isinstance(error, InputError) or not str(error).startswith(_MISTYPED):
            raise
        raise InputError(str(error).splitlines()[0]) from error
    finally:
        sys.argv = before


_MISTYPED = ("Tasks not found", "Attempted to load model", "No tasks specified", "Need to specify")
