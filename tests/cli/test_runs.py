"""`normattn generate`, `evaluate` and `inspect` of a finished run, and what they refuse."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import polars as pl
import pytest
import torch

from cli.conftest import TINY, Command
from normattn.lab.data.retrieval import TASKS
from normattn.lab.data.tokeniser import Tokeniser
from normattn.lab.diagnostics.inspection import by_head, by_position
from normattn.lab.diagnostics.lines import read_diagnostics
from normattn.lab.stats import measurements
from normattn.lab.studies.methods import candidates, supported_methods
from normattn.lab.training import TrainingConfig, train_model
from normattn.lab.training.init_from import Continuation
from normattn.models.pretrained import load_model
from normattn.score import ScoreSpec
from studies.conftest import run as run_command


def test_answers(command: Command, trained: Path, tmp_path: Path) -> None:
    plain = command.done("generate", trained, "--prompt", "word1 word2", "--max-new-tokens", 6)
    assert plain.out
    file = tmp_path / "prompt.txt"
    file.write_text("word1 word2")
    assert command("generate", trained, "--file", file, "--max-new-tokens", 6).out == plain.out
    two = command(
        *("generate", trained, "--prompt", "word3", "--file", file, "--max-new-tokens", 6)
    )
    assert two.out.startswith("> word3\n")
    assert two.out.endswith(f"\n\n> word1 word2\n{plain.out}")


def test_a_seed_decides_what_is_drawn(command: Command, trained: Path) -> None:
    arguments = ("generate", trained, "--prompt", "word1", "--temperature", 2, "--top-p", 0.99)
    first = command.done(*arguments, "--seed", 3, "--max-new-tokens", 12)
    assert command(*arguments, "--seed", 3, "--max-new-tokens", 12).out == first.out
    assert command(*arguments, "--seed", 4, "--max-new-tokens", 12).out != first.out


@pytest.mark.parametrize("method", ["ReRoPE-logn+", "YaRN(factor=4)"])
def test_a_method_decides_beyond_the_training_length(
    command: Command, trained: Path, method: str
) -> None:
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


def test_runs_that_cannot_answer(
    command: Command, trained: Path, run: Path, tmp_path: Path
) -> None:
    (run / "tokeniser.json").unlink()
    assert "tokeniser.json is missing" in command("generate", run, "--prompt", "a").sentence
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    said = command("generate", trained, "--file", tmp_path / "latin.txt")
    assert "not UTF-8" in said.sentence


def test_generated_tokens_are_no_text(command: Command, tmp_path: Path) -> None:
    preset = tmp_path / "synthetic.toml"
    preset.write_text(TINY.format(corpus="synthetic:copy"))
    run = tmp_path / "run"
    command.done("train", "--preset", preset, "--length", 64, "--out", run)
    said = command("generate", run, "--prompt", "a")
    assert "generated tokens of synthetic:copy" in said.sentence


# `evaluate`.
def records(run: Path) -> dict[str, int]:
    """Each record's name and when it was written."""
    return {path.name: path.stat().st_mtime_ns for path in run.glob("evaluations/*.parquet")}


def test_retrieval_and_reading_on(command: Command, run: Path, tmp_path: Path) -> None:
    arguments = ("evaluate", run, "--protocols", "retrieval,by-position", "--max-windows", 5)
    said = command.done(*arguments, "--multiples", "8,16", "--methods", "as is,ReRoPE")
    for expected in (
        "KNA-ReRoPE",
        "by position, 128 tokens",
        "multi_key",
        "In short",
        str(run / "report"),
    ):
        assert expected in said.out
    first = records(run)
    assert len(first) == 2 * (1 + len(TASKS) * 2)
    again = command(*arguments, "--multiples", "8,16", "--methods", "as is,ReRoPE")
    assert again.out == said.out
    assert (run / "report" / "table.md").exists()
    assert records(run) == first
    # A length in between changes neither the shortest nor the longest evaluation: both are reused.
    command.done(*arguments, "--multiples", "8,12,16", "--methods", "as is,ReRoPE")
    assert first.items() <= records(run).items()
    assert len(records(run)) == 2 * (1 + len(TASKS) * 3)

    out = tmp_path / "report"
    command.done("report", run, "--out", out)
    page = (out / "table.md").read_text()
    for heading in ("Accuracy by position", "Loss by position", "Facts inserted into a long text"):
        assert f"## {heading}" in page
    for name in ("accuracy_by_position", "loss_by_position", "retrieval"):
        with (out / f"{name}.csv").open() as file:
            lines = list(csv.DictReader(file))
        assert [line["row"] for line in lines] == ["KNA", "KNA-ReRoPE"], name
    for line in lines:
        for task in TASKS:
            for name in (
                f"{task}_{what}_{n}" for what in ("exact", "token") for n in (64, 96, 128)
            ):
                assert 0 <= float(line[name]) <= 100
                # One sample, a fifth of --max-windows, has no interval.
                assert line[f"{name}_low"] == line[f"{name}_high"] == ""
    # What no table shows, the depths of every task and length, is in the frame.
    asked = pl.read_parquet(out / "measurements.parquet").filter(
        protocol="retrieval", statistic="exact"
    )
    cells = asked.select("method", "factor.task", "length", "bin").unique()
    assert cells.height == 2 * len(TASKS) * 3 * 5
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
SHARES = ("beyond_share", "angle_share")


@pytest.fixture(scope="module")
def probed(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run that was looked into while it trained."""
    out = tmp_path_factory.mktemp("probed") / "run"
    options = ("--score", "QKRMSNorm-logn", "--set", "inspect_every=2")
    assert run_command("train", "--preset", tiny, *options, "--out", out) == 0
    return out


def test_a_run_is_looked_into(command: Command, probed: Path) -> None:
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
    assert settings["length"] == 8
    assert settings["windows"] == 3


def test_the_page_is_made_again_from_its_frame(command: Command, probed: Path) -> None:
    folder = probed / "inspection"
    if not folder.exists():
        command("inspect", probed, "--windows", 3, "--cosines")
    made = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.*")}
    command.done("report", folder)
    again = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.*")}
    assert again == made


def test_a_text_of_ones_own_beyond_the_training_length(
    command: Command, trained: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("word1 word2 word3 word4 " * 20)
    looks = []
    for method in ("unmodified", "ReRoPE"):
        command.done(
            *("inspect", trained, "--text", text, "--length", 32, "--method", method),
            *("--out", tmp_path / method, "--attention", "0,1"),
        )
        folder = tmp_path / method
        assert (folder / "figures" / "attention.png").exists()
        measured = measurements.read(folder / measurements.FILE)
        looks.append({name: by_position(measured, name, 0) for name in SHARES})
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


def test_angles_that_are_new(command: Command, trained: Path, tmp_path: Path) -> None:
    """Of sixteen bins of two positions those before the first new angle, at L = 8."""
    text = tmp_path / "text.txt"
    text.write_text("word1 word2 word3 word4 " * 20)
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


def test_a_run_of_no_known_kind_is_not_looked_into(command: Command, run: Path) -> None:
    stored = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**stored, "kind": "poem"}))
    assert "a run of kind 'poem'" in command("inspect", run).sentence


@pytest.mark.parametrize("words", [("generate", "--prompt", "a"), ("inspect",), ("export", "OUT")])
def test_a_finished_run_alone_serves(
    command: Command, run: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    name, *rest = (tmp_path / "out" if word == "OUT" else word for word in words)
    assert re.search(r"no config\.json|a run directory", command(name, tmp_path, *rest).sentence)
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps({**status, "state": "running"}))
    assert "only a finished run" in command(name, run, *rest).sentence
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
