"""What the site makes of the registry and of studies; building it whole is a check of its own."""

from __future__ import annotations

import runpy
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

PAGES = Path(__file__).parents[2] / "scripts" / "site_pages.py"


@pytest.fixture
def site() -> dict[str, Any]:
    return runpy.run_path(str(PAGES))


def test_a_part_page_tells_all_that_the_part_says(site: dict[str, Any]) -> None:
    page = site["_part_page"]("YaRN", site["parts"]()["YaRN"], "a caption")
    for said in (
        "θ' = ramp·θ/s + (1 − ramp)·θ",
        "[2309.00071](https://arxiv.org/abs/2309.00071)",
        "**Used by:** DeepSeek-V3",
        "low = ⌊dim(beta_fast)⌋",
        "| `beta_fast` | `32.0` |",
        "[NoPE](NoPE.md): YaRN on NoPE makes no sense",
        "| cpu float32 | fused |",
        "![a caption](figures/YaRN.png)",
    ):
        assert said in page, said


def test_a_study_gets_a_page_where_there_are_studies(
    site: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    package: Any = ModuleType("normattn.studies")
    package.__spec__ = ModuleSpec("normattn.studies", None)
    study = SimpleNamespace(help="Trains two models.", examples=(("--seeds 3", "three seeds"),))
    package.names = lambda: ["window"]
    package.summary = lambda name: f"What {name} asks."
    package.find = {"window": study}.__getitem__
    monkeypatch.setitem(sys.modules, "normattn.studies", package)
    ((place, page),) = site["study_pages"]()
    assert place == "study/window.md"
    assert page.startswith("# window\n\nWhat window asks.\n\nTrains two models.\n")
    assert "normattn reproduce window --seeds 3  # three seeds" in page
