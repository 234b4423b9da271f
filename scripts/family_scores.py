"""docs/family-scores.md: which causal family of transformers has which score.

python scripts/family_scores.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers
from tests.hf.score_page import PAGE, page, row
from tests.hf.tiny import rotary_families


def main() -> int:
    """Make the page."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    PAGE.write_text(page({family: row(family) for family in rotary_families()}), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
