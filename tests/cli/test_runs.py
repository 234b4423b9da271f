"""`normattn generate`, `evaluate` and `inspect` of a finished run, and what they refuse."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from cli.conftest import TINY
from normattn.lab.data.retrieval import TASKS
from normattn.lab.data.tokeniser import Tokeniser
from normattn.lab.diagnostics.inspection import by_head, by_position
from normattn.lab.diagnostics.lines import read_diagnostics
from normattn.lab.stats import measurements
from normattn.lab.studies.language import candidates, supported_methods
from normattn.lab.training import TrainingConfig, train_model
from normattn.lab.training.init_from import Continuation
from normattn.models.pretrained import load_model
from normattn.score import ScoreSpec
from studies.conftest import Command


def test_answers(command: Command, trained: Path, tmp_path: Path) -> None:
    plain = command.done("generate", trained, "--prompt", "word1 word2", "--max-new-tokens", 6)
    assert plain.out
    file = tmp_path / "prompt.txt"
    file.write_text("word1 word2")
    assert command("generate", trained, "--file", file, "--max-new-tokens", 6).out == plain.out
    both = ("--prompt", "word3", "--file", file, "--max-new-tokens", 6)
    two = command("generate", trained, *both)
    assert two.out.startswith("> word3\n")
    assert two.out.endswith(f"\n\n> word1 word2\n{plain.out}")


def test_a_seed_decides_what_is_drawn(command: Command, trained: Path) -> None:
    arguments = ("generate", trained, "--prompt", "word1", "--temperature", 2, "--top-p", 0.99)
    first, again, other = (
        command.done(*arguments, "--max-new-tokens", 12, "--seed", seed).out for seed in (3, 3, 4)
    )
    assert first == again != other


@pytest.mark.parametrize("method", ["ReRoPE-logn+", "YaRN(factor=4)"])
def test_a_method_decides_on_long_texts(command: Command, trained: Path, method: str) -> None:
    """The text is that of full forwards under the method, one for each token."""
    prompt, config = "word1 word2 word3 " * 12, json.loads((trained / "config.json").read_text())
    tokeniser = Tokeniser.load(trained / "tokeniser.json")
    model = load_model(trained / "model")
    ids = tokeniser.encode(prompt)
    assert len(ids) > config["config"]["model"]["train_length"]
    factor = (len(ids) + 4) / model.config.train_length
    spec = model.config.score.with_method(method).resolve(factor=factor)
    with model.using(spec), torch.no_grad():
        for _ in range(4):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    options = ("--method", method, "--max-new-tokens", 4)
    said = command.done("generate", trained, "--prompt", prompt, *options)
    assert said.out == tokeniser.decode(ids[-4:]) + "\n"


def test_runs_without_answers(command: Command, trained: Path, run: Path, tmp_path: Path) -> None:
    (run / "tokeniser.json").unlink()
    assert "tokeniser.json is missing" in command("generate", run, "--prompt", "a").sentence
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    said = command("generate", trained, "--file", tmp_path / "latin.txt")
    assert "not UTF-8" in said.sentence


def test_generated_tokens_are_no_text(command: Command, tmp_path: Path) -> None:
    preset, run = tmp_path / "synthetic.toml", tmp_path / "run"
    text = TINY.format(corpus="synthetic:copy")
    preset.write_text(text.replace(", test_fraction = 0.3", ""))
    command.done("train", "--preset", preset, "--length", 64, "--out", run)
    said = command("generate", run, "--prompt", "a")
    assert "generated tokens of synthetic:copy" in said.sentence


# `evaluate`.
def records(run: Path) -> dict[str, int]:
    """Each record's name and when it was written."""
    return {path.name: path.stat().st_mtime_ns for path in run.glob("evaluations/*.parquet")}


def test_retrieval_and_reading_on(command: Command, run: Path, tmp_path: Path) -> None:
    evaluate = ("evaluate", run, "--protocols", "retrieval,by-position", "--max-windows", 5)
    lengths = (*evaluate, "--methods", "as is,ReRoPE", "--multiples")
    result = command.done(*lengths, "8,16")
    shown = ("KNA-ReRoPE", "by position, 128 tokens", "multi_key", "In short", str(run / "report"))
    assert all(text in result.out for text in shown)
    first = records(run)
    assert len(first) == 2 * (1 + len(TASKS) * 2)
    assert command(*lengths, "8,16").out == result.out
    assert (run / "report" / "table.md").exists()
    assert records(run) == first
    # A length in between changes neither the shortest nor the longest evaluation: both are reused.
    command.done(*lengths, "8,12,16")
    assert first.items() <= records(run).items()
    assert len(records(run)) == 2 * (1 + len(TASKS) * 3)

    out = tmp_path / "report"
    command.done("report", run, "--out", out)
    page = (out / "table.md").read_text()
    for heading in ("Accuracy by position", "Loss by position", "Facts inserted into a long text"):
        assert f"## {heading}" in page
    tables = json.loads((out / "table.json").read_text())["tables"]
    for name in ("accuracy_by_position", "loss_by_position", "retrieval"):
        assert [line["row"] for line in tables[name]] == ["KNA", "KNA-ReRoPE"], name
    cells = [*product(tables["retrieval"], TASKS, ("exact", "token"), (64, 96, 128))]
    for line, task, what, length in cells:
        cell = line[f"{task}_{what}_{length}"]
        assert 0 <= cell["value"] <= 100
        assert cell["low"] is None  # One sample, a fifth of --max-windows, has no interval.
    # What no table shows, the depths of every task and length, is in the frame.
    measured = measurements.read(out / measurements.FILE)
    asked = measured.filter(protocol="retrieval", statistic="exact")
    assert asked.unique(("method", "factor.task", "length", "bin")).height == len(cells) // 2 * 5
    names = {path.name for path in (out / "figures").iterdir()}
    assert names >= {"reading_by_position_KNA.png", *(f"retrieval_{task}.png" for task in TASKS)}


def test_every_method(command: Command, run: Path) -> None:
    arguments = ("--protocols", "by-position", "--multiples", "1,4", "--max-windows", 1)
    said = command.done("evaluate", run, *arguments, "--methods", "all,YaRN(factor=2)")
    spec = ScoreSpec.parse("KNA", train_length=8)
    methods, sentences = supported_methods(spec, candidates(), 4.0)
    assert "ReRoPE-logn+" in methods
    assert len(records(run)) == 1 + len(methods) + 1
    for sentence in sentences:
        assert sentence in said.out


# `inspect`.
def test_a_run_is_looked_into(command: Command, tiny: Path, tmp_path: Path) -> None:
    probed, options = tmp_path / "run", ("--score", "QKRMSNorm-logn", "--set", "inspect_every=2")
    command.done("train", "--preset", tiny, *options, "--out", probed)
    lines = read_diagnostics(probed)
    assert [line.step for line in lines] == [1, 2, 4]
    said = command.done("inspect", probed, "--windows", 3, "--cosines")
    assert "QKRMSNorm-logn, unmodified: 3 windows of 8 held-out tokens" in said.out
    assert re.search(r"sharpest head is head \d of layer 0: its entropy is \d+% of ln n", said.out)
    folder = probed / "inspection"
    # Neither a learned sink nor anything beyond the training length is there to be drawn.
    stems = ("layers_entropy_share", "layers_largest", "layers_first_mass", "positions")
    figures = {f"{stem}.png" for stem in (*stems, "training", "attention")}
    assert {path.name for path in (folder / "figures").iterdir()} == figures
    measured = measurements.read(folder / measurements.FILE)
    assert measured["row"].unique().to_list() == ["QKRMSNorm-logn"]
    assert {"q_normed", "cosine", "attention"} <= set(measured["statistic"])
    assert measured.filter(protocol="training")["bin"].unique().sort().to_list() == [1, 2, 4]
    settings = json.loads((folder / "config.json").read_text())["config"]
    assert (settings["length"], settings["windows"]) == (8, 3)
    # The page is made again from its frame.
    made = {path: path.read_bytes() for path in folder.rglob("*.*")}
    command.done("report", folder)
    assert {path: path.read_bytes() for path in folder.rglob("*.*")} == made


@pytest.fixture
def text(tmp_path: Path) -> Path:
    text = tmp_path / "text.txt"
    text.write_text("word1 word2 word3 word4 " * 20)
    return text


def test_a_text_of_ones_own(command: Command, trained: Path, text: Path, tmp_path: Path) -> None:
    inspect = ("inspect", trained, "--text", text, "--length", 32, "--attention", "0,1")
    looks = []
    for method in ("unmodified", "ReRoPE"):
        folder = tmp_path / method
        command.done(*inspect, "--method", method, "--out", folder)
        assert (folder / "figures" / "attention.png").exists()
        measured = measurements.read(folder / measurements.FILE)
        shares = ("beyond_share", "angle_share")
        looks.append({name: by_position(measured, name, 0) for name in shares})
        settings = json.loads((folder / "config.json").read_text())["config"]
        # The text holds fewer than the sixteen that are read at most.
        assert settings["windows"] < 16
        assert f"{settings['windows']} windows of 32 tokens" in (folder / "table.md").read_text()
        (row,) = json.loads((folder / "table.json").read_text())["tables"]["table"]
        expected = by_head(measured, "beyond_mass", 0).mean()
        assert row["beyond_mass"]["value"] == pytest.approx(expected)
    plain, rectified = looks
    assert (plain["beyond_share"] == rectified["beyond_share"]).all()
    assert plain["beyond_share"].max() > 0.5
    assert plain["angle_share"].max() > 0
    assert rectified["angle_share"].max() == 0
    assert not (trained / "inspection").exists()


def test_angles_that_are_new(command: Command, trained: Path, text: Path, tmp_path: Path) -> None:
    """Of sixteen bins of two positions those before the first new angle, at L = 8."""
    options = ("--text", text, "--length", 32)
    for method, expected in {"unmodified": 4, "PI(factor=4)": 14, "PI(factor=2)": 7}.items():
        out = tmp_path / method
        command.done("inspect", trained, *options, "--method", method, "--out", out)
        known = by_position(measurements.read(out / measurements.FILE), "angle_share", 0)[0] == 0
        assert known.tolist().index(False) == expected
    # A run that continued has met more of them: nothing is said of it.
    settings = json.loads((trained / "config.json").read_text())["config"]
    went_on = Continuation.from_model(trained / "model", "PI(factor=4)", 32)
    parsed = TrainingConfig.parse({**settings, "continued": went_on.model_dump()})
    train_model(parsed, tmp_path / "run", show_progress=False)
    command.done("inspect", tmp_path / "run", *options)
    found = measurements.read(tmp_path / "run" / "inspection" / measurements.FILE)
    assert found.filter(statistic="entropy").height
    assert not {"angle_share", "beyond_share"} & {*found["statistic"]}


@pytest.mark.parametrize("words", [("generate", "--prompt", "a"), ("inspect",), ("export", "OUT")])
def test_only_finished_runs_serve(command: Command, run: Path, tmp_path: Path, words: Any) -> None:
    name, *rest = (tmp_path / "out" if word == "OUT" else word for word in words)
    assert re.search(r"no config\.json|a run directory", command(name, tmp_path, *rest).sentence)
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps({**status, "state": "running"}))
    assert "only a finished run" in command(name, run, *rest).sentence
    stored = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**stored, "kind": "poem"}))
    assert "kind 'poem'" in command(name, run, *rest).sentence
    assert not (tmp_path / "out").exists()


def test_half_precision_on_a_named_device(command: Command, trained: Path, tmp_path: Path) -> None:
    for dtype in ("fp32", "bf16"):
        rest = ("--dtype", dtype, "--device", "cpu", "--windows", 2, "--out", tmp_path / dtype)
        said = command.done("inspect", trained, *rest)
        assert "In short" in said.out
        assert str(tmp_path / dtype / "report.html") in said.out
    tables = [json.loads((tmp_path / name / "table.json").read_text()) for name in ("fp32", "bf16")]
    entropies = [[row["entropy"]["value"] for row in t["tables"]["table"]] for t in tables]
    assert entropies[0] == pytest.approx(entropies[1], rel=0.05)
    assert entropies[0] != entropies[1]
