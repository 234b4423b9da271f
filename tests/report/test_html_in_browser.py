"""The report opened in Chromium at two widths: it draws, fits, sorts and shows more columns."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from normattn.lab.report.figures import Curves, Intervals
from normattn.lab.report.output import page_html

from . import examples

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="Chromium is not installed")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)

FRAME = """<!DOCTYPE html>
<body style="margin: 0">
<iframe src="report.html" width="{width}" height="1500" style="border: 0"></iframe>
<script>
setInterval(() => {{
  const page = document.querySelector("iframe").contentDocument.documentElement;
  if (page.dataset.seen) document.documentElement.dataset.seen = page.dataset.seen;
}}, 50);
</script>
"""
PROBE = Path(__file__).with_name("probe.js")


def chromium(page: Path, width: int, *more: str) -> str:
    """What Chromium prints for a page in a window of some width, with a profile of its own."""
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={page.parent / f'profile{width}'}"]
    command += [f"--window-size={width},1600", *more, page.as_uri()]
    told = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert told.returncode == 0, told.stderr
    return told.stdout


@pytest.fixture(scope="module", params=[1280, 390])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    page = tmp_path_factory.mktemp("page") / "report.html"
    text = page_html(examples.page())
    # An iframe has the wanted width even where the window cannot be made that narrow.
    probe = f"</title><script>{PROBE.read_text(encoding='utf-8')}</script>"
    page.write_text(text.replace("</title>", probe, 1), encoding="utf-8")
    frame = page.with_name("frame.html")
    frame.write_text(FRAME.format(width=request.param), encoding="utf-8")
    more = ("--allow-file-access-from-files", "--virtual-time-budget=60000", "--dump-dom")
    dom = chromium(frame, 1280, *more)
    match = re.search(r'data-seen="([^"]*)"', dom)
    assert match, dom[:2000]
    return json.loads(html.unescape(match[1]))


def test_the_report_draws_and_fits(seen: Any) -> None:
    assert seen["failures"] == []
    assert seen["overflow"] <= 0
    assert seen["numbers"] == 0
    assert len(seen["drawn"]) == len(examples.page().figures)
    assert min(seen["drawn"]) >= 3
    # Panels stand below each other where they would not fit; a grid of cells may scroll.
    panels = [isinstance(figure, Curves | Intervals) for figure in examples.page().figures]
    assert max(np.array(seen["scrolled"])[panels]) <= 0


def test_a_switch_shows_more_columns(seen: Any) -> None:
    assert seen["hidden"] == seen["shown"] == len(examples.table().rows) + 1


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    name = (
        "<img src=x onerror=\"document.title='broken'\">"
        "</script><script>document.title='broken'</script>"
    )
    page.write_text(page_html(examples.page(name)), encoding="utf-8")
    dom = chromium(page, 1280, "--dump-dom")
    assert "<title>broken" not in dom
    assert "&lt;img src=x onerror=" in dom  # as text
    assert not re.search(r"<img src=.?x", re.sub(r'"[^"]*"', '""', dom))
