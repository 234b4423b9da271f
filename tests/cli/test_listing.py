"""`normattn list` and `normattn demo`."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from normattn import InputError, ScoreSpec
from normattn.kernels import BACKENDS
from normattn.lab.demo import demo_model, demo_windows, read
from normattn.models.config import StackConfig
from normattn.score.compatibility import combinations, example, needs
from normattn.score.parts import parts
from studies.conftest import Command


@pytest.fixture
def listed(command: Command) -> dict[str, Any]:
    return {part["name"]: part for part in json.loads(command.done("list", "--json").out)}


def test_the_json_of_every_part(listed: dict[str, Any]) -> None:
    assert list(listed) == list(parts())
    for name, part in listed.items():
        assert all(part[word] for word in ("name", "slot", "when", "summary", "equation", "source"))
        assert part["attention"] in ("causal", "bidirectional", "either")
        assert set(part["kernels"]) == {"cpu float32", "cpu bfloat16", "cuda bfloat16"}
        kernels = {each for said in part["kernels"].values() for each in said.split(", ")}
        assert kernels <= set(BACKENDS) - {"auto"}
        fields = {field.name for field in dataclasses.fields(parts()[name])}
        assert {each["name"] for each in part["parameters"]} == fields
        for each in part["excludes"]:
            back = [other["part"] for other in listed[each["part"]]["excludes"]]
            assert name in back


def test_some_facts(listed: dict[str, Any]) -> None:
    assert listed["Baseline"]["kernels"]["cpu float32"] == "fused"
    assert listed["ReRoPE"]["attention"] == "causal"
    assert listed["QKBatchNorm"]["attention"] == "bidirectional"
    assert listed["ReRoPE"]["parameters"] == [{"name": "window", "default": None, "example": 128}]
    assert "YaRN" in listed["ALiBi"]["beside_rope"]
    excluded = {name: {e["part"]: e["why"] for e in listed[name]["excludes"]} for name in listed}
    assert {"NoPE", "ReRoPE", "HWFA"} <= excluded["YaRN"].keys()
    for name, others in {
        "RotateFirst": {"Baseline", "CoPE", "NEZHA", "NoPE", "PoPE", "XLNet", "XPos"},
        "Sink": {"Entmax", "Sigmoid", "StickBreaking"},
        "KNA": set(),
        "Packed": {"Chunked"},
    }.items():
        assert excluded[name].keys() == others
    why = excluded["NoPE"]["PI"]
    assert why.startswith("PI cannot be combined with NoPE: PI changes rotary positions")


def test_a_page_names_every_part(command: Command, listed: dict[str, Any]) -> None:
    shown = command("list").out.splitlines()
    assert len(shown) <= 110
    for name in listed:
        assert any(line.split()[:1] == [name] for line in shown), name
    assert any("Qwen3-Next" in line for line in shown)
    assert "normattn list NAME" in shown[-1]


def test_an_entry_tells_the_same(command: Command, listed: dict[str, Any]) -> None:
    for name in ("ReRoPE", "YaRN", "Baseline", "QKBatchNorm"):
        part, shown = listed[name], command("list", name).out
        others = [each["part"] for each in part["excludes"]]
        assert all(re.search(rf"(not with|,) {other}\b", shown) for other in others)
        assert all(field["name"] in shown for field in part["parameters"])
        assert all(part[each] in shown for each in ("name", "summary", "equation", "source"))
        served = shown.partition("runs on ")[2]
        for place, kernel in part["kernels"].items():
            assert place in served
            assert kernel in served


@pytest.mark.parametrize("setting", ["placement", "norm"])
def test_every_residual_connection_and_norm_has_an_entry(command: Command, setting: str) -> None:
    overview = command("list").out
    for name in get_args(get_type_hints(StackConfig)[setting]):
        assert name in overview
        (entry,) = json.loads(command("list", name, "--json").out)
        assert entry["setting"] == f"model.{setting}"
        assert entry["description"] in command("list", name).out


def test_entries_of_a_score_and_of_a_model(command: Command) -> None:
    names = [part["name"] for part in json.loads(command("list", "KNA-logn-YaRN", "--json").out)]
    assert names == ["KNA", "logn", "YaRN"]
    shown = command("list", "gpt-OSS").out
    assert shown.startswith("gpt-OSS: Baseline-RoPE(base=150000)-YaRN(")
    assert "Sink  sink, training-time" in shown
    clash = command("list", "KNA-YaRN-PI")
    assert (clash.code, clash.out) == (2, "")
    said = command("list", "YaRM")
    assert (said.code, said.out) == (2, "")
    assert "did you mean YaRN" in said.sentence


def test_what_is_said_to_be_excluded_is_refused() -> None:
    for name in parts():
        together = combinations(name)
        assert name in str(example(name)) or name == "RoPE"
        assert needs(name) in ("causal", "bidirectional", "either")
        for other in filter(name.__lt__, together.excludes):  # the others exclude it as well
            if "variant" in (parts()[name].slot, parts()[other].slot):
                continue
            text = "-".join(dict.fromkeys(("QKRMSNorm", name, other)))
            with pytest.raises(InputError, match=r"sense|combined"):
                ScoreSpec.parse(text, train_length=512).resolve(factor=8)


# `demo`: plain RoPE collapses past its training length, and the methods rescue it.
ROOT = Path(__file__).parents[2]


def test_methods_rescue_what_collapses_of_models_that_differ_in_their_keys_alone() -> None:
    plain, keys = (demo_model(name).config for name in ("Baseline", "KNA"))
    assert [each.score.variant_name for each in (plain, keys)] == ["Baseline", "KNA"]
    assert plain.model_copy(update={"score": keys.score}) == keys
    readings = {each.label: each for each in read(demo_windows(windows=2))}
    collapsed = readings["plain RoPE, unmodified"]
    assert collapsed.far < collapsed.near / 2
    for rescued in ("plain RoPE, with YaRN", "plain RoPE, with ReRoPE", "KeyNorm, unmodified"):
        assert readings[rescued].far > 2 * collapsed.far


@pytest.mark.thorough
def test_the_numbers_of_the_readme() -> None:
    """All windows: the README's three rows, and what no method leaves behind."""
    readings = {each.label: each for each in read(demo_windows())}
    row = r"^\| ((?:plain RoPE|KeyNorm), .*?) \| ([\d.]+) \| ([\d.]+) \|$"
    rows = re.findall(row, (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)
    assert len(rows) == 3
    for label, near, far in rows:
        assert readings[label].near == pytest.approx(float(near), abs=0.15)
        assert readings[label].far == pytest.approx(float(far), abs=0.15)


def test_a_report_of_a_text_of_ones_own(command: Command, tmp_path: Path) -> None:
    text = tmp_path / "book.txt"
    text.write_text("def add(a, b):\n    return a + b\n" * 130)
    said = command.done("demo", "--text", text, "--windows", 1, "--out", tmp_path / "out")
    assert "In short" in said.out
    assert str(tmp_path / "out" / "report.html") in said.out
    tables = json.loads((tmp_path / "out" / "table.json").read_text("utf-8"))
    assert len(tables["tables"]["demo"]) == 6
    assert "<html" in (tmp_path / "out" / "report.html").read_text("utf-8")
    text.write_text("too short")
    assert "1,025" in command("demo", "--text", text, "--out", tmp_path / "none").sentence
    assert not (tmp_path / "none").exists()
    assert command("demo", "--text", tmp_path / "no.txt").code == 2
