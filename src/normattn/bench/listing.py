"""Suites, cases and goals as they would be measured."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from normattn.bench.case import Suite
from normattn.bench.settings import Settings


def show(suites: Sequence[Suite], settings: Settings) -> None:
    """Print every suite with its cases and their goals; nothing is measured."""
    console = Console(highlight=False)
    for suite in suites:
        console.print(f"\n{suite.name}", style="bold cyan", markup=False)
        console.print(f"    {suite.summary}", markup=False, soft_wrap=True)
        for case in suite.cases(settings):
            console.print(f"    {case.name}", style="bold", markup=False, soft_wrap=True)
            for goal in case.goals:
                text = f"        {goal.ours} / {goal.peer}, {goal.of}: {goal}"
                console.print(text, markup=False, soft_wrap=True)
