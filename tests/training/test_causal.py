from __future__ import annotations

import json
from pathlib import Path

import pytest

from normattn.errors import InputError, Interrupted
from normattn.lab.data.tokeniser import Tokeniser
from normattn.lab.data.tokens import prepare_tokens
from normattn.lab.runs import read_metrics
from normattn.lab.training import train_model
from normattn.lab.training.tasks.text import TrainingConfig
from normattn.models import CausalLM
from normattn.models.pretrained import load_model

from .settings import small


def files(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def test_a_finished_run_is_returned_without_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(log_every=5)
    first = train_model(config, tmp_path / "run", show_progress=False)
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 5, 10, 12]
    assert set(records[0]) == {
        *("step", "loss", "accuracy", "gradient_norm", "learning_rate", "tokens"),
    }
    before = files(tmp_path / "run")

    def refuse(*_: object) -> None:
        raise AssertionError("data was prepared for a run that is done")

    monkeypatch.setattr(TrainingConfig, "prepare", refuse)
    assert train_model(config, tmp_path / "run", show_progress=False) == first
    assert files(tmp_path / "run") == before


def test_text_leaves_its_tokeniser_and_a_run_goes_on_with_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NORMATTN_CACHE", str(tmp_path / "cache"))
    corpus = tmp_path / "text"
    corpus.mkdir()

    def write(said: str) -> None:
        for i in range(40):
            (corpus / f"{i}.txt").write_text(f"document {i} {said} {i} times {i} is {i * i}\n" * 9)

    config = small(data={"corpus": str(corpus), "vocab_size": 300})
    write("says that")
    with pytest.raises(Interrupted):
        train_model(config, tmp_path / "run", should_stop=lambda: True, show_progress=False)
    write("holds another text, namely that")
    with pytest.raises(InputError, match=r"was begun on other data: .*corpus\.json"):
        train_model(config, tmp_path / "run", show_progress=False)
    write("says that")
    train_model(config, tmp_path / "run", show_progress=False)
    tokeniser = Tokeniser.load(tmp_path / "run" / "tokeniser.json")
    assert tokeniser.decode(tokeniser.encode("document 3 says")) == "document 3 says"
    assert isinstance(load_model(tmp_path / "run" / "model"), CausalLM)
    record = json.loads((tmp_path / "run" / "corpus.json").read_text())
    assert record == {"fingerprint": prepare_tokens(config.data).fingerprint, "sources": {}}
    assert "test split" not in capfd.readouterr().err
    config = small(data={"corpus": str(corpus), "vocab_size": 300, "test_fraction": 0.0})
    train_model(config, tmp_path / "all", show_progress=False)
    assert "the test split has no document" in capfd.readouterr().err
