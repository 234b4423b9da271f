"""The page of scores is what the tiny model of every family says."""

from __future__ import annotations

import pytest

from normattn import score_of

from .score_page import PAGE, is_read, page, row
from .tiny import build, rotary_families


def test_the_page_is_what_the_models_say() -> None:
    rows = {family: row(family) for family in rotary_families()}
    assert page(rows) == PAGE.read_text(encoding="utf-8")
    assert sum(is_read(said) for said in rows.values()) >= 115


@pytest.mark.parametrize("family", ["afmoe", "doge"])
def test_layers_that_name_their_mask_are_listened_to(family: str) -> None:
    assert score_of(build(family)).layers


def test_layers_with_other_keys_than_tokens_say_so() -> None:
    said = str(score_of(build("deepseek_v4")))
    assert "reads 60 keys of 48 tokens, so where its keys stand is not known" in said
