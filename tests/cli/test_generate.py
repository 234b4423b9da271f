"""`normattn generate`: what it prints, and what it refuses in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from cli.conftest import TINY, Command
from normattn.lab.data.tokeniser import Tokeniser
from normattn.models.pretrained import load_model


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
    assert "no config.json" in command("generate", tmp_path, "--prompt", "a").sentence
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps({**status, "state": "running"}))
    assert "only a finished run" in command("generate", run, "--prompt", "a").sentence
    (run / "status.json").write_text(json.dumps(status))
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
