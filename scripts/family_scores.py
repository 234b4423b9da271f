"""Write the second table of docs/families.md: the score of each causal family of transformers.

python scripts/family_scores.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
import transformers

from hf.matrix import PAGE, SCORES
from hf.score_page import page, row
from hf.tiny import rotary_families


def main() -> int:
    """Make the page."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    before = PAGE.read_text("utf-8").split(SCORES)[0]
    scores = page({family: row(family) for family in rotary_families()})
    PAGE.write_text(before + scores, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
