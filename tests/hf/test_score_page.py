"""The page of scores says what tiny models of families say; what cannot be read says why."""

from __future__ import annotations

import re

from .matrix import PAGE
from .score_page import page, row

# Plain, joined projections, latent keys, gates, an indexer, a mask of its own, and one not read.
SAMPLE = (
    "llama",
    "phi3",
    "deepseek_v3",
    "afmoe",
    "glm_moe_dsa",
    "doge",
    "diffllama",
    "gemma4_text",
    "deepseek_v4",
)


def test_the_page_says_what_the_models_say() -> None:
    written = PAGE.read_text(encoding="utf-8")
    families, read = re.findall(r"Of (\d+) families, (\d+)\s+are identified", written)[0]
    assert int(families) >= 130
    assert int(read) >= 115
    for line in page({family: row(family) for family in SAMPLE}).splitlines():
        if line.startswith("| ") and "family" not in line:
            assert line in written
