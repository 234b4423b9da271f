"""`normattn reproduce STUDY`: a published experiment, from data to its page.

The sub-commands are made of the studies themselves: a new study appears here by itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup, TyperOption

from normattn.cli import values
from normattn.cli.checked import Commands

if TYPE_CHECKING:
    from normattn.sweep.study import Study

GOES_ON = "Stop it anywhere and rerun the command to resume: the table is the same to the last bit."


Preset = Annotated[str, typer.Option(help="smoke, quick, laptop, …, or a TOML file of your own.")]
Choice = Annotated[str | None, typer.Option()]
Seeds = Annotated[
    str | None,
    typer.Option(help="A number of seeds (3: 0, 1, 2) or a list (7,8). [default: the preset's]"),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Cells at a time; changes no result. [default: one on each GPU, else one a core; all "
        "of them under a scheduler]",
    ),
]
LauncherName = Annotated[
    str,
    typer.Option(
        "--launcher",
        metavar="local|slurm|ray",
        help="Where cells run; changes no result. Its settings: --set launcher.partition=gpu.",
    ),
]
Out = Annotated[Path | None, typer.Option(help="[default: runs/STUDY-PRESET]", show_default=False)]
Models = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Another study's directory: a model that it trained with the very same settings is "
        "taken over, not trained again.",
        show_default=False,
    ),
]
Corpus = Annotated[
    str | None,
    typer.Option(help="Another corpus: a file or folder, hf:NAME. [default: its own]"),
]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any setting, as training.steps=100."),
]
Plan = Annotated[bool, typer.Option("--plan", help="Print the plan and exit.")]


class Studies(TyperGroup):
    """A group whose commands are the studies of the library, and files of one's own."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of the studies."""
        from normattn.studies import names

        return names()

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of one study; imports it only when it is asked for by name."""
        from normattn.studies import find

        return _command(find(cmd_name))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Every study with its question; none is imported for it."""
        from normattn.studies import names, summary

        formatter.write_usage(ctx.command_path, "STUDY [OPTIONS]")
        formatter.write_paragraph()
        formatter.write_text(self.help or "")
        with formatter.section("Studies"):
            formatter.write_dl([(name, summary(name)) for name in names()])
        formatter.write_text("STUDY --help says what it trains and measures, with examples.")


app = typer.Typer(
    cls=Studies,
    no_args_is_help=True,
    help="Run a published experiment from data to its page: one of these, or a FILE.py of your "
    "own.",
)


@app.callback()
def _group() -> None:
    """Run a published experiment from data to its page: one of these, or a FILE.py of your own."""


def _command(study: Study) -> Any:
    """The command line of one study, made of its value."""

    def run(
        preset: Preset = "laptop",
        variants: Choice = None,
        methods: Choice = None,
        seeds: Seeds = None,
        jobs: Jobs = None,
        launcher: LauncherName = "local",
        out: Out = None,
        models: Models = None,
        corpus: Corpus = None,
        changes: Changes = None,
        plan: Plan = False,
    ) -> None:
        from normattn.sweep import launch
        from normattn.sweep.run import reproduce
        from normattn.sweep.study import CORPUS, Request

        own, assigned = launch.apart(values.assignments(changes or []))
        request = Request(
            preset=preset,
            variants=values.names(variants, "--variants"),
            methods=values.names(methods, "--methods"),
            seeds=values.seeds(seeds),
            jobs=jobs,
            launcher=launch.launcher(launcher, own),
            out=out,
            models=models,
            changes={**({CORPUS: corpus} if corpus else {}), **assigned},
        )
        if reproduce(study, request, only_plan=plan):
            raise typer.Exit(2)

    one = Commands(rich_markup_mode="markdown", add_completion=False)
    one.command(study.name, help=study.help, epilog=_epilog(study))(run)
    command = typer.main.get_command(one)
    for parameter in command.params:
        if isinstance(parameter, TyperOption) and parameter.name in ("variants", "methods"):
            parameter.help = getattr(study, parameter.name)
            parameter.hidden = not parameter.help
    return command


def _epilog(study: Study) -> str:
    lines = [
        f"`normattn reproduce {study.name} {arguments}`".replace(" `", "`") + f" – {description}"
        for arguments, description in study.examples
    ]
    return "\n\n".join(("**Examples**", *lines, GOES_ON))
