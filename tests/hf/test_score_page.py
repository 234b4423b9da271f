"""The page of scores says what tiny models of families say; what cannot be read says why."""

from __future__ import annotations

import re

import pytest

from normattn import score_of

from .matrix import PAGE
from .score_page import page, row
from .tiny import build

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
)


def test_the_page_says_what_the_models_say() -> None:
    written = PAGE.read_text(encoding="utf-8")
    families, read = re.findall(r"Of (\d+) families, (\d+)\s+are identified", written)[0]
    assert int(families) >= 130
    assert int(read) >= 115
    for line in page({family: row(family) for family in SAMPLE}).splitlines():
        if line.startswith("| ") and "family" not in line:
            assert line in written


def test_layers_with_other_keys_than_tokens_say_so() -> None:
    said = str(score_of(build("deepseek_v4")))
    assert re.search("reads 60 keys of 48 tokens", said)


@pytest.mark.parametrize("family", ["afmoe", "doge"])
def test_layers_that_name_their_mask_are_recorded(family: str) -> None:
    assert score_of(build(family)).layers
