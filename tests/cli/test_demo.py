"""`normattn demo`: plain RoPE collapses past its training length, and the methods rescue it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cli.conftest import Command
from normattn.lab.demo import demo_model, demo_windows, read

ROOT = Path(__file__).parents[2]


def test_methods_rescue_what_collapses() -> None:
    readings = {each.label: each for each in read(demo_windows(windows=2))}
    collapsed = readings["plain RoPE, unmodified"]
    assert collapsed.far < collapsed.near / 2
    for rescued in ("plain RoPE, with YaRN", "plain RoPE, with ReRoPE", "KeyNorm, unmodified"):
        assert readings[rescued].far > 2 * collapsed.far


@pytest.mark.thorough
def test_the_numbers_of_the_readme() -> None:
    """All windows: the README's three rows, and what no method leaves behind."""
    readings = {each.label: each for each in read(demo_windows())}
    rows = re.findall(
        r"^\| ((?:plain RoPE|KeyNorm), .*?) \| ([\d.]+) \| ([\d.]+) \|$",
        (ROOT / "README.md").read_text("utf-8"),
        re.MULTILINE,
    )
    assert len(rows) == 3
    for label, near, far in rows:
        assert readings[label].near == pytest.approx(float(near), abs=0.15)
        assert readings[label].far == pytest.approx(float(far), abs=0.15)


def test_the_models_differ_in_their_keys_alone() -> None:
    plain, keys = demo_model("Baseline"), demo_model("KNA")
    assert [each.config.score.variant_name for each in (plain, keys)] == ["Baseline", "KNA"]
    changed = plain.config.model_copy(update={"score": keys.config.score})
    assert changed == keys.config


def test_the_command_writes_a_report_of_a_text_of_ones_own(
    command: Command, tmp_path: Path
) -> None:
    text = tmp_path / "book.txt"
    text.write_text("def add(a, b):\n    return a + b\n" * 130)
    said = command.done("demo", "--text", text, "--windows", 1, "--out", tmp_path / "out")
    assert "In short" in said.out
    assert str(tmp_path / "out" / "report.html") in said.out
    tables = json.loads((tmp_path / "out" / "table.json").read_text("utf-8"))
    assert len(tables["tables"]["demo"]) == 6
    assert "<html" in (tmp_path / "out" / "report.html").read_text("utf-8")
    text.write_text("too short")
    short = command("demo", "--text", text, "--out", tmp_path / "none")
    assert short.code == 2
    assert "1,025" in short.err
    assert len(short.err.strip().splitlines()) == 1
    assert not (tmp_path / "none").exists()
    assert command("demo", "--text", tmp_path / "no.txt").code == 2
