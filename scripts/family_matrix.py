"""Write docs/families.md: which methods extend each causal family of transformers, and why not.

    python scripts/family_matrix.py             every family, some minutes
    python scripts/family_matrix.py llama glm   only these; other rows stay

Exits with 1 if a method is accepted but computes something else.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
import transformers

from hf.matrix import PAGE, SCORES, page, read_page, row
from hf.tiny import rotary_families


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
