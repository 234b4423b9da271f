"""`normattn demo`: plain RoPE collapses past its training length, and the methods rescue it."""

from __future__ import annotations

import json
from pathlib import Path

from cli.conftest import Command
from normattn.lab.demo import demo_model, demo_windows, read


def test_the_collapse_and_the_rescue() -> None:
    readings = read(demo_windows(windows=3))
    far = {(each.model, each.method): each.far for each in readings}
    assert readings[0].near > 20
    assert far["Baseline", ""] < readings[0].near / 2
    for rescued in (("Baseline", "YaRN(factor=8)"), ("Baseline", "ReRoPE"), ("KNA", "")):
        assert far[rescued] > 2 * far["Baseline", ""]


def test_the_models_differ_in_their_keys_alone() -> None:
    plain, keys = demo_model("Baseline"), demo_model("KNA")
    assert [each.config.score.variant_name for each in (plain, keys)] == ["Baseline", "KNA"]
    changed = plain.config.model_copy(update={"score": keys.config.score})
    assert changed == keys.config


def test_the_command_writes_a_report(command: Command, tmp_path: Path) -> None:
    said = command("demo", "--windows", 1, "--out", tmp_path / "out")
    assert said.code == 0, said.err
    assert "In short" in said.out
    assert str(tmp_path / "out" / "report.html") in said.out
    tables = json.loads((tmp_path / "out" / "table.json").read_text("utf-8"))
    assert len(tables["tables"]["demo"]) == 6
    assert "<html" in (tmp_path / "out" / "report.html").read_text("utf-8")


def test_a_text_of_ones_own(command: Command, tmp_path: Path) -> None:
    text = tmp_path / "book.txt"
    text.write_text("def add(a, b):\n    return a + b\n" * 400)
    said = command("demo", "--text", text, "--out", tmp_path / "out")
    assert said.code == 0, said.err
    text.write_text("too short")
    short = command("demo", "--text", text, "--out", tmp_path / "none")
    assert short.code == 2
    assert "1,025" in short.err
    assert len(short.err.strip().splitlines()) == 1
    assert not (tmp_path / "none").exists()
    assert command("demo", "--text", tmp_path / "no.txt").code == 2
