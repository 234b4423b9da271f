"""`normattn list`: what a score can be made of."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list instead.")] = False,
) -> None:
    """List every part of a score: its name, equation, source, and when it enters.

    Names are joined by hyphens into a score: `KNA-logn` is trained, `KNA-logn-YaRN` is that model
    stretched afterwards.
    """
    from normattn.score import registry

    parts = [
        {
            "name": name,
            "slot": str(part.slot),
            "when": part.when,
            "summary": part.summary,
            "equation": part.equation,
            "source": part.source,
        }
        for name, part in registry.parts().items()
    ]
    if as_json:
        print(json.dumps(parts, indent=2, ensure_ascii=False))
    else:
        _show(parts)


def _show(parts: list[dict[str, str]]) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False)
    for slot in dict.fromkeys(part["slot"] for part in parts):
        console.print(f"\n[bold underline]{escape(slot)}[/]")
        for part in parts:
            if part["slot"] == slot:
                console.print(f"[bold cyan]{escape(part['name'])}[/]  [dim]{part['when']}[/]")
                for line in (part["summary"], part["equation"], part["source"]):
                    console.print(f"    {escape(line)}", soft_wrap=True)
