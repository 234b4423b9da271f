"""`normattn reproduce STUDY`: run a published experiment, from data to report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup, TyperOption

from normattn.cli.parsing import (
    CheckedCommand,
    flag,
    make_command,
    names,
    option,
    seeds,
    setting,
    settings,
    settings_option,
)
from normattn.errors import InputError

if TYPE_CHECKING:
    from normattn.lab.studies.base import Study

RESUMES = "Stop it at any time and rerun the command to resume: the table is bit-identical."


@dataclass(frozen=True, kw_only=True)
class ReproduceOptions:
    """The options of every study. The study defines the help of `variants` and `methods`."""

    preset: str = option(
        "laptop", "Settings of the training runs: smoke, laptop, …, or your own TOML file."
    )
    variants: tuple[str, ...] | None = option(None, read=names)
    methods: tuple[str, ...] | None = option(None, read=names)
    seeds: tuple[int, ...] | None = option(
        None,
        "How many seeds (3: 0, 1, 2) or which (7,8; for one: 7,). [default: the preset's]",
        read=seeds,
    )
    jobs: int | None = option(
        None,
        "Runs at a time; changes no result. [default: one per GPU, or one per core; under a "
        "scheduler all]",
        min=1,
    )
    launcher: str = option(
        "local",
        "Where runs are executed; changes no result. Settings: --set launcher.partition=gpu.",
        metavar="local|slurm|ray",
    )
    out: Path | None = option(None, "Folder of runs and report. [default: runs/STUDY-PRESET]")
    corpus: str | None = setting(
        "training.data.corpus",
        "Another corpus: a file, a folder or hf:NAME. [default: the preset's]",
    )
    changes: dict[str, Any] | None = settings_option("Change any setting, e.g. training.steps=100.")
    plan: bool = flag("--plan", "Print the plan and exit.")


class Studies(TyperGroup):
    """A group whose commands are the studies of the library and files of custom studies."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the studies."""
        from normattn.lab.studies import names

        return names()

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of a study, which is imported here."""
        from normattn.lab.studies import find_typed

        return _command(find_typed(cmd_name))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print every study with its question, without importing them."""
        from normattn.lab.studies import names, summary

        formatter.write_usage(ctx.command_path, "STUDY [OPTIONS]")
        formatter.write_paragraph()
        formatter.write_text(self.help or "")
        with formatter.section("Studies"):
            formatter.write_dl([(name, summary(name)) for name in names()])
        formatter.write_text("STUDY --help says what it trains and measures, with examples.")


HELP = "Run an experiment from data to report: a published study, or your own FILE.py."
app = typer.Typer(cls=Studies, no_args_is_help=True, help=HELP)


@app.callback(help=HELP)
def _group() -> None:
    pass


def _command(study: Study) -> Any:
    def run(options: ReproduceOptions) -> None:
        from normattn.lab.sweep.clusters import launcher
        from normattn.lab.sweep.run import Request
        from normattn.lab.sweep.runner import reproduce

        given, prefix = settings(options), "launcher."
        own = {name.removeprefix(prefix): given[name] for name in given if name.startswith(prefix)}
        changes = {name: given[name] for name in given if not name.startswith(prefix)}
        if options.seeds is not None and "seeds" in changes:
            raise InputError("seeds is given both as an option and by --set")
        request = Request(
            preset=options.preset,
            variants=options.variants,
            methods=options.methods,
            seeds=options.seeds,
            jobs=options.jobs,
            launcher=launcher(options.launcher, own),
            out=options.out,
            changes=changes,
        )
        if reproduce(study, request, only_plan=options.plan):
            raise typer.Exit(2)

    examples = [
        f"`normattn reproduce {study.name} {arguments}`".replace(" `", "`") + f" – {description}"
        for arguments, description in study.examples
    ]
    epilog = "\n\n".join(("**Examples**", *examples, RESUMES))
    group = typer.Typer(rich_markup_mode="markdown", add_completion=False)
    group.command(study.name, help=study.help, epilog=epilog, cls=CheckedCommand)(
        make_command(ReproduceOptions, run)
    )
    command = typer.main.get_command(group)
    for parameter in command.params:
        if isinstance(parameter, TyperOption) and parameter.name in ("variants", "methods"):
            parameter.help = getattr(study, parameter.name)
            parameter.hidden = not parameter.help
    return command
