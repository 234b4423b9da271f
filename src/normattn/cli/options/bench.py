"""`normattn bench`: ours beside the peers, in one interleaved run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from normattn.cli.asking import argument, flag, option
from normattn.cli.values import integers

EPILOG = """
**Examples**

`normattn bench --list` – every suite with its goals; nothing is measured

`normattn bench` – all suites; stop it anywhere and rerun the command to resume

`normattn bench two-regime --lengths 4096 --profile` – and where the time of missed goals goes


`normattn bench --quick` – seconds, small sizes: shows that everything runs, claims nothing

Peers come with `pip install 'normattn[bench]'`.
"""


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Measure speed and memory beside the peers and compare them with the goals.

    Every case is one interleaved run: each entry once per round, medians over at least nine
    rounds, ratios with bootstrap intervals; a goal counts as met within 5 %. What is on record in
    OUT for the same machine, versions, source and settings is not measured again.
    """

    suites: list[str] | None = argument(
        None, metavar="[SUITE]...", help="Suites to measure. [default: all]"
    )
    rounds: int | None = option(None, min=1, help="Rounds behind each median. [default: 9]")
    threads: int = option(1, min=1, help="CPU threads.")
    lengths: tuple[int, ...] | None = option(
        None,
        read=integers,
        help="Tokens of the attention suites. [default: 4096,8192; a GPU: 512 … 32k]",
    )
    out: Path | None = option(
        None, help="Records, table.md and figures. [default: runs/bench, -quick]"
    )
    device: str | None = option(None, help="cpu or cuda. [default: cuda where there is one]")
    quick: bool = flag("--quick", "A smoke run at small sizes.")
    profile: bool = flag("--profile", "Profile cases that miss their goal, by operation.")
    listed: bool = flag("--list", "List suites and goals, and exit.")
