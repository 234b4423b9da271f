"""`normattn bench`: ours beside the peers, in one interleaved run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from normattn.cli import values

EPILOG = """
**Examples**

`normattn bench --list` – every suite with its goals; nothing is measured

`normattn bench` – all suites; stop it anywhere and rerun the command to resume

`normattn bench two-regime --lengths 4096 --profile` – and where the time of missed goals goes

`normattn bench --calibration` – which kernels are fastest on this machine, and where that is kept

`normattn bench --quick` – seconds, small sizes: shows that everything runs, claims nothing

Peers come with `pip install 'normattn[bench]'`.
"""


def command(
    suites: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SUITE]...", help="Suites to measure. [default: all]"),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Rounds behind each median. [default: 9]")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    lengths: Annotated[
        str | None,
        typer.Option(help="Tokens of the attention suites. [default: 4096,8192; a GPU: 512 … 32k]"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Records, table.md and figures. [default: runs/bench, -quick]"),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda. [default: cuda where there is one]")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A smoke run at small sizes.")] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Profile cases that miss their goal, by operation.")
    ] = False,
    listed: Annotated[
        bool, typer.Option("--list", help="List suites and goals, and exit.")
    ] = False,
    calibration: Annotated[
        bool,
        typer.Option(
            "--calibration", help="Show the times by which kernels are chosen here, and exit."
        ),
    ] = False,
) -> None:
    """Measure speed and memory beside the peers and compare them with the goals.

    Every case is one interleaved run: each entry once per round, medians over at least nine
    rounds, ratios with bootstrap intervals; a goal counts as met within 5 %. What is on record in
    OUT for the same machine, versions, source and settings is not measured again.
    """
    sizes = values.integers(lengths, "--lengths")

    from normattn.bench.runner import run_bench
    from normattn.bench.settings import Settings

    settings = Settings.of(rounds, threads, sizes, device, quick)
    if listed:
        from normattn.bench.listing import show
        from normattn.bench.suites import chosen

        show(chosen(suites or ()), settings)
        return
    if calibration:
        from normattn.bench.calibrating import calibrate

        calibrate(settings)
        return
    folder = out or Path("runs") / ("bench-quick" if quick else "bench")
    run_bench(suites or (), settings, folder, profile)
