"""Write the second table of docs/families.md: the score of each causal family of transformers.

python scripts/family_scores.py
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
import transformers

from hf.matrix import PAGE, SCORES, score_line, score_row
from hf.tiny import rotary_families

HEAD = """{mark}

Normalisation, rotation and scale were determined from a family's projections and the inputs of its
attention. `attention` with the named score is within 1e-5 of the layer's own. Of {families}
families, {read} are identified in every layer; for the others the table says what is missing.
Windows and training lengths are those of the tiny model. A note in parentheses says which keys the
layer's own mask selects by the text: pass that mask to `attention` as `attn_mask`.

`python scripts/family_scores.py` makes this table, and
`python scripts/family_matrix.py` the other.

"""


def main() -> int:
    """Make the page."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    before = PAGE.read_text("utf-8").split(SCORES)[0]
    scores = page({family: score_row(family) for family in rotary_families()})
    PAGE.write_text(before + scores, encoding="utf-8")
    return 0


def is_read(said: Sequence[str]) -> bool:
    """Whether the score of every layer is known."""
    return not any("not identified: " in line for line in said)


def page(rows: Mapping[str, Sequence[str]]) -> str:
    """The part of the page that holds the scores of all families."""
    head = HEAD.format(
        mark=SCORES, families=len(rows), read=sum(is_read(said) for said in rows.values())
    )
    lines = ["| family | score |", "| --- | --- |"]
    lines += [score_line(family, rows[family]) for family in sorted(rows)]
    return head + "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
