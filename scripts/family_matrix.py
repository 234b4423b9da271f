"""Write docs/families.md: which methods extend each causal family of transformers, and why not.

    python scripts/family_matrix.py             every family, some minutes
    python scripts/family_matrix.py llama glm   only these; other rows stay

Exits with 1 if a method is accepted but computes something else.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
import transformers

from hf.matrix import METHODS, PAGE, SCORES, SERVED, read_page, row
from hf.tiny import rotary_families

HEAD = """# Which model works with which method, and which score does it have?

The first table shows which methods work with each causal family of transformers that has rotary
positions. [The second](#scores) names the score of each layer. Both come from tiny models with
random weights, made from a family's default configuration ({version}). A real model may have
another configuration: `normattn extend MODEL` and `normattn score MODEL` check the model itself.

## Methods

● works: the method has an effect, gives the same logits with a cache, and is undone exactly. Where
the family has transformers' own `yarn` and `linear`, the logits agree with those. A number is a
reason [below](#reasons).

"""


def main(families: list[str]) -> int:
    """Make the page."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    rows = read_page() if families and PAGE.exists() else {}
    scores = SCORES + PAGE.read_text("utf-8").split(SCORES)[1]
    for family in families or rotary_families():
        rows[family] = row(family)
        print(family, *(f"{name}: {result}" for name, result in rows[family].items()), sep="\n  ")
        matrix = page(rows, transformers.__version__)
        PAGE.write_text(f"{matrix}\n{scores}", encoding="utf-8")
    return int(any("WRONG" in result for results in rows.values() for result in results.values()))


def page(rows: Mapping[str, Mapping[str, str]], version: str) -> str:
    """The part of the page that holds the matrix."""
    reasons: list[str] = []
    counts = [str(sum(row[name] == SERVED for row in rows.values())) for name in METHODS]
    lines = ["| family | " + " | ".join(METHODS) + " |", "| --- " * (len(METHODS) + 1) + "|"]
    lines.append(f"| **of {len(rows)}** | {' | '.join(counts)} |")
    for family in sorted(rows):
        lines.append(f"| {family} | {' | '.join(_cells(rows[family], reasons))} |")
    below = [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]
    head = HEAD.format(version=f"transformers {version}")
    return head + "\n".join([*lines, "", "## Reasons", "", *below, ""])


def _cells(row: Mapping[str, str], reasons: list[str]) -> list[str]:
    found = []
    for name in METHODS:
        answer = " ".join(row[name].split())
        if answer == SERVED:
            found.append("●")
            continue
        if answer not in reasons:
            reasons.append(answer)
        found.append(str(reasons.index(answer) + 1))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
