"""What docs/quick.md says of the README's first command is what was published of it."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from normattn.lab.studies.keynorm import METHODS, VARIANTS
from normattn.score.spec import UNMODIFIED

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
RESULTS = (ROOT / "docs" / "keynorm.md").read_text("utf-8")
PAGE = (ROOT / "docs" / "quick.md").read_text("utf-8")


def published(folder: str) -> dict[str, Any]:
    """What a folder's page says, as it was published."""
    return dict(json.loads((ROOT / "results" / folder / "table.json").read_text("utf-8")))


def rows(folder: str) -> dict[str, Any]:
    """The published numbers of a folder, by the row's name."""
    return {row["row"]: row for row in published(folder)["tables"]["table"]}


def table() -> list[str]:
    """The table of the page: what each score has at L, and what a longer context changes."""
    quick = rows("keynorm-quick")
    lines = []
    for variant in VARIANTS:
        changes = [quick[name(variant, method)]["change"]["value"] for method in METHODS]
        at_l = f"{quick[variant]['train']['value']:.1f}"
        lines.append(f"| {' | '.join([f'`{variant}`', at_l, *map(points, changes)])} |")
    return lines


def name(variant: str, method: str) -> str:
    return variant if method == UNMODIFIED else f"{variant}-{method}"


def points(value: float) -> str:
    return f"{value:+.1f}".replace("-", "−")


def interval(estimate: Mapping[str, float]) -> str:
    value, low, high = (points(estimate[part]) for part in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def test_the_first_command_is_what_made_the_folder() -> None:
    command = README.split("<!-- command 1: reproduce -->\n```bash\n")[1].split("\n```")[0]
    assert command.endswith(".venv/bin/normattn reproduce keynorm --preset quick")
    assert "normattn reproduce keynorm --preset quick`" in page("table.md")
    resolved = json.loads((ROOT / "results/keynorm-quick/config.json").read_text("utf-8"))
    assert holds(resolved["config"], written("quick"))
    assert {name(variant, method) for variant in VARIANTS for method in METHODS} == set(
        rows("keynorm-quick")
    )


def page(file: str) -> str:
    return (ROOT / "results" / "keynorm-quick" / file).read_text("utf-8")


def written(preset: str) -> dict[str, Any]:
    """What the preset's file says of training and evaluation."""
    settings = tomllib.loads(
        (resources.files("normattn.lab.studies") / "presets" / f"{preset}.toml").read_text("utf-8")
    )
    return {group: settings[group] for group in ("training", "evaluation")}


def holds(resolved: Mapping[str, Any], said: Mapping[str, Any]) -> bool:
    """Whether every setting that was said stands in what was resolved."""
    return all(
        holds(resolved[key], value) if isinstance(value, dict) else resolved[key] == value
        for key, value in said.items()
    )


def test_the_table_of_the_first_command_is_the_published_one() -> None:
    assert "\n".join(table()) in PAGE


def test_the_page_says_who_gains() -> None:
    """Its first lines: Baseline loses, every score with normalised keys gains."""
    quick = rows("keynorm-quick")
    assert quick["Baseline"]["change"]["high"] < 0
    for variant in ("KNA", "KNA-logn", "CosA", "CosA-logn"):
        assert quick[variant]["change"]["low"] > 0
